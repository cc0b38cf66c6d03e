r"""`math`: is the final answer of a response the gold answer, whatever way it is written?

First an exact comparison of our own (`math_text` tidies, `math_forms` finds the structure, `math_value` compares values), then math-verify
for what that cannot read. Options, each with its default first: `final` = "last" | "box" | "only_box" | "anywhere";
`candidates` = "wrong" | "any"; `tolerance` = 0; `rounding` = false; `percent` = "equal" | "strict"; `degrees` = "equal" |
"strict"; `factored` = "keep" | "expand".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verifier import math_compare, math_forms, math_symbolic
from verifier.extract import SEARCHED, after_thinking, boxes
from verifier.math_parse import Unreadable
from verifier.math_text import WORD_CLOSE, WORD_OPEN, peel, tidy
from verifier.verdict import Verdict, error, value

MAX_ANSWER = 4096  # characters
MAX_NESTING = 64
_LAST = ("last", "box", "only_box", "anywhere")
_BETWEEN_BOXES = re.compile(r"[\s,;.$&\\()\[\]-]*(?:(?:or|and|maybe|perhaps|either|also|,)[\s,;.$\\()\[\]]*)*", re.IGNORECASE)
_BOX_START = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKED = re.compile(r"(?<![a-zA-Z])(?:final )?answer[ \t]*[*_]*[ \t]*[:=][ \t*_]*([^\n]*)", re.IGNORECASE)
_SAID = re.compile(r"\b(?:final answer|answer) is[: \t*_]*([^\n]*)", re.IGNORECASE)
_CHOICE = re.compile(r"(?:(?i:option|choice|answer)\s)?\s*(?:\(\s*([A-Z])\s*\)|([A-Z])\s*(?=$|[.):,]))(.*)", re.DOTALL)
_OPTION = re.compile(r"(?<![a-zA-Z\\])\(?[A-J]\)?(?![a-zA-Z'])")
_POLICY = ("tolerance", "rounding", "percent", "degrees", "candidates", "factored")


def verify(gold: str, response: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> Verdict:
    """1 when the final answer of `response` is `gold`, else 0; an error when `gold` can be matched by nothing or an option is unknown."""
    final = options.get("final", "last")
    if final not in _LAST:
        return error(f"math: final = {final!r} is none of {', '.join(_LAST)}")
    policy = math_compare.Policy(**{k: options[k] for k in _POLICY if k in options})
    want = _gold(gold)
    if want is None:
        return error(f"gold answer {gold[:80]!r} is empty, too long or has unbalanced braces")
    rest = after_thinking(response)
    if rest is None:
        return value(0, "unclosed think block")
    answer = final_answer(rest[-SEARCHED:], final)
    if answer is None:
        return value(0, "no final answer")
    if len(answer) > MAX_ANSWER:
        return value(0, "the answer is too long")
    try:
        right, why = compare(want, answer, policy)
    except RecursionError:
        right, why = False, "too deep"
    return value(right, f"{answer.strip()[:80]!r}: {why}")


def canonical(gold: str, options: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    r"""The gold answer in a box."""
    found = boxes(gold)
    return f"\\boxed{{{found[-1] if found else gold}}}"


def _gold(gold: str) -> str | None:
    found = boxes(gold)
    text = (found[-1] if found else gold).strip()
    if not text or len(text) > MAX_ANSWER or not peel(tidy(text)):
        return None
    return None if re.sub(r"\\.", "", text).count("{") != re.sub(r"\\.", "", text).count("}") else text


# -- which part of the text is the answer --------------------------------------------------------------------------------------


def final_answer(text: str, final: str = "last") -> str | None:
    r"""The final answer of a response, by the policy `final`.

    "last": the last box, or what stands behind a later `Answer:`; without a box, behind the last `Answer:` or `answer is`. Boxes that stand
    next to each other are one answer with several parts. "box": no box, no answer. "only_box": several different boxes are no answer.
    "anywhere": else the last number.
    """
    found = boxes(text)
    if final == "only_box":
        return found[0] if len({b.strip() for b in found}) == 1 else None
    if found:
        at = text.rfind(found[-1] + "}")
        if final != "box":
            later = [m for m in _MARKED.finditer(text, at) if _line(m.group(1))]
            if later:
                return _line(later[-1].group(1))
        return _run_of_boxes(text, found)
    if final == "box":
        return None
    said = [m for m in _MARKED.finditer(text) if _line(m.group(1))]
    if not said and text.lower().count("answer is") <= 64:
        said = [m for m in _SAID.finditer(text) if _line(m.group(1))]
    if said:
        return _line(said[-1].group(1))
    if final == "anywhere":
        numbers = re.findall(r"-?[0-9]+(?:[.,/][0-9]+)*", text[-2000:])
        return numbers[-1] if numbers else None
    return None


def _run_of_boxes(text: str, found: list[str]) -> str:
    """The last box with those that stand right before it; equal ones count once."""
    run = [found[-1]]
    end = len(text)
    for before in reversed(found[:-1]):
        close = text.rfind(run[0] + "}", 0, end)
        start = max((m.start() for m in _BOX_START.finditer(text, max(0, close - 40), close)), default=-1)
        end = text.rfind(before + "}", 0, start)
        if start < 0 or end < 0 or not _BETWEEN_BOXES.fullmatch(text, end + len(before) + 1, start):
            break
        run.insert(0, before)
        end += len(before) + 1
    different = list(dict.fromkeys(b.strip() for b in run))
    return different[0] if len(different) == 1 else ", ".join(different)


def _line(text: str) -> str | None:
    """A marked answer without its dress; None when nothing is left."""
    text = re.split(r"\s(?:because|since|which|as)\s", text.strip().strip("*_ \t"), maxsplit=1)[0]
    text = re.sub(r"\s*(?:\\\]|\\\)|\])\s*$", "", text).strip().strip("*_ \t").rstrip(".").strip()
    text = re.split(r"(?<=[a-zA-Z0-9$)}])\. +(?=[A-Z])", text)[0]
    if text.count("$") == 2 and text.startswith("$"):
        text = text[1:].partition("$")[0]
    return text or None


# -- is it right ---------------------------------------------------------------------------------------------------------------


def compare(gold: str, answer: str, policy: math_compare.Policy) -> tuple[bool, str]:
    """Whether two answers are the same, and by what means."""
    g, a = tidy(gold), tidy(answer)
    if not peel(a):
        return False, "empty"
    letter = _choice(g)
    if letter:
        chosen = _choice(a)
        if chosen or re.fullmatch(r"\W*", a):
            return chosen == letter, "choice"
    if _squeezed(g) == _squeezed(a):
        return True, "same text"
    if _too_deep(a):
        return False, "too deep"
    try:
        readings = [(x, y) for x in math_forms.read(g) for y in math_forms.read(a)]
    except Unreadable as e:
        return False, str(e)
    found = [math_compare.same(x, y, policy) for x, y in readings]
    if True in found:
        return True, "same value"
    if None not in found:
        return False, "different"
    plain_g, plain_a = (peel(_unmarked(t)) for t in (g, a))
    if any(isinstance(y, math_forms.Words) for _, y in readings):
        return False, "words"
    return math_symbolic.equal(plain_g, plain_a)


def _choice(text: str) -> str | None:
    """The letter of a multiple choice answer: `C`, `(C)`, `C. 12 apples`; None when it names several, or none."""
    text = peel(_unmarked(text)) if not text.startswith("(") else _unmarked(text).strip()
    m = _CHOICE.fullmatch(text.strip(" .") if len(text) < 3 else text.strip())
    if not m:
        return None
    rest = m.group(3) or ""
    return None if _OPTION.search(rest) and re.search(r"\b(?:or|and|maybe)\b|^\W*[A-J]\W*$", rest) else m.group(1) or m.group(2)


def _unmarked(text: str) -> str:
    return text.replace(WORD_OPEN, " ").replace(WORD_CLOSE, " ")


def _squeezed(text: str) -> str:
    """The text without spaces and enclosing brackets: equal ones are equal whatever they mean."""
    return re.sub(r"\s+", "", peel(text))


def _too_deep(text: str) -> bool:
    depth = deepest = 0
    for c in peel(text):
        depth += (c in "({[") - (c in ")}]")
        deepest = max(deepest, depth)
    return deepest > MAX_NESTING
