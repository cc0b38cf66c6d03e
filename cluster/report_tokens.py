"""An answer's text cut into its tokens, by the tokenizer in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BROKEN = "\ufffd"
"""What a decoder gives for part of a character."""
CONTEXT = 4
"""Tokens before a piece that a decoder which looks back (at a leading space) is given."""


class Pieces:
    """Cuts texts into tokens. Without a tokenizer, or where the tokens do not give the text, a text is one piece."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._special = {} if tokenizer is None else {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self._alone: dict[int, str] = {}

    @classmethod
    def of(cls, run_dir: Path) -> Pieces:
        """By `RUN/tokenizer/tokenizer.json`."""
        path = run_dir / "tokenizer" / "tokenizer.json"
        if not path.is_file():
            return cls(None)
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception:  # the library raises nothing narrower for a file that it cannot read
            return cls(None)

    def cut(self, text: str, ids: Sequence[int]) -> list[str]:
        """Pieces that together are `text`, one per token or, where tokens are parts of one character, per character.

        Special tokens (the end of the answer), which are not in the text, follow as pieces of their own. What lies behind the
        tokens given, or the tokens that lie behind the text, are left whole or out: long answers are kept in part.
        """
        if self._tokenizer is None or not ids:
            return [text] if text else []
        for pieces in (self._by_token(ids), self._by_context(ids)):
            fitted = self._fit(text, pieces)
            if fitted is not None:
                return fitted
        return [text] if text else []

    def _fit(self, text: str, pieces: list[tuple[str, bool]]) -> list[str] | None:
        """The pieces, if those that are no special tokens lie end to end in `text`; the text may end earlier or later."""
        at, found, behind = 0, [], ""
        for piece, special in pieces:
            if special:
                found.append(piece)
            elif text.startswith(piece, at):
                found.append(piece)
                at += len(piece)
            elif piece.startswith(text[at:]):  # the text was cut within this token
                behind, at = text[at:], len(text)
                break
            else:
                return None
        behind += text[at:]
        return [*found, behind] if behind else found

    def _by_token(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Each token decoded alone; several together where one alone is part of a character."""
        pieces: list[tuple[str, bool]] = []
        held: list[int] = []
        for token in ids:
            if token in self._special:
                pieces.append((self._special[token], True))
                continue
            held.append(token)
            piece = self._decode_alone(token) if len(held) == 1 else self._decode(held)
            if BROKEN not in piece or len(held) > 8:
                pieces.append((piece, False))
                held = []
        return [*pieces, (self._decode(held), False)] if held else pieces

    def _by_context(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """What each token adds to the text of those before it."""
        pieces: list[tuple[str, bool]] = []
        plain: list[int] = []
        told = 0  # tokens of `plain` whose text is in `pieces`
        for token in ids:
            if token in self._special:
                pieces.append((self._special[token], True))
                continue
            plain.append(token)
            start = max(told - CONTEXT, 0)
            before, now = self._decode(plain[start:told]), self._decode(plain[start:])
            if not now.endswith(BROKEN) and now.startswith(before):
                pieces.append((now[len(before) :], False))
                told = len(plain)
        return pieces

    def _decode_alone(self, token: int) -> str:
        if token not in self._alone:
            self._alone[token] = self._decode([token])
        return self._alone[token]

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""
