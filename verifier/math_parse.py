r"""Formulas as trees: a strict parser for the notation that `math_text.tidy` gives. Text is never evaluated as a program.

A node is a tuple: ("num", Fraction), ("sym", name), ("const", "pi" | "e" | "i" | "inf"), ("add", a, b), ("mul", a, b), ("div", a, b),
("pow", a, b), ("neg", a), ("fact", a), ("fn", name, arguments…). Gates keep the work small whatever the text: see the constants.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from verifier.math_text import GREEK
from verifier.quantity import MAX_DIGITS

Node = tuple[Any, ...]

MAX_CHARACTERS = 4096
MAX_TOKENS = 1200
MAX_DEPTH = 64


class Unreadable(Exception):
    """The text is no formula that this parser knows."""


class Refused(Unreadable):
    """The text is larger than the gates allow, or misleading: nothing else should try to read it."""


_TOKEN = re.compile(
    r"\s*(?:(?P<num>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9a-zA-Z]))?)"
    r"|(?P<cmd>\\[a-zA-Z]+|\\[|{}])|(?P<name>[a-zA-Z]+)|(?P<op>[-+*/^_!%(){}\[\]|,'=]))"
)
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "lg", "exp", "abs",
    "floor", "ceil", "gcd", "lcm", "max", "min", "sqrt", "cbrt",
}  # fmt: skip
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "infinity": "infty", "oo": "infty", "inf": "infty"}
_NAMES = "varepsilon vartheta varphi Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar"
LETTERS = (set(GREEK) - {"omicron", "pi"}) | set(_NAMES.split(" "))
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_IGNORED = {r"\displaystyle", r"\quad"}
_MIXED = re.compile(
    r"(?<![0-9.^_/}])(?<![\^_] )([0-9]+) *\\frac *\{? *([0-9]+) *\}? *\{ *([0-9]+) *\}"
    r"|(?<![0-9./^_}])([0-9]+) +([0-9]+) ?/ ?([0-9]+)(?![0-9.])"
)
_SHORT = re.compile(r"(?<![0-9.^_/}])(?<![\^_] )([0-9]+) *\\frac *([0-9]) *([0-9])(?![0-9])")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot) *\{? *([0-9]+) *\}?")
_TIMES_TEN = re.compile(r"(?<=[0-9]) ?[xX] ?(?=10 ?\^)")


def parse(text: str) -> Node:
    """The tree of a formula. Raises Unreadable when `text` is not one, Refused when it is too long, too deep or has too many digits."""
    if len(text) > MAX_CHARACTERS:
        raise Refused("too long")
    text = _TIMES_TEN.sub(r"\\times ", text)
    text = _SHORT.sub(r"\1\\frac{\2}{\3}", text)
    return _Parser(_MIXED.sub(_mixed, _REPEATING.sub(_repeating, text))).whole()


def _repeating(m: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as a fraction."""
    whole, fixed, period = m.groups()
    if len(whole) + len(fixed) + len(period) > MAX_DIGITS:
        raise Refused("too many digits")
    bottom = 10 ** len(fixed) * (10 ** len(period) - 1)
    return f"({int(whole + fixed + period) - int((whole or '0') + fixed)}/{bottom})"


def _mixed(m: re.Match[str]) -> str:
    r"""`11 5/6` and `1\frac{1}{4}` are sums; `4 10/3` is nothing."""
    w, a, b = m.group(1, 2, 3) if m.group(1) else m.group(4, 5, 6)
    if len(w) + len(a) + len(b) > MAX_DIGITS or not 0 < int(a) < int(b):
        raise Refused("an improper mixed number")
    return rf"({w}+\frac{{{a}}}{{{b}}})"


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    at = 0
    while at < len(text):
        m = _TOKEN.match(text, at)
        if m is None:
            if text[at:].isspace():
                break
            raise Unreadable(f"{text[at : at + 12]!r}")
        at = m.end()
        kind = m.lastgroup
        token = m.group(kind or 0)
        if kind == "num" and len(token) > MAX_DIGITS:
            raise Refused("too many digits")
        if kind == "name":
            tokens += _names(token)
        elif token not in _IGNORED:
            tokens.append(token)
        if len(tokens) > MAX_TOKENS:
            raise Refused("too many symbols")
    return tokens


