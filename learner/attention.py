"""Attention over sequences that lie one after another, without padding and without a mask; answers of a group share their prompt.

Shape legend: Q heads, D head size, L = R·W positions of a micro-batch, S segments, P runs of answers,
B sequences of a bucket, T their padded length.

A segment is a run of positions that attends causally to itself and, where it has a prefix, to all of that prefix: a prompt once, then
each of its answers with the prompt as prefix. A dense L × L mask costs as much as all linear layers at a few thousand tokens; here the
work is that of the sequences alone. The two parts of an answer's attention (its own tokens, the prompt's) are separate kernel calls whose
results are merged by their log-sum-exp; given the merged output and log-sum-exp, each part's backward kernel gives its exact share of the
gradient (the identity that blockwise attention rests on, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "winnow_segments"
"""Under this name transformers' models find `segment_attention`."""

SLACK = 0.8  # sequences at least this share of a bucket's longest go into the bucket
aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Bucket:
    """Segments of similar length as one padded batch. Padding repeats a segment's last position, after it, where no real one looks.

    `gather` are the B·T positions read; `real` says which of them are no padding, and `positions` where these lie; `padding`
    [B, 1, T, 1] marks the others, where there are any. A bucket of one segment is a slice from `start`, and these are None.
    """

    count: int
    length: int
    start: int
    gather: Tensor | None = None
    real: Tensor | None = None
    positions: Tensor | None = None
    padding: Tensor | None = None

    @classmethod
    def of(cls, start_B: np.ndarray, length_B: np.ndarray, device: torch.device) -> Bucket:
        """From the first positions and the lengths."""
        count, longest = len(start_B), int(length_B.max())
        if count == 1:
            return cls(1, longest, int(start_B[0]))
        offset_T, last_B = np.arange(longest), length_B - 1
        gather_BT = start_B[:, None] + np.minimum(offset_T, last_B[:, None])
        padding_BT = offset_T > last_B[:, None]
        real = np.flatnonzero(~padding_BT.ravel())
        gather, inside, positions = (torch.from_numpy(x).to(device) for x in (gather_BT.ravel(), real, gather_BT.ravel()[real]))
        padding = torch.from_numpy(padding_BT[:, None, :, None]).to(device) if padding_BT.any() else None
        return cls(count, longest, -1, gather, inside, positions, padding)


@dataclass(frozen=True)
class Shared:
    """Runs of answers, and the prompt that each run attends to: prompts of one length, since their keys are not padded."""

    answers: Bucket
    prompts: Bucket


@dataclass(frozen=True)
class Segments:
    """How the positions of a micro-batch attend: each segment to itself, and answers to the prompt that they share.

    `bounds` [S + 1] int32 and `longest` are for kernels that take sequence boundaries; they hold only where nothing is shared.
    """

    buckets: tuple[Bucket, ...]
    prefixes: tuple[Shared, ...]
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, table_S3: np.ndarray, device: torch.device) -> Segments:
        """From (start, stop, index of the prefix's segment or −1) of every segment, in order and without gaps."""
        start_S, stop_S, prefix_S = table_S3.T
        length_S = stop_S - start_S
        runs: list[tuple[int, int, int, int]] = []  # (first, stop) of answers in a row, (first, stop) of their prompt
        for s in np.flatnonzero(prefix_S >= 0):
            head = (int(start_S[prefix_S[s]]), int(stop_S[prefix_S[s]]))
            first = int(start_S[s])
            if first == int(stop_S[s]):
                continue  # an answer of one token: the prompt predicts it
            if runs and runs[-1][2:] == head and runs[-1][1] == first:
                first = runs.pop()[0]
            runs.append((first, int(stop_S[s]), *head))
        buckets = [Bucket.of(start_S[b], length_S[b], device) for b in _alike(length_S)]
        bounds = torch.from_numpy(np.append(start_S, stop_S[-1]).astype(np.int32)).to(device)
        return cls(tuple(buckets), tuple(_shared(np.array(runs).reshape(-1, 4), device)), bounds, int(length_S.max()))

    @classmethod
    def of_positions(cls, position_RW: Tensor) -> Segments:
        """From positions that restart at 0 with each sequence: nothing is shared."""
        flat = position_RW.flatten().cpu().numpy()
        start_S = np.flatnonzero(flat == 0)
        table = np.stack([start_S, np.append(start_S[1:], len(flat)), np.full(len(start_S), -1)], axis=1)
        return cls.of(table, position_RW.device)


