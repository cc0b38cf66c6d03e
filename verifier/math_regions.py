"""Parts of the real line: intervals, inequalities and unions, brought to one form and compared.

Also what the comparison of relations needs to know about them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import mpmath

from verifier import math_value
from verifier.math_forms import Chain, Form, Items, Quantity, Relation, Union
from verifier.math_parse import Node, Unreadable

INFINITY: Node = ("const", "inf")


def _same_end(a: Node, b: Node) -> bool | None:
    """Whether two ends are the same; infinity is only itself."""
    if a == b:
        return True
    return False if {a, b} & {INFINITY, ("neg", INFINITY)} else math_value.equal(a, b)


def is_symbol(q: Quantity) -> bool:
    """Is it one variable?"""
    try:
        return q.node[0] == "sym" or (q.node[0] == "const" and q.node[1] in "ei")
    except Unreadable:
        return False


def turned(r: Relation) -> Relation:
    """`5 = x` as `x = 5`."""
    if isinstance(r.right, Quantity) and is_symbol(r.right) and not is_symbol(r.left):
        return Relation(r.right, r.op.translate(str.maketrans("<>", "><")), r.left)
    return r


def variables(form: Form) -> set[str]:
    """Names of the variables of a quantity; none for anything else."""
    return math_value.symbols(form.node) if isinstance(form, Quantity) else set()


def all_of(found: Sequence[bool | None]) -> bool | None:
    """All of several answers, None where that cannot be told."""
    return False if False in found else None if None in found else True


class Piece(NamedTuple):
    """From `low` to `high`, each end belonging to it or not."""

    low: Node
    low_closed: bool
    high: Node
    high_closed: bool


def is_region(form: Form) -> bool:
    """Can it be nothing but a part of the line?"""
    if isinstance(form, Relation):
        return form.op != "="
    if isinstance(form, Items) and form.kind == "list":
        return any(isinstance(i, Relation) and i.op != "=" for i in form.items)
    return isinstance(form, Chain | Union) or (isinstance(form, Quantity) and form.text.replace(" ", "") == r"\mathbb{R}")


def region(form: Form) -> list[Piece] | None:
    """The pieces of the line that `form` stands for, None when it is something else."""
    if isinstance(form, Quantity):
        return [Piece(("neg", INFINITY), False, INFINITY, False)] if form.text.replace(" ", "") == r"\mathbb{R}" else None
    if isinstance(form, Items):
        return _items_region(form)
    if isinstance(form, Chain):
        if not is_symbol(form.middle):
            return None
        return [Piece(form.low.node, form.first == "<=", form.high.node, form.second == "<=")]
    if isinstance(form, Relation):
        form = turned(form)
        if not is_symbol(form.left) or not isinstance(form.right, Quantity) or variables(form.right):
            return None
        end, closed = form.right.node, form.op.endswith("=") and form.op != "!="
        below = Piece(("neg", INFINITY), False, end, closed)
        above = Piece(end, closed, INFINITY, False)
        return {"<": [below], ">": [above], "!": [below, above]}.get(form.op[0])
    if isinstance(form, Union):
        parts = [region(p) for p in form.parts]
        return None if any(p is None for p in parts) else [piece for p in parts if p for piece in p]
    return None


def _items_region(form: Items) -> list[Piece] | None:
    if form.kind == "tuple" and len(form.items) == 2 and all(isinstance(i, Quantity) for i in form.items):
        low, high = (i.node for i in form.items if isinstance(i, Quantity))
        return [Piece(low, form.open == "[", high, form.close == "]")]
    if form.kind == "set":
        nodes = [i.node for i in form.items if isinstance(i, Quantity)]
        return [Piece(n, True, n, True) for n in nodes] if len(nodes) == len(form.items) else None
    parts = [region(i) for i in form.items]
    if form.kind != "list" or any(p is None or len(p) != 1 for p in parts):
        return None
    pieces = [p[0] for p in parts if p]
    if len(pieces) == 2:  # `x > 0, x < 5` is one piece, `x < 0 or x > 5` are two
        from_ = next((p for p in pieces if p.high == INFINITY), pieces[0])
        to = next((p for p in pieces if p.low == ("neg", INFINITY)), pieces[0])
        if from_.high == INFINITY and to.low == ("neg", INFINITY):
            a, b = math_value.number(from_.low), math_value.number(to.high)
            if a is not None and b is not None and a < b:
                return [Piece(from_.low, from_.low_closed, to.high, to.high_closed)]
    return pieces


def same_regions(gold: list[Piece], answer: list[Piece]) -> bool | None:
    """Whether two parts of the line are the same."""
    if len(gold) != len(answer):
        return False
    found: list[bool | None] = []
    for g, a in zip(_sorted(gold), _sorted(answer), strict=True):
        found += [g.low_closed == a.low_closed, g.high_closed == a.high_closed]
        found += [_same_end(x, y) for x, y in ((g.low, a.low), (g.high, a.high))]
    return all_of(found)


def _sorted(pieces: list[Piece]) -> list[Piece]:
    ends = [mpmath.ninf if p.low == ("neg", INFINITY) else math_value.number(p.low) for p in pieces]
    if any(e is None for e in ends):
        return pieces
    return [p for _, _, p in sorted(zip(ends, itertools.count(), pieces, strict=False), key=lambda t: t[:2])]
