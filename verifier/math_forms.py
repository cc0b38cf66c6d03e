r"""What kind of thing an answer is: a quantity, a list, a tuple, a set, a region of the line, a relation, a matrix, a ratio, words.

`read` gives every sensible reading of a text (`1,234` is a number or a list); `math_compare` compares readings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from verifier import math_units
from verifier.math_parse import Node, Unreadable, parse
from verifier.math_text import WORD_CLOSE, WORD_OPEN, peel, split

MAX_ITEMS = 64
MAX_READINGS = 4


@dataclass(frozen=True)
class Quantity:
    """A formula with its unit; `percent` when it stands with a percent sign, `degrees` when with a degree sign."""

    text: str
    unit: math_units.Unit | None = None
    percent: bool = False
    degrees: bool = False

    @cached_property
    def node(self) -> Node:
        """The formula's tree. Raises Unreadable."""
        node = parse(self.text)
        scale = self.unit.scale if self.unit else 1
        return node if scale == 1 else ("mul", node, ("num", Fraction(scale)))


@dataclass(frozen=True)
class Words:
    """Prose."""

    text: str


@dataclass(frozen=True)
class Items:
    """Several things. `kind`: "list" (no brackets), "tuple" (with `open` and `close`) or "set" (in braces)."""

    kind: str
    items: tuple[Form, ...]
    open: str = ""
    close: str = ""


@dataclass(frozen=True)
class Relation:
    """`left op right`, with op one of = < > ≤ ≥ ≠ (as = < > <= >= !=)."""

    left: Quantity
    op: str
    right: Form


@dataclass(frozen=True)
class Chain:
    """`low op middle op high`, both op < or <=."""

    low: Quantity
    first: str
    middle: Quantity
    second: str
    high: Quantity


