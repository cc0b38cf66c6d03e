"""Answers of one optimiser step -> the same number of token-budgeted micro-batches on every rank.

Pure and deterministic: every rank computes the same plan from lengths alone, then builds only its own arrays.
Shape legend: A answers of the step, K answers of a micro-batch, R rows of a micro-batch, W tokens of a row,
N policy-written tokens of a micro-batch, S segments of a micro-batch.

Several sequences lie one after another in a row. A sequence is the prompt and the answer without the answer's last token,
which predicts nothing. Without sharing `position_RW` restarts at 0 with each, which is what keeps them apart in the attention.
With it the prompt of a group stands once before its answers, whose positions each go on where the prompt's ended; then the
segments say what attends to what (learner/attention.py).
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
    one row of up to `micro_tokens`, for attention kernels that know sequence boundaries and want R = 1. `share`: answers of a
    group in one row have its prompt once. `hidden`: the model's width, for the attention's share in a sequence's cost.
    """

    micro_tokens: int
    row_tokens: int = 0
    single_row: bool = False
    share: bool = False
    hidden: int = 1024


@dataclass(frozen=True)
class Groups:
    """Which answers have a prompt in common: the group of each answer of the step, and its prompt's tokens."""

    group_A: Sequence[int] | np.ndarray
    prompt_A: Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Piece:
    """Answers that stay together: one, or several of a group behind their prompt. `size` in tokens, `cost` in a layer's per token."""

    ids: tuple[int, ...]
    size: int
    cost: float


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
    is. `mask_N` is False only in a dummy, which has one row, one target and `ids_K` = [-1]. `segments_S3`: the first of the R·W
    positions of each segment, the one after its last, and the index of the segment that it also attends to as a whole, or −1.
    """

    input_RW: np.ndarray  # int64
    position_RW: np.ndarray  # int64
    flat_N: np.ndarray  # int64
    target_N: np.ndarray  # int64
    answer_N: np.ndarray  # int64
    ids_K: np.ndarray  # int64
    behav_N: np.ndarray  # float32
    mask_N: np.ndarray  # bool
    segments_S3: np.ndarray  # int64


def plan_step(
    lengths_A: Sequence[int] | np.ndarray,
    ids: Sequence[int] | np.ndarray,
    *,
    ranks: int,
    settings: PackSettings,
    groups: Groups | None = None,
) -> StepPlan:
    """Plan the answers `ids`, whose sequences have `lengths_A[id]` tokens, for `ranks` ranks.

    Pieces (single answers, or with `share` and `groups` those of a group) go to the rank with the least cost so far, longest
    first; within a rank they are packed best-fit decreasing. All ranks get as many micro-batches as the one that needs most: the
    others' rows are spread evenly, and an empty tuple of rows stands for a dummy. With no answers at all there are no micro-batches.
    """
    chosen = sorted((int(i) for i in ids), key=lambda i: (-int(lengths_A[i]), i))
    if not chosen:
        return StepPlan(width=0, micro=tuple(() for _ in range(ranks)))
    if settings.share and groups is not None:
        pieces = _shared_pieces(chosen, lengths_A, groups, ranks, settings)
    else:
        pieces = [_piece([(int(lengths_A[i]), i)], 0, settings.hidden) for i in chosen]
    longest = max(piece.size for piece in pieces)
    if settings.single_row:
        width, rows_per_micro = max(longest, settings.micro_tokens), 1
    else:
        width = max(longest, min(settings.row_tokens or DEFAULT_ROW, settings.micro_tokens))
        rows_per_micro = max(1, settings.micro_tokens // width)
    rows = [_pack_rows(share, width) for share in _balance(pieces, ranks)]
    count = max(-(-len(r) // rows_per_micro) for r in rows)
    return StepPlan(width=width, micro=tuple(_spread(r, count) for r in rows))


def _piece(own: Sequence[tuple[int, int]], prompt: int, hidden: int) -> Piece:
    """Of (own tokens, answer) behind a prompt of that many tokens.

    A layer's matrices cost about 24·H² per token, its attention 4·H for each token attended to, on average prompt + own / 2.
    """
    cost = prompt * (1.0 + prompt / (12.0 * hidden)) + sum(t * (1.0 + (2 * prompt + t) / (12.0 * hidden)) for t, _ in own)
    return Piece(tuple(answer for _, answer in own), prompt + sum(t for t, _ in own), cost)


def _shared_pieces(
    chosen: list[int], lengths_A: Sequence[int] | np.ndarray, groups: Groups, ranks: int, settings: PackSettings
) -> list[Piece]:
    """The answers of each group, longest first, in pieces that fit a micro-batch and are small enough to balance the ranks."""
    members: dict[int, list[int]] = {}
    for answer in chosen:
        members.setdefault(int(groups.group_A[answer]), []).append(answer)
    limit = settings.micro_tokens
    if ranks > 1:
        limit = min(limit, sum(int(lengths_A[i]) for i in chosen) // (4 * ranks))
    pieces = []
    for answers in members.values():
        prompt = int(groups.prompt_A[answers[0]])
        own = [(int(lengths_A[a]) - prompt, a) for a in answers]
        parts = _fit([t for t, _ in own], max(limit - prompt, own[0][0]))
        pieces += [_piece([own[i] for i in part], prompt, settings.hidden) for part in parts]
    return sorted(pieces, key=lambda piece: (-piece.size, piece.ids))


def _balance(pieces: list[Piece], ranks: int) -> list[list[Piece]]:
    """In the order given, each to the rank with the least cost; ties go to the lowest rank."""
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    cost = [0.0] * ranks
    for piece in pieces:
        rank = min(range(ranks), key=lambda r: (cost[r], r))
        shares[rank].append(piece)
        cost[rank] += piece.cost
    return shares


def _fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing of descending sizes: each index goes to the fullest bin that still has room for it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, bin), sorted
    for i, size in enumerate(sizes):
        at = bisect_left(room, (size, -1))
        left, chosen = room.pop(at) if at < len(room) else (capacity, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(i)
        insort(room, (left - size, chosen))
    return bins


def _pack_rows(share: list[Piece], width: int) -> list[tuple[int, ...]]:
    return [tuple(a for i in row for a in share[i].ids) for row in _fit([piece.size for piece in share], width)]


def _spread(rows: list[tuple[int, ...]], count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows into `count` micro-batches whose numbers of rows differ by at most one."""
    bounds = [len(rows) * i // count for i in range(count + 1)]
    return tuple(tuple(rows[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True)
class Answer:
    """One answer with its prompt. `written` are the indices, within the answer, of the tokens that the policy wrote.

    Answers of one `group` have one prompt; −1: of none.
    """

    prompt_P: np.ndarray  # int32
    tokens_T: np.ndarray  # int32
    logp_T: np.ndarray  # float32
    written: np.ndarray  # int64
    group: int = -1

    @classmethod
    def of(cls, prompt: Prompt, completion: Completion, group: int = -1) -> Answer:
        """From what generation returned."""
        parts = [np.arange(s.start, s.stop, dtype=np.int64) for s in completion.spans if s.by_policy]
        written = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return cls(prompt.tokens_P, completion.tokens_T, completion.logp_T, written, group)

    @classmethod
    def example(cls, prompt_P: np.ndarray, tokens_T: np.ndarray) -> Answer:
        """A supervised example: every token of the completion is a target."""
        return cls(prompt_P, tokens_T, np.zeros(len(tokens_T), dtype=np.float32), np.arange(len(tokens_T), dtype=np.int64))

    @property
    def size(self) -> int:
        """Tokens that the model reads: all but the answer's last."""
        return len(self.prompt_P) + len(self.tokens_T) - 1


def build_micro(rows: Sequence[Sequence[int]], answers: Mapping[int, Answer], share: bool = False) -> Micro:
    """The arrays of one micro-batch. The width is that of its fullest row; the rest of a row is a sequence of zeros.

    `share`: answers of a group that follow one another in a row have its prompt once.
    """
    if not rows:
        return _dummy()
    layouts = [_lay_out(row, answers, share) for row in rows]
    width = max(stop for layout in layouts for *_, stop in layout)
    input_RW = np.zeros((len(rows), width), dtype=np.int64)
    position_RW = np.zeros((len(rows), width), dtype=np.int64)
    segments: list[tuple[int, int, int]] = []
    flat: list[np.ndarray] = []
    ids: list[int] = []
    prompt_segment = -1
    for r, layout in enumerate(layouts):
        for answer_id, before, head, start, stop in layout:
            one, base, size = answers[answer_id], r * width, len(answers[answer_id].prompt_P)
            assert size and len(one.written), "a sequence needs a prompt and at least one token to predict"
            if head == before:  # the prompt is new: it stands here
                input_RW[r, head : head + size], position_RW[r, head : head + size] = one.prompt_P, np.arange(size)
                if share:
                    prompt_segment = len(segments)
                    segments.append((base + head, base + head + size, -1))
            input_RW[r, start:stop], position_RW[r, start:stop] = one.tokens_T[:-1], size + np.arange(stop - start)
            if share:
                segments.append((base + start, base + stop, prompt_segment))
            else:
                segments.append((base + head, base + stop, -1))
            # The logits at a token's place predict the next one: those of the prompt's last the answer's first.
            flat.append(base + np.where(one.written == 0, head + size - 1, start + one.written - 1))
            ids.append(answer_id)
        end = layout[-1][-1]
        position_RW[r, end:] = np.arange(width - end)
        if end < width:
            segments.append((r * width + end, (r + 1) * width, -1))
    done = [answers[a] for a in ids]
    return Micro(
        input_RW=input_RW,
        position_RW=position_RW,
        flat_N=np.concatenate(flat).astype(np.int64),
        target_N=np.concatenate([one.tokens_T[one.written] for one in done]).astype(np.int64),
        answer_N=np.repeat(np.arange(len(done)), [len(one.written) for one in done]),
        ids_K=np.array(ids, dtype=np.int64),
        behav_N=np.concatenate([one.logp_T[one.written] for one in done]).astype(np.float32),
        mask_N=np.ones(sum(len(one.written) for one in done), dtype=bool),
        segments_S3=np.array(segments, dtype=np.int64),
    )


def _lay_out(row: Sequence[int], answers: Mapping[int, Answer], share: bool) -> list[tuple[int, int, int, int, int]]:
    """For each answer of a row: (its id, where the row ended before it, where its prompt starts, where its own tokens start and stop)."""
    if share:  # pieces of one group may have come into the row apart
        row = sorted(row, key=lambda a: (answers[a].group, a))
    layout: list[tuple[int, int, int, int, int]] = []
    end, head, group = 0, 0, -1
    for answer_id in row:
        one, before = answers[answer_id], end
        if not share or one.group < 0 or one.group != group:
            head, group = end, one.group
            end += len(one.prompt_P)
        start, end = end, end + len(one.tokens_T) - 1
        layout.append((answer_id, before, head, start, end))
    return layout


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
        segments_S3=np.array([[0, 2, -1]], dtype=np.int64),
    )
