"""Units of measure: which ones are the same kind, and by what factor. Words that are no unit are labels ("36 students") and say nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_TABLE = {
    "length": "m meter metre=1; km kilometer kilometre=1000; cm centimeter centimetre=1/100; mm millimeter millimetre=1/1000; "
    "in inch=254/10000; ft foot feet=3048/10000; yd yard=9144/10000; mi mile=1609344/1000",
    "mass": "g gram=1; kg kilogram=1000; mg milligram=1/1000; lb pound=45359237/100000; oz ounce=45359237/1600000; ton tonne=1000000",
    "time": "s sec second=1; min minute=60; h hr hour=3600; day=86400; week=604800; ms millisecond=1/1000",
    "calendar": "month=1; year yr=12",
    "dollar": "dollar usd buck=1; cent=1/100",
    "euro": "euro eur=1",
    "sterling": "sterling gbp=1",
    "rupee": "rupee=1",
    "yen": "yen=1",
    "volume": "l liter litre=1; ml milliliter millilitre=1/1000; gallon gal=1; quart=1/4; pint=1/8",
    "angle": "degree=1; radian rad=0",
    "percent": "percent=1",
    "force": "n newton=1; kn=1000",
    "energy": "j joule=1; kj=1000",
    "power": "w watt=1; kw=1000",
    "current": "a amp ampere=1",
    "voltage": "v volt=1",
    "temperature": "celsius=1",
    "fahrenheit": "fahrenheit=1",
    "morning": "am=1; pm=2",
}
_UNITS: dict[str, tuple[str, Fraction]] = {}
for _kind, _entries in _TABLE.items():
    for _entry in _entries.split(";"):
        _names, _, _factor = _entry.strip().partition("=")
        for _name in _names.split():
            _UNITS[_name] = (_kind, Fraction(_factor))
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_HEDGES = {
    "or",
    "maybe",
    "perhaps",
    "possibly",
    "probably",
    "not",
    "either",
    "unless",
    "and",
    "minus",
    "plus",
    "times",
    "except",
    "between",
    "to",
    "than",
}
_FOREIGN_GALLON = {"gallon", "gal", "quart", "pint"}


@dataclass(frozen=True)
class Unit:
    """A unit: `kinds` says how often each kind of quantity counts, e.g. (("length", 1), ("time", -1)), `factor` leads to the base of these.

    `scale`: million and such.
    """

    kinds: tuple[tuple[str, int], ...]
    factor: Fraction
    scale: int = 1


LABEL = Unit((), Fraction(1))


def read(text: str) -> Unit | None:
    """The unit that `text` names, LABEL for words that are no unit, None when the words make the number mean something else."""
    text = re.sub(r"(?<![a-z])([ap])\.?\s?m\.?(?![a-z])", r"\1m", text.strip().lower()).replace(".", " ").replace("µ", "u")
    text = re.sub(r"[()\x02\x03]", " ", text).strip()
    scale = 1
    words = text.split()
    while words and words[0].rstrip("s") in _SCALES:
        scale *= _SCALES[words.pop(0).rstrip("s")]
        if words[:1] == ["of"]:
            words.pop(0)
    text = " ".join(words)
    if not text:
        return Unit((), Fraction(1), scale)
    kinds, factor = _compound(text)
    if kinds is not None:
        return Unit(kinds, factor, scale)
    if (
        re.fullmatch(r"[a-z][a-z' -]*(?:[/^][a-z0-9 ]+)*", text)
        and len(text.split()) <= 8
        and not _HEDGES & set(re.split(r"[^a-z]+", text))
    ):
        return Unit((), Fraction(1), scale)
    return None


def _compound(text: str) -> tuple[tuple[tuple[str, int], ...] | None, Fraction]:
    """Kinds and factor of `km/h`, `square feet`, `cm^2`, `miles per hour`; None when a part of it is no unit."""
    text = {"mph": "mile/hour", "kph": "km/hour"}.get(text, text)
    text = re.sub(r"\b(?:square|sq) +(\w+)", r"\1^2", re.sub(r"\b(?:cubic|cu) +(\w+)", r"\1^3", text))
    text = re.sub(r"\b(\w+) (?:squared)\b", r"\1^2", re.sub(r"\b(\w+) cubed\b", r"\1^3", text))
    kinds: dict[str, int] = {}
    factor = Fraction(1)
    for i, part in enumerate(re.split(r" ?/ ?| per | an? ", text)):
        for word in re.split(r"[ *-]+", part.strip()):
            m = re.fullmatch(r"([a-z]+)(?:\^\{?(-?[1-4])\}?)?", word)
            found = m and (_UNITS.get(m.group(1)) or _UNITS.get(m.group(1).removesuffix("s")) or _UNITS.get(m.group(1).removesuffix("es")))
            if not m or not found:
                return None, factor
            kind, one = found
            if m.group(1).removesuffix("s") in _FOREIGN_GALLON:
                kind = "gallon"
            power = int(m.group(2) or 1) * (1 if i == 0 else -1)
            kinds[kind] = kinds.get(kind, 0) + power
            factor *= one**power if one else 1
            if kind == "angle" and not one:
                kinds = {"radian": 1}
    return tuple(sorted((k, n) for k, n in kinds.items() if n)), factor
