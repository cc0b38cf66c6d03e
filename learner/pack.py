"""Answers of one optimiser step -> the same number of token-budgeted micro-batches on every rank.

Pure and deterministic: every rank computes the same plan from lengths alone, then builds only its own arrays.
Shape legend: A answers of the step, K sequences of a micro-batch, R rows of a micro-batch, W tokens of a row,
N policy-written tokens of a micro-batch.

Several sequences lie one after another in a row, and `position_RW` restarts at 0 with each, which is what keeps them
apart in the attention. A sequence is the prompt and the answer without the answer's last token, which predicts nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.records import Completion, Prompt

# On one CPU core a forward and backward pass over short answers is fastest near this width: wider rows pay for the
# dense W x W mask of sdpa, narrower ones for padding.
DEFAULT_ROW = 128


@dataclass(frozen=True)
class PackSettings:
    """How rows and micro-batches are cut.

    `micro_tokens`: budget of R · W. `row_tokens`: W under a dense mask; 0: `max(longest, DEFAULT_ROW)`. `single_row`:
    one row of up to `micro_tokens`, for attention kernels that know sequence boundaries and want R = 1.
    `hidden`: the model's width, for the attention's share in a sequence's cost.
    """

    micro_tokens: int
    row_tokens: int = 0
    single_row: bool = False
    hidden: int = 1024


@dataclass(frozen=True)
class StepPlan:
    """Who computes what: `micro[rank][i]` is micro-batch i of a rank, a tuple of rows, each a tuple of answer ids."""

    width: int
    micro: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank, the same on all."""
        return len(self.micro[0])

    def answers_of(self, rank: int) -> list[int]:
        """All answer ids of a rank, sorted."""
        return sorted(a for micro in self.micro[rank] for row in micro for a in row)


@dataclass(frozen=True)
class Micro:
    """One micro-batch as arrays. `flat_N` indexes the R·W positions whose logits predict the N targets.

    `answer_N` numbers the K sequences from 0 within the micro-batch, and `ids_K` says which answer of the step each
    is. `mask_N` is False only in a dummy, which has one row, one target and `ids_K` = [-1].
    """

    input_RW: np.ndarray  # int64
    position_RW: np.ndarray  # int64
    flat_N: np.ndarray  # int64
    target_N: np.ndarray  # int64
    answer_N: np.ndarray  # int64
    ids_K: np.ndarray  # int64
    behav_N: np.ndarray  # float32
    mask_N: np.ndarray  # bool


