"""The stream of prompts: seeded, mixed by weight, endless over epochs, resumable to the exact prompt.

Nothing is kept in memory but 8 bytes per row: an epoch's order is a keyed permutation that is computed place by place.

Held-out questions are chosen by a stable hash of their text, whatever the training seed, so the same question is never
on both sides, even where it occurs twice. With `eval_sources` made of data sets, exactly their questions are held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollout.chat import encode_prompt, require_template
from rollout.config import DataConfig
from rollout.errors import UserError
from rollout.mastery import Mastery
from rollout.records import Prompt, PromptResult
from rollout.sources import Row, Source, fingerprint, open_sources, rows_of

ROUNDS = 6
OVERLONG_IN_A_ROW = 10_000  # of an unbounded task, before it is called an error


def permute(place: int, size: int, key: str) -> int:
    """Where `place` goes under a pseudo-random permutation of `[0, size)` named by `key`.

    A Feistel network over the next power of four, walked until it lands inside (Black and Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains", section 5): constant memory for any size.
    """
    half = max(3, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=16).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        place = left << half | right
        if place < size:
            return place


@dataclass
class _Cursor:
    """Where one training source stands. `train` counts its trainable rows, None where they cannot be counted.

    `retired` and `overlong` are disjoint.
    """

    source: Source
    train: int | None
    epoch: int = 0
    position: int = 0
    drawn: int = 0
    retired: set[int] = field(default_factory=set)
    overlong: set[int] = field(default_factory=set)
    mastery: Mastery = field(default_factory=Mastery)

    @property
    def exhausted(self) -> bool:
        return self.train is not None and len(self.retired) + len(self.overlong) >= self.train


@dataclass(frozen=True)
class SourceStats:
    """Rows of a source: all, trainable and held out (None where they cannot be counted), retired, dropped as overlong."""

    name: str
    rows: int
    train: int | None
    heldout: int | None
    retired: int
    overlong: int


class PromptStream:
    """Training prompts one by one, and the held-out ones.

    `folder` keeps what must be stored to be the same after a resume (samples of reasoning-gym tasks).
    Raises UserError for whatever is wrong with a source, before any prompt is drawn.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, seed: int, folder: Path | None = None) -> None:
        require_template(tokenizer, config)
        if not config.sources:
            raise UserError("sources = [] has no training prompts: name at least one source, e.g. task = 'addition'")
        self.config, self.tokenizer, self.seed, self.uid = config, tokenizer, seed, 0
        self.sources = open_sources(config.sources, folder=folder)  # the questions do not depend on the training seed
        self.evals = open_sources(config.eval_sources, folder=folder)
        self._prints = {id(s): s.fingerprints() for s in [*self.sources, *self.evals]}
        self._cut = self._threshold()
        known = [p for s in self.evals if s.config.task is None and (p := self._prints[id(s)]) is not None]
        self._eval_prints = np.unique(np.concatenate(known)) if known else np.zeros(0, dtype=np.uint64)
        self.cursors = {s.name: _Cursor(s, self._count_train(s)) for s in self.sources}

    # ---- which side a question is on

    def _threshold(self) -> int:
        """Fingerprints below it are held out. Sets so small that none would be give up the question with the lowest."""
        if self.evals and all(s.config.task is None for s in self.evals):
            return 0
        cut = int(self.config.heldout_share * 2.0**64)
        prints = [p for s in (self.evals or self.sources) if (p := self._prints[id(s)]) is not None]
        if cut and prints and len(prints) == len(self.evals or self.sources):
            lowest = np.unique(np.concatenate(prints))
            if len(lowest) > 1 and int(lowest[0]) >= cut:
                cut = int(lowest[0]) + 1
        return cut

    def is_heldout(self, question: str) -> bool:
        """Whether a question's text is on the held-out side, and so never trained on."""
        return bool(self._held(np.uint64(fingerprint(question))))

    def _held(self, prints: Any) -> Any:
        """Whether fingerprints (an array or one uint64) are on the held-out side."""
        below = prints < np.uint64(self._cut)
        if not len(self._eval_prints):
            return below
        place = np.minimum(np.searchsorted(self._eval_prints, prints), len(self._eval_prints) - 1)
        return below | (self._eval_prints[place] == prints)

    def _count_train(self, source: Source) -> int | None:
        prints = self._prints[id(source)]
        if prints is None:
            return None
        count = int((~self._held(prints)).sum())
        if not count:
            raise UserError(
                f"source {source.name!r} has {source.size} rows and all are held out: add rows, or lower heldout_share = "
                f"{self.config.heldout_share}"
            )
        return count

    # ---- training

    def next(self) -> Prompt | None:
        """The next training prompt, its uid one more than the last; None once every prompt has been retired."""
        while (cursor := self._choose()) is not None:
            prompt = self._advance(cursor)
            if prompt is not None:
                self.uid += 1
                cursor.drawn += 1
                return prompt
        return None

    def _choose(self) -> _Cursor | None:
        """The source furthest behind its share by weight, the first of those on a par."""
        live = [c for c in self.cursors.values() if not c.exhausted]
        if not live:
            return None
        total, weights = sum(c.drawn for c in live) + 1, sum(c.source.config.weight for c in live)
        return max(live, key=lambda c: round(c.source.config.weight / weights * total - c.drawn, 9))

    def _advance(self, cursor: _Cursor) -> Prompt | None:
        """The next usable prompt of a source; None when it turns out to have none left."""
        source, in_a_row = cursor.source, 0
        prints = self._prints[id(source)]
        while not cursor.exhausted:
            epoch, index = cursor.epoch, self._row_at(cursor)
            cursor.position += 1
            if cursor.position == source.size:
                cursor.epoch, cursor.position = cursor.epoch + 1, 0
            if index in cursor.retired or index in cursor.overlong or (prints is not None and self._held(prints[index])):
                continue
            if not cursor.mastery.drawn(index, f"{self.seed}/curriculum/{source.name}/{epoch}", self.config):
                continue
            row = source.read(index)
            if prints is None and self.is_heldout(row.question):
                continue
            prompt = self._prompt(row, self.uid, source.name, epoch)
            if prompt is not None:
                return prompt
            cursor.overlong.add(index)
            in_a_row += 1
            if len(cursor.overlong) == cursor.train or in_a_row == OVERLONG_IN_A_ROW:
                raise UserError(
                    f"every prompt of source {source.name!r} has more than max_prompt_tokens = {self.config.max_prompt_tokens} "
                    "tokens: raise it"
                )
        return None

    def _row_at(self, cursor: _Cursor) -> int:
        if not self.config.shuffle:
            return cursor.position
        return permute(cursor.position, cursor.source.size, f"{self.seed}/{cursor.source.name}/{cursor.epoch}")

    def _prompt(self, row: Row, uid: int, name: str, epoch: int) -> Prompt | None:
        """The tokenised prompt; None when it is overlong and such prompts are dropped."""
        tokens_P, text = encode_prompt(self.tokenizer, row.prompt, self.config)
        if len(tokens_P) > self.config.max_prompt_tokens:
            if self.config.overlong_prompts == "error":
                raise UserError(
                    f"the prompt of {row.where} has {len(tokens_P)} tokens, more than max_prompt_tokens = {self.config.max_prompt_tokens}: "
                    "raise it, or set overlong_prompts = 'drop'"
                )
            return None
        return Prompt(uid, tokens_P, text, row.answer, row.verifier, name, str(row.index), epoch, row.meta)

    def recall(self, uid: int, source: str, row: str, epoch: int = 0) -> Prompt:
        """A prompt dispatched before, again: what a resume needs of groups that were in flight."""
        prompt = self._prompt(self.cursors[source].source.read(int(row)), uid, source, epoch)
        assert prompt is not None, f"row {row} of {source} was never a prompt"
        return prompt

    def retire(self, source: str, row: str) -> None:
        """Never draws that row again."""
        cursor = self.cursors[source]
        assert not self.is_heldout(cursor.source.read(int(row)).question), f"row {row} of {source} is held out"
        cursor.overlong.discard(int(row))
        cursor.retired.add(int(row))
        cursor.mastery.forget(int(row))

    def note(self, results: Iterable[PromptResult]) -> None:
        """What groups said of their prompts, in dispatch order: for `retire_after` and `curriculum`."""
        if not (self.config.retire_after or self.config.curriculum):
            return
        for result in results:
            cursor, row = self.cursors[result.source], int(result.row)
            if row not in cursor.retired and result.answers and cursor.mastery.note(row, result.right, result.answers, self.config):
                self.retire(result.source, result.row)

    # ---- held out, checks, state

    def heldout(self, n: int) -> list[Prompt]:
        """Up to n held-out prompts, uids -1, -2, …; the same for every seed, and those for a smaller n come first."""
        sources = self.evals or self.sources
        feeds = [self._heldout_rows(s) for s in sources]
        drawn, weights = [0] * len(sources), [s.config.weight for s in sources]
        live, seen, out = set(range(len(sources))), set[int](), list[Prompt]()
        while live and len(out) < n:
            total, weight = sum(drawn[i] for i in live) + 1, sum(weights[i] for i in live)
            i = max(sorted(live), key=lambda i: round(weights[i] / weight * total - drawn[i], 9))
            row = next(feeds[i], None)
            if row is None:
                live.discard(i)
                continue
            mark = fingerprint(row.question)
            prompt = self._prompt(row, -1 - len(out), sources[i].name, 0) if mark not in seen else None
            seen.add(mark)
            if prompt is not None:
                drawn[i] += 1
                out.append(prompt)
        return out

    def _heldout_rows(self, source: Source) -> Iterator[Row]:
        """Held-out rows of a source, in the order of their fingerprints, or of a fixed permutation where there are too many."""
        prints = self._prints[id(source)]
        if prints is None:
            rows = (source.read(permute(i, source.size, f"heldout/{source.name}")) for i in range(source.size))
            yield from (row for row in rows if self.is_heldout(row.question))
        else:
            held = self._held(prints)
            yield from (source.read(int(i)) for i in np.argsort(prints, kind="stable") if held[i])

    def iter_rows(self, limit: int | None = None) -> Iterator[tuple[str, Row]]:
        """(source name, row) of every source, training and held-out: what a check of gold answers reads. `limit` is per source."""
        for source in [*self.sources, *self.evals]:
            most = limit if self._prints[id(source)] is not None else min(limit or 1000, 1000)
            yield from ((source.name, row) for row in rows_of(source, most))

    def stats(self) -> list[SourceStats]:
        """Counts by training source."""
        return [
            SourceStats(n, c.source.size, c.train, None if c.train is None else c.source.size - c.train, len(c.retired), len(c.overlong))
            for n, c in self.cursors.items()
        ]

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on at the exact prompt, as JSON."""
        sources = {
            name: {
                "data": self._digest(c.source), "epoch": c.epoch, "position": c.position, "drawn": c.drawn,
                "retired": sorted(c.retired), "overlong": sorted(c.overlong), "mastery": c.mastery.state(),
            }
            for name, c in self.cursors.items()
        }  # fmt: skip
        return {"seed": self.seed, "shuffle": self.config.shuffle, "uid": self.uid, "sources": sources}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken. Raises UserError when seed or data are not the same as then."""
        for key, now in (("seed", self.seed), ("shuffle", self.config.shuffle)):
            if state[key] != now:
                raise UserError(
                    f"{key} = {now} is not the {key} = {state[key]} of the checkpoint: resume with the same, or start a new run"
                )
        if set(state["sources"]) != set(self.cursors):
            raise UserError(
                f"sources = {', '.join(self.cursors)} are not those of the checkpoint ({', '.join(state['sources'])}): resume with the same"
            )
        for name, saved in state["sources"].items():
            cursor = self.cursors[name]
            if saved["data"] != self._digest(cursor.source):
                raise UserError(
                    f"source {name!r} has other rows than when the checkpoint was written: bring its data back, or start a new run"
                )
            cursor.epoch, cursor.position, cursor.drawn = saved["epoch"], saved["position"], saved["drawn"]
            cursor.retired, cursor.overlong = set(saved["retired"]), set(saved["overlong"])
            cursor.mastery = Mastery.load(saved["mastery"])
        self.uid = state["uid"]

    def _digest(self, source: Source) -> str:
        """Names a source's rows, so that a resume notices other data."""
        prints = self._prints[id(source)]
        probe = prints.tobytes() if prints is not None else "\n".join(r.question for r in rows_of(source, 64)).encode()
        return f"{source.size}-{hashlib.blake2b(probe, digest_size=6).hexdigest()}"