@dataclass(frozen=True)
class Union:
    """Several regions of the line, as one."""

    parts: tuple[Form, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of entries; `bars` for a determinant's vertical lines."""

    rows: tuple[tuple[Form, ...], ...]
    bars: bool = False


@dataclass(frozen=True)
class Ratio:
    """`a : b : …`"""

    items: tuple[Quantity, ...]
    unit: math_units.Unit | None = None


Form = Quantity | Words | Items | Relation | Chain | Union | Matrix | Ratio


@dataclass
class _Budget:
    left: int = field(default=4 * MAX_ITEMS)

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Unreadable("too many parts")


_MATRIX = re.compile(
    r"\\begin ?\{(p|b|B|v|small|)(?:matrix|array)\}(?: ?\{[lcr| ]*\})?(.*)\\end ?\{(?:p|b|B|v|small|)(?:matrix|array)\}", re.DOTALL
)
_AND = re.compile(
    rf"(?:, *)?{WORD_OPEN} *(?:and|or|und|oder) *{WORD_CLOSE}"
    r"|\\lor(?![a-z])|\\land(?![a-z])| or (?=[^a-z]|[a-z] ?=)| and (?=[^a-z]|[a-z] ?=)"
)
_COMMAS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_OPS = {"=": "=", "<": "<", ">": ">", r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!="}
_OP = re.compile(r"\\(?:le|ge|ne|lt|gt)(?![a-zA-Z])|[=<>]")
_NAME = re.compile(
    r"\|?m? ?(?:\\(?:angle|triangle|overline|widehat|vec|bar|hat|overrightarrow)\s*)?\{?\s*(?:[A-Z]{2,4}|(?<=[le{ ])[A-Z])'?\s*\}?\|?"
    r"|(?:[A-Za-z]|\\[a-z]+)'?\s*[(\[][A-Za-z0-9, |\\]*[)\]]|\\frac\{d ?[a-z]?\}\{d ?[a-z]\}|\([a-z](?:, ?[a-z])+\)"
)
_IN = re.compile(r"^\s*[a-zA-Z](?:_\{?\w+\}?)?\s*\\in(?![a-z])\s*")
_LABEL = re.compile(r"^\s*(?:[a-zA-Z]|\\[a-z]+)(?:_\{?\w+\}?)?\s*\(\s*[a-z](?:\s*,\s*[a-z])*\s*\)\s*=(?!=)")
_PLAIN = re.compile(r"[-+]? ?(?:[0-9.,/ ]|\\frac|[{}])+")
_WORDS_FIRST = re.compile(rf"^{WORD_OPEN}([^{WORD_CLOSE}]*){WORD_CLOSE}\s*(.+)$", re.DOTALL)
_WORDS_LAST = re.compile(rf"^(.+?)\s*{WORD_OPEN}([^{WORD_CLOSE}]*){WORD_CLOSE}\s*[.,]?$", re.DOTALL)


def read(text: str) -> list[Form]:
    """The readings of a tidied text, the likeliest first; none when it is empty. Raises Unreadable when it has too many parts."""
    return _read(text, _Budget())[:MAX_READINGS]


def _read(text: str, budget: _Budget) -> list[Form]:
    budget.spend()
    text = peel(text)
    if not text:
        return []
    text = _LABEL.sub("", text, count=1)
    text = peel(_IN.sub("", text, count=1)) or text
    matrix = _MATRIX.fullmatch(text.strip("[]() ")) if r"\begin" in text else None
    if matrix:
        return _matrix(matrix, budget)
    readings: list[Form] = []
    commas = [p for p in split(_AND.sub(" ; ", text), ",;") if p.strip()]
    merged = _COMMAS.sub(lambda m: m.group().replace(",", ""), text) if len(commas) > 1 else text
    if merged != text and len(split(_AND.sub(" ; ", merged), ",;")) == 1:
        readings += _single(merged, budget)
    if len(commas) == 1:
        return readings + _single(
            text if "," not in text else commas[0] if text.count(",") == 1 and text.rstrip().endswith(",") else text, budget
        )
    if len(commas) > MAX_ITEMS:
        raise Unreadable("too many items")
    return readings + _list(commas, budget)


def _list(parts: list[str], budget: _Budget) -> list[Form]:
    """Things between commas, and, or. In `x = 1, 2, 3` the label belongs to all."""
    items = []
    for part in parts:
        found = _read(part, budget)
        if not found:
            continue
        items.append(found[0])
    flat: list[Form] = []
    for item in items:
        flat += item.items if isinstance(item, Items) and item.kind == "list" else [item]
    if flat and isinstance(flat[0], Relation) and flat[0].op == "=" and not any(isinstance(i, Relation) for i in flat[1:]):
        flat[0] = flat[0].right
    if len(flat) == 1:
        return flat
    return [Items("list", tuple(flat))] if flat else []


def _single(text: str, budget: _Budget) -> list[Form]:
    """One thing, or one bracket full of things."""
    text = text.strip()
    if r"\cup" in text:
        parts = re.split(r"\\cup(?![a-z])", text)
        return [Union(tuple(f for p in parts for f in _read(p, budget)[:1]))]
    if text.startswith(r"\{") and text.endswith(r"\}") and len(split(text[2:-2])) <= MAX_ITEMS:
        inside = text[2:-2]
        if re.search(r"[|:]|\\mid", inside):
            return [Words(text)]
        return [Items("set", tuple(f for p in split(_AND.sub(",", inside)) for f in _read(p, budget)[:1]))]
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return [Items("set", ())]
    bracketed = _bracketed(text, budget)
    if bracketed:
        return bracketed
    relation = _relation(text, budget)
    if relation:
        return relation
    if r"\pm" in text or r"\mp" in text:
        up = re.sub(r"\\pm(?![a-z])", "+", re.sub(r"\\mp(?![a-z])", "-", text))
        down = re.sub(r"\\pm(?![a-z])", "-", re.sub(r"\\mp(?![a-z])", "+", text))
        return [Items("list", tuple(f for t in (up, down) for f in _quantity(t.strip().removeprefix("+"))[:1]))]
    return _quantity(text)


def _bracketed(text: str, budget: _Budget) -> list[Form]:
    """`(a, b)`, `[a, b)` and the like: a tuple, perhaps an interval, or nested lists that make a matrix."""
    if len(text) < 3 or text[0] not in "([]" or text[-1] not in ")][" or text.startswith(r"\["):
        if not (text.startswith(r"\langle") and text.endswith(r"\rangle")):
            return []
        text = "(" + text[len(r"\langle") : -len(r"\rangle")] + ")"
    parts = split(text[1:-1], ",;")
    if len(parts) < 2 or len(parts) > MAX_ITEMS:
        if len(parts) == 1 and text[0] == "[" and text[-1] == "]" and r"\{" not in text:
            return _read(text[1:-1], budget)
        return []
    items = tuple(f for p in parts for f in _read(p, budget)[:1])
    if len(items) != len(parts):
        return []
    if text[0] == "[" and all(isinstance(i, Items) and i.kind == "tuple" and i.open == "[" for i in items):
        return [Matrix(tuple(i.items for i in items if isinstance(i, Items)))]
    return [Items("tuple", items, text[0], text[-1])]


def _matrix(m: re.Match[str], budget: _Budget) -> list[Form]:
    rows = [r for r in re.split(r"\\\\", m.group(2)) if r.strip()]
    cells = [[c.strip() for c in r.replace(r"\hline", "").split("&")] for r in rows]
    if sum(map(len, cells)) > MAX_ITEMS:
        raise Unreadable("a large matrix")
    entries = tuple(tuple(f for c in row for f in _read(c, budget)[:1]) for row in cells)
    if any(len(a) != len(b) for a, b in zip(entries, cells, strict=True)) or not entries:
        return []
    return [Matrix(entries, m.group(1) == "v")]


def _relation(text: str, budget: _Budget) -> list[Form]:
    ops = list(_OP.finditer(text))
    if not ops or len(ops) > 3:
        return []
    sides = [text[a:b].strip() for a, b in zip([0, *(m.end() for m in ops)], [*(m.start() for m in ops), len(text)], strict=True)]
    signs = [_OPS[m.group()] for m in ops]
    if not all(sides):
        return []
    if len(ops) == 2 and signs[0][0] == signs[1][0] and signs[0][0] in "<>":
        if signs[0][0] == ">":
            sides, signs = sides[::-1], [s.replace(">", "<") for s in signs[::-1]]
        return [Chain(Quantity(sides[0]), signs[0], Quantity(sides[1]), signs[1], Quantity(sides[2]))]
    if len(ops) > 1 and set(signs) != {"="}:
        return []
    # a = b = c: the last side is the answer, the first may be its name
    right = _read(sides[-1], budget)
    left = sides[0] if len(ops) == 1 or re.fullmatch(r"[a-zA-Z](_\{?\w+\}?)?", sides[0]) else sides[-2]
    named = _WORDS_FIRST.match(left) or (WORD_OPEN in left)
    if set(signs) == {"="} and ((named and not re.search(r"[0-9]", left)) or _NAME.fullmatch(left)):
        return right
    return [Relation(Quantity(left), signs[-1], r) for r in right[:1]]


def _quantity(text: str) -> list[Form]:
    """A formula with or without a unit, a ratio, or words."""
    unit = None
    text = re.sub(rf"^- *({WORD_OPEN}[^{WORD_CLOSE}]*{WORD_CLOSE}) *", r"\1-", text)
    lead = _WORDS_FIRST.match(text)
    if lead:
        unit = math_units.read(lead.group(1))
        if unit is None or not unit.kinds or not re.match(r"[-+.0-9\\({]", lead.group(2)):
            return [Words(text)]
        text = lead.group(2)
    trail = _WORDS_LAST.match(text)
    if trail and WORD_OPEN not in trail.group(1):
        after = math_units.read(trail.group(2))
        if after is None:
            return [Words(text)]
        unit = after if unit is None or after.kinds or after.scale != 1 else unit
        text = trail.group(1).strip()
    elif trail or WORD_OPEN in text:
        return [Words(text)]
    if re.fullmatch(r"[^:]+(?::[^:]+)+", text) and not re.search(r"[()=]", text):
        return [Ratio(tuple(Quantity(p.strip()) for p in text.split(":")), unit)]
    bare = re.sub(r" *(?:%|\\deg)$", "", text)
    plain = _PLAIN.fullmatch(bare) is not None  # the sign stands with the whole number, not with the last part of a formula
    percent = (plain and text.endswith("%")) or (unit is not None and unit.kinds == (("percent", 1),))
    degrees = (plain and text.endswith(r"\deg")) or (unit is not None and unit.kinds == (("angle", 1),))
    text = bare if percent or degrees else text
    return [Quantity(text, None if percent or degrees else unit, percent, degrees)] if text else []