def plan_step(lengths_A: Sequence[int] | np.ndarray, ids: Sequence[int] | np.ndarray, *, ranks: int, settings: PackSettings) -> StepPlan:
    """Plan the answers `ids`, whose sequences have `lengths_A[id]` tokens, for `ranks` ranks.

    Whole answers go to the rank with the least cost so far, longest first; within a rank they are packed best-fit
    decreasing. All ranks get as many micro-batches as the one that needs most: the others' rows are spread evenly, and
    an empty tuple of rows stands for a dummy. With no answers at all there are no micro-batches.
    """
    chosen = sorted((int(i) for i in ids), key=lambda i: (-int(lengths_A[i]), i))
    if not chosen:
        return StepPlan(width=0, micro=tuple(() for _ in range(ranks)))
    longest = int(lengths_A[chosen[0]])
    if settings.single_row:
        width, rows_per_micro = max(longest, settings.micro_tokens), 1
    else:
        width = max(longest, min(settings.row_tokens or DEFAULT_ROW, settings.micro_tokens))
        rows_per_micro = max(1, settings.micro_tokens // width)
    shares = _balance(chosen, lengths_A, ranks, settings.hidden)
    rows = [_pack_rows(share, lengths_A, width) for share in shares]
    count = max(-(-len(r) // rows_per_micro) for r in rows)
    return StepPlan(width=width, micro=tuple(_spread(r, count) for r in rows))


def _balance(chosen: list[int], lengths_A: Sequence[int] | np.ndarray, ranks: int, hidden: int) -> list[list[int]]:
    """Longest first, each to the rank with the least cost; ties go to the lowest rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    cost = [0.0] * ranks
    for answer in chosen:
        length = int(lengths_A[answer])
        rank = min(range(ranks), key=lambda r: (cost[r], r))
        shares[rank].append(answer)
        # A layer's matrices cost about 24·H² per token, its attention 2·H·length: hence the ratio length / (12·H).
        cost[rank] += length * (1.0 + length / (12.0 * hidden))
    return shares


def _pack_rows(share: list[int], lengths_A: Sequence[int] | np.ndarray, width: int) -> list[tuple[int, ...]]:
    """Best-fit decreasing: each sequence goes to the fullest row that still has room for it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for answer in share:
        length = int(lengths_A[answer])
        at = bisect_left(room, (length, -1))
        left, row = room.pop(at) if at < len(room) else (width, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(answer)
        insort(room, (left - length, row))
    return [tuple(r) for r in rows]


def _spread(rows: list[tuple[int, ...]], count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows into `count` micro-batches whose numbers of rows differ by at most one."""
    bounds = [len(rows) * i // count for i in range(count + 1)]
    return tuple(tuple(rows[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True)
class Answer:
    """One answer with its prompt. `written` are the indices, within the answer, of the tokens that the policy wrote."""

    prompt_P: np.ndarray  # int32
    tokens_T: np.ndarray  # int32
    logp_T: np.ndarray  # float32
    written: np.ndarray  # int64

    @classmethod
    def of(cls, prompt: Prompt, completion: Completion) -> Answer:
        """From what generation returned."""
        parts = [np.arange(s.start, s.stop, dtype=np.int64) for s in completion.spans if s.by_policy]
        written = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return cls(prompt.tokens_P, completion.tokens_T, completion.logp_T, written)

    @classmethod
    def example(cls, prompt_P: np.ndarray, tokens_T: np.ndarray) -> Answer:
        """A supervised example: every token of the completion is a target."""
        return cls(prompt_P, tokens_T, np.zeros(len(tokens_T), dtype=np.float32), np.arange(len(tokens_T), dtype=np.int64))

    @property
    def size(self) -> int:
        """Tokens that the model reads: all but the answer's last."""
        return len(self.prompt_P) + len(self.tokens_T) - 1


def build_micro(rows: Sequence[Sequence[int]], answers: Mapping[int, Answer]) -> Micro:
    """The arrays of one micro-batch. The width is that of its fullest row; the rest of a row is a sequence of zeros."""
    if not rows:
        return _dummy()
    width = max(sum(answers[a].size for a in row) for row in rows)
    input_RW = np.zeros((len(rows), width), dtype=np.int64)
    position_RW = np.zeros((len(rows), width), dtype=np.int64)
    flat: list[np.ndarray] = []
    target: list[np.ndarray] = []
    number: list[np.ndarray] = []
    behav: list[np.ndarray] = []
    ids: list[int] = []
    for r, row in enumerate(rows):
        start = 0
        for answer_id in row:
            one = answers[answer_id]
            first, stop = start + len(one.prompt_P), start + one.size
            assert first > start and len(one.written), "a sequence needs a prompt and at least one token to predict"
            input_RW[r, start:first] = one.prompt_P
            input_RW[r, first:stop] = one.tokens_T[:-1]
            position_RW[r, start:stop] = np.arange(one.size)
            # The logits at position p - 1 predict the token at position p.
            flat.append(r * width + first - 1 + one.written)
            target.append(one.tokens_T[one.written])
            behav.append(one.logp_T[one.written])
            number.append(np.full(len(one.written), len(ids), dtype=np.int64))
            ids.append(answer_id)
            start = stop
        position_RW[r, start:] = np.arange(width - start)
    count = sum(len(f) for f in flat)
    return Micro(
        input_RW=input_RW,
        position_RW=position_RW,
        flat_N=np.concatenate(flat).astype(np.int64),
        target_N=np.concatenate(target).astype(np.int64),
        answer_N=np.concatenate(number),
        ids_K=np.array(ids, dtype=np.int64),
        behav_N=np.concatenate(behav).astype(np.float32),
        mask_N=np.ones(count, dtype=bool),
    )


def _dummy() -> Micro:
    """A micro-batch that trains nothing, for a rank without rows: the others' collectives must find it there."""
    zeros = np.zeros(1, dtype=np.int64)
    return Micro(
        input_RW=np.zeros((1, 2), dtype=np.int64),
        position_RW=np.arange(2, dtype=np.int64)[None],
        flat_N=zeros,
        target_N=zeros,
        answer_N=zeros,
        ids_K=np.array([-1], dtype=np.int64),
        behav_N=np.zeros(1, dtype=np.float32),
        mask_N=np.zeros(1, dtype=bool),
    )
