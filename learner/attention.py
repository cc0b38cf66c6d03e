"""Attention over sequences that lie one after another, without padding and without a mask; answers of a group share their prompt.

Shape legend: Q heads, D head size, L = R·W positions of a micro-batch, S segments, B sequences of a bucket, T their padded length.

A segment is a run of positions that attends causally to itself and, where it has a prefix, to all of that prefix: a prompt once, then
each of its answers with the prompt as prefix. A dense L × L mask costs as much as all linear layers at a few thousand tokens; here the
work is that of the sequences alone. The two parts of an answer's attention (its own tokens, the prompt's) are separate kernel calls whose
results are merged by their log-sum-exp; given the merged output and log-sum-exp, each part's backward kernel gives its exact share of the
gradient (the identity that blockwise attention rests on, arXiv 2310.01889).
"""

from __future__ import annotations

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

    `gather` are the B·T positions read; `real` says which of them are no padding, and `positions` where these lie. A bucket of one
    segment is a slice from `start`, and these are None.
    """

    count: int
    length: int
    start: int
    gather: Tensor | None = None
    real: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class Segments:
    """How the positions of a micro-batch attend. `prefixes`: (first, stop) of the answers, (first, stop) of the prompt that they share.

    `bounds` [S + 1] int32 and `longest` are for kernels that take sequence boundaries; they hold only where nothing is shared.
    """

    buckets: tuple[Bucket, ...]
    prefixes: tuple[tuple[int, int, int, int], ...]
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, table_S3: np.ndarray, device: torch.device) -> Segments:
        """From (start, stop, index of the prefix's segment or −1) of every segment, in order and without gaps."""
        start_S, stop_S, prefix_S = table_S3.T
        prefixes: list[tuple[int, int, int, int]] = []
        for s in np.flatnonzero(prefix_S >= 0):
            head = (int(start_S[prefix_S[s]]), int(stop_S[prefix_S[s]]))
            first = int(start_S[s])
            if first == int(stop_S[s]):
                continue  # an answer of one token: the prompt predicts it
            if prefixes and prefixes[-1][2:] == head and prefixes[-1][1] == first:
                first = prefixes.pop()[0]
            prefixes.append((first, int(stop_S[s]), *head))
        bounds = torch.from_numpy(np.append(start_S, stop_S[-1]).astype(np.int32)).to(device)
        return cls(tuple(_buckets(start_S, stop_S, device)), tuple(prefixes), bounds, int((stop_S - start_S).max()))

    @classmethod
    def of_positions(cls, position_RW: Tensor) -> Segments:
        """From positions that restart at 0 with each sequence: nothing is shared."""
        flat = position_RW.flatten().cpu().numpy()
        start_S = np.flatnonzero(flat == 0)
        table = np.stack([start_S, np.append(start_S[1:], len(flat)), np.full(len(start_S), -1)], axis=1)
        return cls.of(table, position_RW.device)


def _buckets(start_S: np.ndarray, stop_S: np.ndarray, device: torch.device) -> list[Bucket]:
    length_S = stop_S - start_S
    order = np.argsort(-length_S, kind="stable")
    order = order[length_S[order] > 0]
    found, at = [], 0
    while at < len(order):
        longest = int(length_S[order[at]])
        count = int(np.searchsorted(-length_S[order], -SLACK * longest, side="right")) - at
        chosen = order[at : at + count]
        at += count
        if count == 1:
            found.append(Bucket(1, longest, int(start_S[chosen[0]])))
            continue
        offset_T = np.arange(longest)
        last_B = length_S[chosen] - 1
        gather_BT = start_S[chosen][:, None] + np.minimum(offset_T, last_B[:, None])
        real = np.flatnonzero((offset_T <= last_B[:, None]).ravel())
        index = [torch.from_numpy(x).to(device) for x in (gather_BT.ravel(), real, gather_BT.ravel()[real])]
        found.append(Bucket(count, longest, -1, *index))
    return found


def _take(x_QL: Tensor, bucket: Bucket) -> Tensor:
    """[Q, L, ...] -> [B, Q, T, ...]."""
    if bucket.gather is None:
        return x_QL[None, :, bucket.start : bucket.start + bucket.length]
    return x_QL.index_select(1, bucket.gather).unflatten(1, (bucket.count, bucket.length)).transpose(0, 1)


def _put(out_QL: Tensor, x_BQT: Tensor, bucket: Bucket) -> None:
    """The inverse, without the padding, into `out_QL`."""
    if bucket.gather is None:
        out_QL[:, bucket.start : bucket.start + bucket.length] = x_BQT[0]
    else:
        assert bucket.real is not None and bucket.positions is not None
        out_QL.index_copy_(1, bucket.positions, x_BQT.transpose(0, 1).flatten(1, 2).index_select(1, bucket.real))


class _Attend(torch.autograd.Function):
    """`out_QLD` from `q`, `k`, `v` [Q, L, D], on the CPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        for bucket in segments.buckets:
            part, part_lse = kernel(*(_take(x, bucket) for x in (q, k, v)), is_causal=True, scale=scale)
            _put(out, part, bucket)
            _put(lse, part_lse, bucket)
        for first, stop, head, neck in segments.prefixes:
            part, part_lse = kernel(q[None, :, first:stop], k[None, :, head:neck], v[None, :, head:neck], scale=scale)
            own_lse = lse[:, first:stop]
            both = torch.logaddexp(own_lse, part_lse[0])
            own = out[:, first:stop]
            own.mul_((own_lse - both).exp_()[..., None]).add_(part[0] * (part_lse[0] - both).exp_()[..., None])
            lse[:, first:stop] = both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        for bucket in ctx.segments.buckets:
            upstream = _take(grad, bucket)
            if bucket.gather is not None and bucket.real is not None and len(bucket.real) < len(bucket.gather):
                real = torch.zeros_like(bucket.gather, dtype=grad.dtype).index_fill_(0, bucket.real, 1.0)
                upstream = upstream * real.view(bucket.count, 1, bucket.length, 1)  # nothing comes back through padding
            given = [_take(x, bucket) for x in (q, k, v, out, lse)]
            for total, part in zip((dq, dk, dv), kernel(upstream, *given, 0.0, True, scale=ctx.scale), strict=True):
                _put(total, part, bucket)
        for first, stop, head, neck in ctx.segments.prefixes:
            own, shared = (None, slice(None), slice(first, stop)), (None, slice(None), slice(head, neck))
            parts = kernel(grad[own], q[own], k[shared], v[shared], out[own], lse[own], 0.0, False, scale=ctx.scale)
            dq[:, first:stop] += parts[0][0]
            dk[:, head:neck] += parts[1][0]
            dv[:, head:neck] += parts[2][0]
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
    repeat = len(q_QLD) // len(k_KLD)
    if repeat > 1:
        k_KLD, v_KLD = (x.repeat_interleave(repeat, dim=0) for x in (k_KLD, v_KLD))
    return _Attend.apply(q_QLD, k_KLD, v_KLD, segments, scale)


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
