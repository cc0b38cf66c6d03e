"""Are two formulas equal? Exactly for rational ones, to 400 digits for the rest, in bounded time for all.

A formula of + − × ÷ and whole powers is evaluated in a finite field of about 2^127 elements at a random point: no number ever grows, and
two different formulas agree by chance once in 10^35 (Zippel 1979; Schwartz 1980). All others are evaluated by mpmath at random points,
first to 80 digits, then to 400.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import mpmath

from verifier.math_parse import Node, Refused, Unreadable

PRIME = (1 << 127) - 1
MAX_BITS = 4096  # of an exact number
MAX_FACTORIAL = 10_000
MAX_POWER = 10**6  # of a real power; whole powers of rational formulas may be larger
DIGITS = (80, 400)
POINTS = 4
_INTEGER_NAMES = {"n", "m", "k", "j", "N", "M"}


class Irrational(Exception):
    """Not a formula of rational operations alone."""


class Undefined(Exception):
    """Division by zero, or a value where the formula has none."""


def symbols(node: Node) -> set[str]:
    """Names of the variables in a formula."""
    if node[0] == "sym":
        return {node[1]}
    return set().union(*(symbols(a) for a in node[1:] if isinstance(a, tuple))) if len(node) > 1 else set()


def exact(node: Node) -> Fraction:
    """The value of a rational formula without variables. Raises Irrational, Undefined or Refused."""
    value = _exact(node)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 16 * MAX_BITS:
        raise Refused("too many digits")
    return value


def _exact(node: Node) -> Fraction:
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind == "neg":
        return -exact(node[1])
    if kind in ("add", "mul", "div"):
        a, b = exact(node[1]), exact(node[2])
        if kind == "add":
            return a + b
        if kind == "mul":
            return a * b
        if not b:
            raise Undefined("division by zero")
        return a / b
    if kind == "pow":
        return _exact_power(exact(node[1]), exact(node[2]))
    if kind == "fact":
        return Fraction(math.factorial(_whole(exact(node[1]), 300)))
    if kind == "fn":
        return _exact_function(node[1], [exact(a) for a in node[2:]])
    raise Irrational(kind)


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base >= 0 and exponent.denominator <= 64 and abs(exponent.numerator) <= MAX_BITS:
            return _exact_power(_exact_root(base, exponent.denominator), Fraction(exponent.numerator))
        raise Irrational("root")
    n = exponent.numerator
    if base == 0:
        if n <= 0:
            raise Undefined("0 to a power that is not positive")
        return base
    if abs(base) == 1:
        return base if n % 2 else abs(base)
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(n) > 16 * MAX_BITS:
        raise Refused("too many digits")
    return base**n


def _exact_root(base: Fraction, degree: int) -> Fraction:
    """The root when it is rational."""
    roots = []
    for part in (base.numerator, base.denominator):
        if part.bit_length() > MAX_BITS:
            raise Irrational("root")
        low, high = 0, 1 << (part.bit_length() // degree + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**degree <= part else (low, middle - 1)
        if low**degree != part:
            raise Irrational("root")
        roots.append(low)
    return Fraction(roots[0], roots[1])


def _exact_function(name: str, values: list[Fraction]) -> Fraction:
    if name == "abs":
        return abs(values[0])
    if name in ("floor", "ceil"):
        return Fraction(math.floor(values[0]) if name == "floor" else math.ceil(values[0]))
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    if name in ("gcd", "lcm") and all(v.denominator == 1 for v in values):
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*(v.numerator for v in values)))
    if name == "binom":
        n, k = _whole(values[0], MAX_FACTORIAL), _whole(values[1], MAX_FACTORIAL)
        if min(k, n - k) > 400:
            raise Refused("a large binomial")
        return Fraction(math.comb(n, k))
    raise Irrational(name)


def _whole(value: Fraction, limit: int) -> int:
    if value.denominator != 1 or value < 0:
        raise Irrational("not a whole number")
    if value > limit:
        raise Refused("a large factorial")
    return value.numerator


# -- in a finite field -------------------------------------------------------------------------------------------------------


def modular(node: Node, at: Mapping[str, int]) -> int:
    """The value in the field of PRIME elements at a point. Raises Irrational, Undefined or Refused."""
    kind = node[0]
    if kind == "num":
        return node[1].numerator * _inverse(node[1].denominator % PRIME) % PRIME
    if kind == "sym":
        return at[node[1]]
    if kind == "neg":
        return -modular(node[1], at) % PRIME
    if kind in ("add", "mul"):
        a, b = modular(node[1], at), modular(node[2], at)
        return (a + b if kind == "add" else a * b) % PRIME
    if kind == "div":
        return modular(node[1], at) * _inverse(modular(node[2], at)) % PRIME
    if kind == "pow":
        return _modular_power(node, at)
    if kind == "fact":
        n, value = _whole(exact(node[1]), MAX_FACTORIAL), 1
        for i in range(2, n + 1):
            value = value * i % PRIME
        return value
    if symbols(node):
        raise Irrational(kind)
    value_exact = exact(node)
    return value_exact.numerator * _inverse(value_exact.denominator % PRIME) % PRIME


def _modular_power(node: Node, at: Mapping[str, int]) -> int:
    if symbols(node[2]):
        raise Irrational("a power with variables")
    n = exact(node[2])
    if n.denominator != 1:
        if symbols(node[1]):
            raise Irrational("root")
        value = exact(node)
        return value.numerator * _inverse(value.denominator % PRIME) % PRIME
    base = modular(node[1], at)
    if base == 0 and n <= 0:
        raise Undefined("0 to a power that is not positive")
    return pow(base, n.numerator, PRIME)


def _inverse(value: int) -> int:
    if value == 0:
        raise Undefined("division by zero")
    return pow(value, PRIME - 2, PRIME)


# -- by floating point of many digits ------------------------------------------------------------------------------------------


def floating(node: Node, at: Mapping[str, Any]) -> tuple[Any, Any]:
    """The value at a point, and the size of what it was made of: a difference below that size times the precision is nothing."""
    kind = node[0]
    if kind == "num":
        v = mpmath.mpf(node[1].numerator) / node[1].denominator
        return v, abs(v)
    if kind == "sym":
        return at[node[1]], abs(at[node[1]])
    if kind == "const":
        if node[1] == "inf":
            raise Irrational("infinity")
        v = {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1)}[node[1]]
        return +v, abs(v)
    if kind == "neg":
        v, s = floating(node[1], at)
        return -v, s
    if kind in ("add", "mul", "div"):
        (a, s), (b, t) = floating(node[1], at), floating(node[2], at)
        if kind == "add":
            return a + b, max(s, t)
        if kind == "mul":
            return a * b, s * t
        if _nothing(b, t):
            raise Undefined("division by zero")
        return a / b, s / abs(b)
    if kind == "pow":
        return _floating_power(node, at)
    if kind == "fact":
        n = _whole(exact(node[1]), MAX_FACTORIAL)
        v = mpmath.factorial(n)
        return v, v
    return _floating_function(node, at)


def _floating_power(node: Node, at: Mapping[str, Any]) -> tuple[Any, Any]:
    (a, s), (b, _) = floating(node[1], at), floating(node[2], at)
    if abs(b) > MAX_POWER:
        raise Refused("a large exponent")
    if _nothing(a, s):
        if mpmath.re(b) <= 0:
            raise Undefined("0 to a power that is not positive")
        return mpmath.mpf(0), mpmath.mpf(1) if s else mpmath.mpf(0)
    v = mpmath.power(a, b)
    return v, abs(v) * max(1, s / abs(a))


def _floating_function(node: Node, at: Mapping[str, Any]) -> tuple[Any, Any]:
    name = node[1]
    pairs = [floating(a, at) for a in node[2:]]
    values = [v for v, _ in pairs]
    if any(abs(v) > 10**15 for v in values):
        raise Refused("a large argument")
    x = values[0]
    if name in ("floor", "ceil", "max", "min", "gcd", "lcm", "binom"):
        if name in ("floor", "ceil") and not symbols(node) and mpmath.im(x) == 0 and abs(x - mpmath.nint(x)) > mpmath.mpf(10) ** -20:
            return (mpmath.floor if name == "floor" else mpmath.ceil)(x), abs(x)
        if symbols(node):
            raise Irrational(name)
        v = exact(node)
        return mpmath.mpf(v.numerator) / v.denominator, abs(v)
    if name == "ln" and _nothing(x, pairs[0][1]):
        raise Undefined("the logarithm of 0")
    functions = {"ln": mpmath.log, "abs": abs, "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan}
    try:
        v = functions.get(name, getattr(mpmath, name, None))(x)  # type: ignore[misc]
    except (ValueError, ZeroDivisionError) as e:
        raise Undefined(name) from e
    return v, max(abs(v), mpmath.mpf(1) if name != "abs" else pairs[0][1])


def _nothing(value: Any, size: Any) -> bool:
    return abs(value) <= size * mpmath.mpf(10) ** (15 - mpmath.mp.dps)


# -- comparing -----------------------------------------------------------------------------------------------------------------


def equal(a: Node, b: Node) -> bool | None:
    """Whether two formulas have the same value wherever they have one. None when that cannot be told within the gates."""
    return zero(("add", a, ("neg", b)))


def zero(node: Node) -> bool | None:
    """Whether a formula is 0 everywhere; None when that cannot be told. Raises Refused when its numbers are too large to look at."""
    names = sorted(symbols(node))
    rng = random.Random(repr(names))
    try:
        for _ in range(8):
            try:
                if modular(node, {n: rng.randrange(1, PRIME) for n in names}):
                    return False
            except Undefined:
                if not names:
                    return None
                continue
            return True
    except (Irrational, Refused):
        pass
    return _zero_floating(node, names, rng)


def _zero_floating(node: Node, names: list[str], rng: random.Random) -> bool | None:
    """At positive points, then at negative ones, where roots and logarithms may differ by a branch: then nothing is said."""
    positive = _all_zero(node, names, [{n: Fraction(rng.randrange(300, 2000), 641) for n in names} for _ in range(POINTS)])
    if not names or not positive:
        if names and positive is False and set(names) <= _INTEGER_NAMES:
            return _all_zero(node, names, [{n: Fraction(rng.randrange(2, 30)) for n in names} for _ in range(2 * POINTS)])
        return positive
    negative = _all_zero(node, names, [{n: Fraction(-rng.randrange(300, 2000), 641) for n in names} for _ in range(POINTS)])
    return None if negative is False else positive


def _all_zero(node: Node, names: list[str], points: list[dict[str, Fraction]]) -> bool | None:
    """False at the first point with a value other than 0, None when there is no point with a value."""
    seen = False
    for digits in DIGITS:
        with mpmath.workdps(digits):
            for point in points if names else points[:1]:
                try:
                    value, size = floating(node, {n: mpmath.mpf(p.numerator) / p.denominator for n, p in point.items()})
                except (Undefined, OverflowError):
                    continue
                except Irrational:
                    return None
                if not mpmath.isfinite(value):
                    continue
                seen = True
                if not _nothing(value, size):
                    return False
    return True if seen else None


def proportional(a: Node, b: Node) -> int | None:
    """1 or -1 when b is a positive or a negative constant times a, 0 when it is neither; None when that cannot be told."""
    names = sorted(symbols(a) | symbols(b))
    rng = random.Random(repr(names))
    point: Mapping[str, Fraction] = {n: Fraction(rng.randrange(300, 2000), 641) for n in names}
    with mpmath.workdps(DIGITS[0]):
        try:
            (x, s), (y, t) = (floating(f, {n: mpmath.mpf(p.numerator) / p.denominator for n, p in point.items()}) for f in (a, b))
        except (Undefined, Irrational, Refused, Unreadable, OverflowError):
            return None
        if _nothing(x, s) or _nothing(y, t) or mpmath.im(x / y):
            return 0 if zero(a) is not True or zero(b) is not True else None
        sign = 1 if x / y > 0 else -1
    # a(p)·b − b(p)·a is 0 everywhere when they are proportional; at the fixed point p both are numbers.
    fixed = {n: ("num", p) for n, p in point.items()}
    same = zero(("add", ("mul", substitute(a, fixed), b), ("neg", ("mul", substitute(b, fixed), a))))
    return None if same is None else sign if same else 0


def substitute(node: Node, values: Mapping[str, Node]) -> Node:
    """The formula with variables replaced."""
    if node[0] == "sym":
        return values.get(node[1], node)
    return tuple(substitute(a, values) if isinstance(a, tuple) else a for a in node)


def number(node: Node) -> Any:
    """A real value to 80 digits for ordering and rounding, or None."""
    with mpmath.workdps(DIGITS[0]):
        try:
            value, _ = floating(node, {})
        except (Undefined, Irrational, Refused, Unreadable, KeyError, OverflowError):
            return None
        return None if mpmath.im(value) != 0 or not mpmath.isfinite(value) else mpmath.re(value)
