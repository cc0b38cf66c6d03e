r"""One way of writing mathematics out of many: Unicode, LaTeX dress and plain text become one small LaTeX-like notation.

After `tidy`, words stand between WORD_OPEN and WORD_CLOSE (`10\text{ cm}` is `10<cm>`), everything else is formula.
"""

from __future__ import annotations

import re

from verifier.extract import plain

WORD_OPEN, WORD_CLOSE = "\x02", "\x03"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_VULGAR = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5), "⅘": (4, 5),
    "⅙": (1, 6), "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8), "⅑": (1, 9), "⅒": (1, 10),
}  # fmt: skip
GREEK = [
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi", "omicron", "pi",
    "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
]  # fmt: skip
_LETTERS = dict(zip("αβγδεζηθικλμνξοπρστυφχψω", GREEK, strict=True)) | {"Γ": "Gamma", "Δ": "Delta", "Σ": "Sigma", "Ω": "Omega", "Φ": "Phi"}
_SYMBOLS = {
    "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*", "⁄": "/", "∕": "/", "√": r"\√", "∛": r"\∛",
    "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": "=", "±": r"\pm ", "∓": r"\mp ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^{\circ}", "º": r"^{\circ}", "′": "'", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ",
    "→": r"\to ", "∧": r"\land ", "∨": r"\lor ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
    "⌉": r"\rceil ", "∖": r"\setminus ", "¢": WORD_OPEN + "cents" + WORD_CLOSE, "€": WORD_OPEN + "euros" + WORD_CLOSE,
    "£": WORD_OPEN + "pounds sterling" + WORD_CLOSE, "∠": "", "△": "", "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip
_UNICODE = {ord(k): v for k, v in _SYMBOLS.items()} | {ord(k): f"\\{v} " for k, v in _LETTERS.items()}

_DRESS = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr|big|Big|bigg|Bigg|displaystyle|textstyle|limits|nolimits|mathstrut|strut|hfill"
    r"|noindent|quad|qquad|thinspace|enspace|hspace\*?\{[^{}]*\}|phantom\{[^{}]*\}|vphantom\{[^{}]*\})(?![a-zA-Z])\.?"
)
_SPACE = re.compile(r"(\\\\)|\\[,;:!> ]|~|\\hskip[0-9a-z. ]*")
_DELIMITERS = re.compile(r"\\[()\[\]]|(?<!\\)\$")
_STYLE = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathtt|mathnormal|bf|it|rm|ensuremath|mathop|underline|overbrace|pmb)(?![a-zA-Z])"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|textup|emph|mbox|hbox|mathrm|operatorname\*?)\s*\{([^{}]*)\}")
_MATHY = re.compile(r"[^a-zA-Z]*|\(?[A-Za-z]\)?\s*[.:)]?|(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm)h?")
_WORDS = {
    "inches", "in", "ft", "feet", "foot", "cm", "mm", "km", "kg", "mg", "lb", "lbs", "oz", "mph", "min", "hr",
    "hrs", "sec", "ml", "and", "or",
}  # fmt: skip
_KNOWN = set(GREEK) | {
    "sqrt", "frac", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "asin", "acos", "atan", "sinh", "cosh", "tanh",
    "log", "ln", "exp", "abs", "floor", "ceil", "gcd", "lcm", "binom", "infinity", "infty", "oo", "inf", "sqr", "root",
    "cbrt", "max", "min",
}  # fmt: skip
_PLAIN_WORDS = re.compile(r"(?<![\\a-zA-Z_])[a-zA-Z]{2,}(?:[-' ]+[a-zA-Z]+)*(?![a-zA-Z(])")
_ONE_LETTER_UNIT = re.compile(r"^([-+]?[0-9][0-9.,/]*) +([mgshLlNJWVKA])$")
_POWERED = re.compile(rf"{WORD_OPEN}([^{WORD_CLOSE}]*[a-zA-Z])\s*{WORD_CLOSE}\s*\^\s*\{{?\s*([23])\s*\}}?")
_OVER = re.compile(rf"{WORD_CLOSE}\s*/\s*{WORD_OPEN}")


