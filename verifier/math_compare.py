"""Is the answer the same thing as the gold answer? Structure first, then values. None: it cannot be told here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import mpmath

from verifier import math_value
from verifier.math_forms import Form, Items, Matrix, Quantity, Ratio, Relation, Words
from verifier.math_parse import Node, Refused, Unreadable
from verifier.math_regions import INFINITY, all_of, is_region, is_symbol, region, same_regions, turned, variables
from verifier.math_text import WORD_CLOSE, WORD_OPEN
from verifier.math_value import Irrational


@dataclass(frozen=True)
class Policy:
    """What users argue about; `docs/verifiers.md` has each with its default."""

    tolerance: float = 0.0
    rounding: bool = False
    percent: str = "equal"
    degrees: str = "equal"
    candidates: str = "wrong"
    factored: str = "keep"


def same(gold: Form, answer: Form, policy: Policy) -> bool | None:
    """Whether `answer` is `gold`, by the policies."""
    try:
        return _same(gold, answer, policy)
    except Refused:
        return False
    except (Unreadable, Irrational):
        return None


def _same(gold: Form, answer: Form, policy: Policy) -> bool | None:
    gold, answer = _unwrap(gold), _unwrap(answer)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return _letters(gold) is not None and _letters(gold) == _letters(answer)
    if policy.candidates == "any" and isinstance(answer, Items) and answer.kind == "list" and not isinstance(gold, Items):
        return _any([same(gold, i, policy) for i in answer.items])
    if is_region(gold) or is_region(answer):
        a, b = region(gold), region(answer)
        if a is not None and b is not None:
            return same_regions(a, b)
    for kind, compare in _BY_KIND:
        if isinstance(gold, kind) and isinstance(answer, kind):
            return compare(gold, answer, policy)
    if isinstance(gold, Relation) != isinstance(answer, Relation):
        return _one_relation(gold, answer, policy)
    return _mixed_kinds(gold, answer, policy)


def _mixed_kinds(gold: Form, answer: Form, policy: Policy) -> bool | None:
    """A vector and a tuple, a ratio and a fraction: the same things in other clothes."""
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Matrix) and isinstance(other, Items) and other.kind == "tuple" and 1 in (len(one.rows), len(one.rows[0])):
            entries = [e for row in one.rows for e in row]
            return _in_order(entries, other.items, policy)
        if isinstance(one, Ratio) and isinstance(other, Quantity) and len(one.items) == 2 and one.unit is None:
            return math_value.equal(("div", one.items[0].node, one.items[1].node), other.node)
    return False


def _any(found: Sequence[bool | None]) -> bool | None:
    return True if True in found else None if None in found else False


def _unwrap(form: Form) -> Form:
    """A set of one thing is that thing."""
    return form.items[0] if isinstance(form, Items) and form.kind in ("set", "list") and len(form.items) == 1 else form


def _letters(form: Form) -> str | None:
    """Words for comparison: no case, no punctuation; None for what is no text."""
    if not isinstance(form, Words | Quantity):
        return None
    text = re.sub(r"\s+", " ", re.sub(rf"[{WORD_OPEN}{WORD_CLOSE}{{}}\\$.,!;:'\"]", " ", form.text)).strip().casefold()
    text = text.removeprefix("the ").removeprefix("a ")
    return text or None


# -- quantities ----------------------------------------------------------------------------------------------------------------


def _quantities(gold: Quantity, answer: Quantity, policy: Policy) -> bool | None:
    if re.fullmatch(r"[A-Za-z]{2,}", gold.text) and re.fullmatch(r"[A-Za-z]{2,}", answer.text):
        return _letters(gold) == _letters(answer)
    g, a = gold.unit, answer.unit
    left, right = gold.node, answer.node
    if g and a and g.kinds and a.kinds:
        if g.kinds != a.kinds:
            return False
        left, right = ("mul", left, ("num", g.factor)), ("mul", right, ("num", a.factor))
    if (gold.percent and answer.degrees) or (gold.degrees and answer.percent):
        return False
    if policy.factored == "keep" and _factors(left) > 1 and right[0] == "add":
        return False
    for mark, rule, factor in (("percent", policy.percent, _PERCENT), ("degrees", policy.degrees, _DEGREE)):
        if getattr(gold, mark) == getattr(answer, mark):
            continue
        marked, bare = (left, right) if getattr(gold, mark) else (right, left)
        other = a if getattr(gold, mark) else g
        if other is not None and other.kinds and other.kinds != (("radian", 1),):
            return False
        if rule == "strict":
            return False
        options = [_values(("mul", marked, factor), bare, policy)]
        if other is None or not other.kinds:
            options.append(_values(marked, bare, policy))
        return _any(options)
    return _values(left, right, policy)


_PERCENT: Node = ("num", Fraction(1, 100))
_DEGREE: Node = ("div", ("const", "pi"), ("num", Fraction(180)))


def _values(gold: Node, answer: Node, policy: Policy) -> bool | None:
    if gold == answer:
        return True
    if ("const", "inf") in (gold, answer) or ("neg", INFINITY) in (gold, answer):
        return False
    result = math_value.equal(gold, answer)
    if result is False and (policy.tolerance or policy.rounding):
        return _near(gold, answer, policy)
    return result


def _near(gold: Node, answer: Node, policy: Policy) -> bool:
    """Within the relative tolerance, or the gold rounded to the places that the answer shows."""
    g, a = math_value.number(gold), math_value.number(answer)
    if g is None or a is None:
        return False
    if policy.tolerance and abs(g - a) <= policy.tolerance * abs(g):
        return True
    places = _places(answer)
    return policy.rounding and places is not None and places >= 2 and abs(g - a) <= mpmath.mpf(10) ** -places / 2


def _places(node: Node) -> int | None:
    """Decimal places of a plain decimal."""
    while node[0] == "neg":
        node = node[1]
    if node[0] != "num":
        return None
    return next((p for p in range(20) if (node[1] * 10**p).denominator == 1), None)


def _factors(node: Node) -> int:
    """How many different factors that are sums with variables a product has; 0 when it has anything else but a number."""
    found: set[Node] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n[0] == "mul":
            stack += n[1:]
        elif n[0] == "pow" and n[1][0] == "add" and n[2][0] == "num":
            found.add(n[1])
        elif n[0] == "add" and math_value.symbols(n):
            found.add(n)
        elif n[0] != "num":
            return 0
    return len(found)


# -- several things ------------------------------------------------------------------------------------------------------------


def _items(gold: Items, answer: Items, policy: Policy) -> bool | None:
    if "tuple" in (gold.kind, answer.kind):
        if gold.kind == answer.kind and (gold.open, gold.close) != (answer.open, answer.close):
            return False
        if "set" in (gold.kind, answer.kind):
            return False
        return _in_order(_bare(gold, answer), _bare(answer, gold), policy)
    return _in_any_order(_bare(gold, answer), _bare(answer, gold), policy)


def _bare(items: Items, other: Items) -> Sequence[Form]:
    """The items; `x = 1` as 1 when the other side has no such names, or when all have the same name."""
    relations = [i for i in items.items if isinstance(i, Relation) and i.op == "="]
    if not relations or len(relations) < len(items.items):
        return items.items
    named = any(isinstance(i, Relation) for i in other.items)
    return items.items if named else [r.right for r in relations]


def _in_order(gold: Sequence[Form], answer: Sequence[Form], policy: Policy) -> bool | None:
    return len(gold) == len(answer) and all_of([same(g, a, policy) for g, a in zip(gold, answer, strict=True)])


def _in_any_order(gold: Sequence[Form], answer: Sequence[Form], policy: Policy) -> bool | None:
    """Each gold item has an answer item of its own, and none is left."""
    gold, left = list(dict.fromkeys(gold)), list(dict.fromkeys(answer))
    if len(gold) != len(left):
        return False
    unknown = False
    for g in gold:
        found = [same(g, a, policy) for a in left]
        if True in found:
            del left[found.index(True)]
        elif None in found:
            unknown = True
        else:
            return False
    return None if unknown else True


def _matrices(gold: Matrix, answer: Matrix, policy: Policy) -> bool | None:
    if gold.bars != answer.bars or [len(r) for r in gold.rows] != [len(r) for r in answer.rows]:
        return False
    return all_of([_in_order(g, a, policy) for g, a in zip(gold.rows, answer.rows, strict=True)])


def _ratios(gold: Ratio, answer: Ratio, policy: Policy) -> bool | None:
    if len(gold.items) != len(answer.items):
        return False
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    g, a = [q.node for q in gold.items], [q.node for q in answer.items]
    return all_of([math_value.equal(("mul", g[i], a[0]), ("mul", g[0], a[i])) for i in range(1, len(g))])


# -- relations -----------------------------------------------------------------------------------------------------------------


def _relations(gold: Relation, answer: Relation, policy: Policy) -> bool | None:
    gold, answer = turned(gold), turned(answer)
    if gold.op == answer.op and is_symbol(gold.left) and is_symbol(answer.left):
        if gold.left.node == answer.left.node:
            first = same(gold.right, answer.right, policy)
            if first or not isinstance(gold.right, Quantity):
                return first
        elif gold.op == "=" and not variables(gold.right) and not variables(answer.right):
            return False
    if not isinstance(gold.right, Quantity) or not isinstance(answer.right, Quantity):
        return False
    f, g = (("add", r.left.node, ("neg", r.right.node)) for r in (gold, answer) if isinstance(r.right, Quantity))
    sign = math_value.proportional(f, g)
    if not sign:
        return None if sign is None else False
    return gold.op == (answer.op if sign > 0 else answer.op.translate(str.maketrans("<>", "><")))


def _one_relation(gold: Form, answer: Form, policy: Policy) -> bool | None:
    """`x = 5` and 5 are the same; so are `2 + 3 = 5` and 5, but not `2 + 2 = 5`."""
    relation, other, flip = (gold, answer, False) if isinstance(gold, Relation) else (answer, gold, True)
    assert isinstance(relation, Relation)
    relation = turned(relation)
    if relation.op != "=":
        return False
    if not is_symbol(relation.left):
        if not isinstance(relation.right, Quantity) or math_value.symbols(relation.left.node):
            return False
        true = math_value.equal(relation.left.node, relation.right.node)
        if not true:
            return true
    return same(other, relation.right, policy) if flip else same(relation.right, other, policy)


_BY_KIND: tuple[tuple[type, Callable[..., bool | None]], ...] = (
    (Quantity, _quantities),
    (Items, _items),
    (Relation, _relations),
    (Matrix, _matrices),
    (Ratio, _ratios),
)