def _names(run: str) -> list[str]:
    """A run of letters: a known name, or a product of at most three letters, perhaps with a known name at its end (`xsin`)."""
    run = _ALIASES.get(run, run)
    if run in FUNCTIONS or run in LETTERS or run in ("pi", "infty", "deg"):
        return ["\\" + run]
    for n in (6, 5, 4, 3, 2):
        if len(run) > n and (run[-n:] in FUNCTIONS or run[-n:] in ("pi", "theta")):
            return [*_names(run[:-n]), "\\" + run[-n:]]
        if len(run) > n and run[:n] in ("pi", "theta"):
            return ["\\" + run[:n], *_names(run[n:])]
    if len(run) > 3:
        raise Unreadable(f"the word {run!r}")
    return list(run)


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0
        self.depth = 0

    def whole(self) -> Node:
        node = self.sum()
        if self.at < len(self.tokens):
            raise Unreadable(f"{self.tokens[self.at]!r}")
        return node

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, token: str) -> bool:
        if self.next == token:
            self.at += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise Unreadable(f"{token!r} is missing")

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused("too deep")
        node = self.product()
        while self.next in ("+", "-"):
            minus = self.next == "-"
            self.at += 1
            right = self.product()
            node = ("add", node, ("neg", right) if minus else right)
        self.depth -= 1
        return node

    def product(self, bare: bool = False) -> Node:
        """A product; `bare`: the argument of a function without parentheses, which ends at a sign, an operator or another function."""
        node = self.signed() if not bare else self.power()
        while True:
            token = self.next
            if not bare and token in ("*", r"\times", r"\cdot", r"\ast"):
                self.at += 1
                node = ("mul", node, self.signed())
            elif token in ("/", r"\div") and not (bare and token == r"\div"):
                self.at += 1
                node = ("div", node, self.signed())
            elif self.starts(token) and not (bare and token.lstrip("\\") in FUNCTIONS):
                if token[0].isdigit() or token[0] == ".":
                    raise Refused("a number right after a factor")
                node = ("mul", node, self.power())
            else:
                return node

    def starts(self, token: str) -> bool:
        """Does this token begin a factor?"""
        if not token or token in ("|", "[", "]"):
            return False
        if token[0] == "\\":
            name = token[1:]
            return name in FUNCTIONS or name in LETTERS or name in ("pi", "infty", "frac", "sqrt", "binom", "lfloor", "lceil")
        return token[0].isalnum() or token[0] == "." or token in ("(", "{")

    def signed(self) -> Node:
        signs = 0
        minus = False
        while self.next in ("+", "-"):
            minus ^= self.next == "-"
            signs += 1
            self.at += 1
            if signs > 2:
                raise Refused("several signs")
        node = self.power()
        return ("neg", node) if minus else node

    def power(self) -> Node:
        node = self.postfix(self.primary())
        if self.take("^"):
            exponent = self.exponent()
            node = self.postfix(("pow", node, exponent))
            if self.next == "^":
                raise Unreadable("an exponent on an exponent without braces")
        return node

    def exponent(self) -> Node:
        r"""What stands after `^`: a group, or one token, as in LaTeX, but a whole number and a sign as in plain text."""
        if self.next in ("+", "-"):
            return self.signed()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused("too deep")
        node = self.primary()
        if self.take("^"):
            node = ("pow", node, self.exponent())
        self.depth -= 1
        return node

    def postfix(self, node: Node) -> Node:
        while True:
            if self.take("!"):
                node = ("fact", node)
            elif self.take("%"):
                node = ("div", node, ("num", Fraction(100)))
            elif self.take(r"\deg"):
                node = ("div", ("mul", node, ("const", "pi")), ("num", Fraction(180)))
            else:
                return node

    def group(self, close: str) -> Node:
        node = self.sum()
        self.expect(close)
        return node

    def primary(self) -> Node:
        token = self.next
        self.at += 1
        if not token:
            raise Unreadable("something is missing at the end")
        if token[0].isdigit() or token[0] == ".":
            return self.numeral(token)
        if token == "(":
            return self.group(")")
        if token == "{":
            return self.group("}")
        if token in ("|", r"\|"):
            node = self.sum()
            self.expect(token)
            return ("fn", "abs", node)
        if token[0] == "\\":
            return self.command(token[1:])
        if token in ("e", "i"):
            return ("const", token) if self.next != "_" else self.symbol(token)
        if token.isalpha():
            return self.symbol(token)
        raise Unreadable(f"{token!r}")

    def numeral(self, token: str) -> Node:
        """A number, or digits in another base (`42_9`)."""
        if not self.take("_"):
            return ("num", Fraction(token))
        base = self.subscript()
        if not base.isdigit() or not token.isdigit() or not 2 <= int(base[:3]) <= 36 or any(int(d) >= int(base) for d in token):
            raise Unreadable("no numeral of that base")
        return ("num", Fraction(int(token, int(base))))

    def symbol(self, name: str) -> Node:
        if self.take("_"):
            name += "_" + self.subscript()
        while self.take("'"):
            name += "'"
        return ("sym", name)

    def subscript(self) -> str:
        if not self.take("{"):
            self.at += 1
            return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ""
        parts = []
        while self.next and self.next != "}":
            parts.append(self.next)
            self.at += 1
        self.expect("}")
        return "".join(parts)

    def command(self, name: str) -> Node:
        if name == "frac":
            return ("div", self.argument(), self.argument())
        if name == "binom":
            return ("fn", "binom", self.argument(), self.argument())
        if name == "pi":
            return ("const", "pi")
        if name == "infty":
            return ("const", "inf")
        if name in ("lfloor", "lceil"):
            node = self.sum()
            self.expect("\\r" + name[1:])
            return ("fn", "floor" if name == "lfloor" else "ceil", node)
        if name in FUNCTIONS:
            return self.function(name)
        if name in LETTERS:
            return self.symbol(name)
        raise Unreadable(f"\\{name}")

    def argument(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused("too deep")
        node = self.one()
        self.depth -= 1
        return node

    def one(self) -> Node:
        r"""The argument of a command: a group, or one token, of which a number gives its first digit (`\frac12`)."""
        token = self.next
        if token and token[0].isdigit():
            if len(token) > 1:
                if not token.isdigit():
                    raise Unreadable("an argument without braces")
                self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
            self.at += 1
            return ("num", Fraction(int(token[0])))
        return self.primary()

    def function(self, name: str) -> Node:
        if name == "sqrt":
            index: Node = ("num", Fraction(2))
            if self.take("["):
                index = self.group("]")
            return ("pow", self.argument(), ("div", ("num", Fraction(1)), index))
        base = power = None
        if name in ("log", "lg") and self.take("_"):
            base = self.argument()
        if self.take("^"):
            power = self.exponent()
            if power == ("neg", ("num", Fraction(1))) and name in _INVERSE:
                name, power = _INVERSE[name], None
        if name in ("log", "lg") and base is None and self.take("_"):
            base = self.argument()
        if self.next == "(":
            self.at += 1
            arguments = [self.sum()]
            while self.take(","):
                arguments.append(self.sum())
            self.expect(")")
        else:
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise Refused("too deep")
            arguments = [self.product(bare=True)]
            self.depth -= 1
        if len(arguments) > 1 and name not in ("gcd", "lcm", "max", "min", "log"):
            raise Unreadable(f"{name} of several things")
        if name == "cbrt":
            node: Node = ("pow", arguments[0], ("div", ("num", Fraction(1)), ("num", Fraction(3))))
        elif name == "exp":
            node = ("pow", ("const", "e"), arguments[0])
        elif base is not None or name == "lg":
            node = ("div", ("fn", "ln", *arguments), ("fn", "ln", base or ("num", Fraction(10))))
        else:
            node = ("fn", "ln" if name == "log" else name, *arguments)
        return node if power is None else ("pow", node, power)