def _alike(length_S: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of those of similar length, the longest first; empty ones are in none."""
    order = np.argsort(-length_S, kind="stable")
    order = order[length_S[order] > 0]
    while len(order):
        count = int(np.searchsorted(-length_S[order], -SLACK * length_S[order[0]], side="right"))
        yield order[:count]
        order = order[count:]


def _shared(runs_P4: np.ndarray, device: torch.device) -> Iterator[Shared]:
    """From (first, stop) of every run and of its prompt: those of similar length with prompts of one length together.

    Short prompts are many, and a kernel call for each would cost more than its products.
    """
    start_P, stop_P, head_P, neck_P = runs_P4.T
    length_P, prompt_P = stop_P - start_P, neck_P - head_P
    for size in np.unique(prompt_P):
        same = np.flatnonzero(prompt_P == size)
        for b in (same[alike] for alike in _alike(length_P[same])):
            yield Shared(Bucket.of(start_P[b], length_P[b], device), Bucket.of(head_P[b], prompt_P[b], device))


def _take(x_LQ: Tensor, bucket: Bucket) -> Tensor:
    """[L, Q, ...] -> [B, Q, T, ...], a view of whole rows."""
    if bucket.gather is None:
        return x_LQ[None, bucket.start : bucket.start + bucket.length].transpose(1, 2)
    return x_LQ.index_select(0, bucket.gather).unflatten(0, (bucket.count, bucket.length)).transpose(1, 2)


def _rows(x_BQT: Tensor, bucket: Bucket) -> Tensor:
    """The inverse, without the padding: [B, Q, T, ...] -> [real, Q, ...]."""
    flat = x_BQT.transpose(1, 2).flatten(0, 1)
    return flat if bucket.padding is None else flat.index_select(0, bucket.real)


def _put(out_LQ: Tensor, x_BQT: Tensor, bucket: Bucket) -> None:
    """Those rows to where they lie in `out_LQ`."""
    if bucket.positions is None:
        out_LQ[bucket.start : bucket.start + bucket.length] = _rows(x_BQT, bucket)
    else:
        out_LQ.index_copy_(0, bucket.positions, _rows(x_BQT, bucket))


def _add(out_LQ: Tensor, x_BQT: Tensor, bucket: Bucket) -> None:
    """Those rows onto what lies there; a prompt may be there twice, for two runs of its answers."""
    if bucket.positions is None:
        out_LQ[bucket.start : bucket.start + bucket.length] += _rows(x_BQT, bucket)
    else:
        out_LQ.index_add_(0, bucket.positions, _rows(x_BQT, bucket))


class _Attend(torch.autograd.Function):
    """`out_LQD` from `q`, `k`, `v` [L, Q, D], on the CPU. The log-sum-exp of every position is kept as [L, Q]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))  # as models lay them out, so that nothing is copied
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        for bucket in segments.buckets:
            part, part_lse = kernel(*(_take(x, bucket) for x in (q, k, v)), is_causal=True, scale=scale)
            _put(out, part, bucket)
            _put(lse, part_lse, bucket)
        for shared in segments.prefixes:
            answers, prompts = shared.answers, shared.prompts
            part, part_lse = kernel(_take(q, answers), _take(k, prompts), _take(v, prompts), scale=scale)
            own_lse = _take(lse, answers)
            both = torch.logaddexp(own_lse, part_lse)
            own = _take(out, answers) * (own_lse - both).exp_()[..., None]
            _put(out, own.add_(part * (part_lse - both).exp_()[..., None]).to(out.dtype), answers)
            _put(lse, both, answers)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward

        def taken(own: Bucket, keys: Bucket) -> list[Tensor]:
            upstream = _take(grad, own)
            if own.padding is not None:
                upstream.masked_fill_(own.padding, 0.0)  # nothing comes back through padding
            return [upstream, _take(q, own), _take(k, keys), _take(v, keys), _take(out, own), _take(lse, own).contiguous()]

        for bucket in ctx.segments.buckets:
            parts = kernel(*taken(bucket, bucket), 0.0, True, scale=ctx.scale)
            for total, part in zip((dq, dk, dv), parts, strict=True):
                _put(total, part, bucket)
        for shared in ctx.segments.prefixes:
            parts = kernel(*taken(shared.answers, shared.prompts), 0.0, False, scale=ctx.scale)
            for total, part, bucket in zip((dq, dk, dv), parts, (shared.answers, shared.prompts, shared.prompts), strict=True):
                _add(total, part, bucket)
        return dq, dk, dv, None, None


def attend(q_QLD: Tensor, k_KLD: Tensor, v_KLD: Tensor, segments: Segments, scale: float) -> Tensor:
    """`out_QLD`; keys and values may have fewer heads, each of which serves as many query heads in a row."""
    if q_QLD.is_cuda:
        assert not segments.prefixes, "shared prompts are for the CPU's kernel"
        # [L, heads, D], in 16 bits; the kernel knows grouped heads, and autograd knows the kernel.
        given = [x.transpose(0, 1) for x in (q_QLD, k_KLD, v_KLD)]
        bounds, longest = segments.bounds, segments.longest
        out: Tensor = aten._flash_attention_forward(*given, bounds, bounds, longest, longest, 0.0, True, False, scale=scale)[0]
        return out.transpose(0, 1)
    q, k, v = (x.transpose(0, 1) for x in (q_QLD, k_KLD, v_KLD))
    repeat = len(q_QLD) // len(k_KLD)
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    return _Attend.apply(q, k, v, segments, scale).transpose(0, 1)


def segment_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers' attention layers call: query [R, Q, W, D], key and value [R, K, W, D] -> [R, W, Q, D]."""
    segments = kwargs.get("segments")
    assert isinstance(segments, Segments) and attention_mask is None, "the model did not pass on how its positions attend"
    rows, _, width, _ = query.shape
    flat = [x[0] if rows == 1 else x.transpose(0, 1).flatten(1, 2) for x in (query, key, value)]
    out_QLD = attend(flat[0], flat[1], flat[2], segments, scaling)
    return out_QLD.transpose(0, 1).unflatten(0, (rows, width)), None


AttentionInterface.register(NAME, segment_attention)


def is_plain(settings: Any) -> bool:
    """Whether a model's text config asks for nothing but full causal attention: no windows, no caps, no sinks, no recurrent layers."""
    kinds = set(getattr(settings, "layer_types", None) or ["full_attention"])
    capped = getattr(settings, "attn_logit_softcapping", None)
    window = getattr(settings, "sliding_window", None) if getattr(settings, "use_sliding_window", True) else None
    return kinds == {"full_attention"} and capped is None and (window is None or hasattr(settings, "layer_types"))