def tidy(text: str) -> str:
    """`text` in the one notation. Linear in its length up to a small factor; anything is accepted."""
    text = _CONTROL.sub(" ", plain(text)).strip()
    if not text.isascii():
        text = _unicode(text)
    text = text.replace(r"\$", "$$USD$$").replace(r"\%", "%").replace(r"\#", "#").replace(r"\&", "&").replace(r"\_", "_")
    text = text.replace("$$USD$$", WORD_OPEN + "dollars" + WORD_CLOSE)
    text = re.sub(r"(?<![\w$\\])\$\s*(?=[0-9][0-9,.]*\s*$)", WORD_OPEN + "dollars" + WORD_CLOSE, text)
    for a, b in ((r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\cfrac", r"\frac"), (r"\dbinom", r"\binom"), (r"\tbinom", r"\binom")):
        text = text.replace(a, b)
    text = re.sub(r"\\(le|ge|ne)q(?:slant)?(?![a-zA-Z])", r"\\\1 ", text)
    text = re.sub(r"\\(?:le|ge)qslant", lambda m: m.group()[:3] + " ", text)
    text = text.replace(r"\varnothing", r"\emptyset ").replace(r"\approx", "=").replace(r"\degree", r"^{\circ}").replace(r"\lvert", "|")
    text = text.replace(r"\rvert", "|").replace(r"\vert", "|").replace(r"\mid", "|").replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = text.replace("**", "^") if re.search(r"[0-9a-z)]\*\*[0-9a-z(]", text) else text.replace("**", "")
    text = _DRESS.sub(" ", _DELIMITERS.sub("", text))
    text = _thousands(text)
    text = _STYLE.sub("", _SPACE.sub(lambda m: m.group(1) or " ", text))
    for _ in range(3):
        text = _TEXT.sub(_text, text)
    text = _ONE_LETTER_UNIT.sub(rf"\1{WORD_OPEN}\2{WORD_CLOSE}", text.strip())
    text = _PLAIN_WORDS.sub(_word, text)
    text = re.sub(r"^\s*=", "", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\deg ", text)
    text = _POWERED.sub(rf"{WORD_OPEN}\1^\2{WORD_CLOSE}", text)
    text = _OVER.sub("/", text)
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    return re.sub(r"\s+", " ", text).strip()


def _unicode(text: str) -> str:
    """Unicode mathematics as LaTeX."""
    text = re.sub("[" + "".join(_SUPER) + "]+", lambda m: "^{" + "".join(_SUPER[c] for c in m.group()) + "}", text)
    text = re.sub("[" + "".join(_SUB) + "]+", lambda m: "_{" + "".join(_SUB[c] for c in m.group()) + "}", text)
    for sign, (a, b) in _VULGAR.items():
        if sign in text:
            text = text.replace(sign, rf"\frac{{{a}}}{{{b}}}")
    text = text.translate(_UNICODE)
    text = re.sub(r"\\([√∛])\s*([0-9]+(?:\.[0-9]+)?|[a-zA-Z](?![a-zA-Z])|\\[a-z]+|(?=[({]))", _root, text)
    return text


def _root(m: re.Match[str]) -> str:
    sign = r"\sqrt" if m.group(1) == "√" else r"\sqrt[3]"
    return sign + (f"{{{m.group(2)}}}" if m.group(2) else "")


_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\{,\}|\\[,;: ]\s*|,\\!\s*|~|\\!,)[0-9]{3})+(?![0-9])")
_SPACED = re.compile(r"(?<![0-9.,/^_ ])[0-9]{1,3}(?: [0-9]{3})+(?![0-9]| ?/|,)")


def _thousands(text: str) -> str:
    r"""Digits that LaTeX sets in groups are one number: `10\,000`, `11{,}111`, `10 000`. (Groups with bare commas may be lists.)"""
    text = _GROUPS.sub(lambda m: re.sub(r"[^0-9]", "", m.group()), text)
    return _SPACED.sub(lambda m: m.group().replace(" ", ""), text)


def _text(m: re.Match[str]) -> str:
    r"""The content of `\text{…}`: as formula when it is one (a number, a letter, a function), else as words."""
    inside = m.group(1)
    unit = (
        m.group().startswith((r"\text{", r"\mathrm", r"\mbox", r"\textrm"))
        and len(inside.strip()) == 1
        and inside.strip() in "mgshLlNJWVKA"
    )
    if unit and (
        inside != inside.strip()
        or m.group().startswith(r"\mathrm")
        or re.search(r"[0-9}]\s*$", m.string[max(0, m.start() - 3) : m.start()])
    ):
        return WORD_OPEN + inside.strip() + WORD_CLOSE
    if _MATHY.fullmatch(inside.strip()):
        name = inside.strip()
        return f" \\{name} " if name in _KNOWN else f" {inside} "
    return WORD_OPEN + inside.strip() + WORD_CLOSE


def _word(m: re.Match[str]) -> str:
    """Plain words between formulas: connectives, units and prose. Products such as `xy` and names such as `pi` stay formula."""
    word = m.group()
    before = m.string[: m.start()]
    if before.rfind(WORD_OPEN) > before.rfind(WORD_CLOSE) or word.split()[0] in _KNOWN or word in ("begin", "end"):
        return word
    if before.endswith(("{", "\\begin{", "\\end{")) and re.search(r"\\(?:begin|end|mathbb|mathcal)\{$", before):
        return word
    longest = max(map(len, re.split(r"[-' ]+", word)))
    if longest >= 4 or word.lower() in _WORDS or any(w.lower() in _WORDS for w in word.split()):
        return WORD_OPEN + word + WORD_CLOSE
    return word


_STRIP_PAIRS = {"(": ")", "{": "}"}


def peel(text: str) -> str:
    """`text` without the parentheses and braces that enclose all of it, and without a full stop or comma at its end."""
    text = text.strip().rstrip(".,;: ").strip()
    depth = _enclosing(text)
    return text[depth : len(text) - depth].strip() if depth else text


def _enclosing(text: str) -> int:
    """How many pairs enclose the whole text, found in one pass: for `((1)+(2))` it is 1."""
    lead = 0
    while lead < len(text) and text[lead] in "({":
        lead += 1
    if not lead:
        return 0
    stack: list[int] = []
    partner: dict[int, int] = {}
    several: set[int] = set()  # parentheses with a comma right inside: a tuple
    i = 0
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 2
            continue
        if c in "({[":
            stack.append(i)
        elif c in ")}]" and stack:
            partner[stack.pop()] = i
        elif c in ",;" and stack and text[stack[-1]] == "(":
            several.add(stack[-1])
        i += 1
    depth = 0
    while (
        depth < lead
        and depth not in several
        and partner.get(depth) == len(text) - 1 - depth
        and _STRIP_PAIRS[text[depth]] == text[len(text) - 1 - depth]
    ):
        depth += 1
    return depth


def split(text: str, separators: str = ",") -> list[str]:
    """`text` cut at separators outside all brackets; one part when brackets do not balance."""
    parts, depth, last, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == "\\":
            if text[i + 1 : i + 2] in ("{", "}"):
                depth += 1 if text[i + 1] == "{" else -1
            i += 2
            continue
        if c in "({[" + WORD_OPEN:
            depth += 1
        elif c in ")}]" + WORD_CLOSE:
            depth -= 1
            if depth < 0:
                return [text]
        elif depth == 0 and c in separators:
            parts.append(text[last:i])
            last = i + 1
        i += 1
    return [text] if depth else [*parts, text[last:]]
