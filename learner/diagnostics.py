"""What an optimiser step measured of itself: sums that add up over micro-batches and ranks, and the means they become.

A micro-batch gives `ObjectiveSums`; `a + b` joins two of them; ranks join theirs by all-reducing the three vectors of
`to_vectors` (sum, max, min); `finalise` turns the total into the named `ObjectiveStats`. Nothing here averages averages.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from learner.layout import Tokens, answer_lengths
from learner.ratios import LOG_RATIO_BOUND, bounded_exp, kl_terms


@dataclass(frozen=True)
class ObjectiveSums:
    """Statistics of unmasked tokens, each a float64 scalar tensor; every field is added over micro-batches, but for
    those whose names end in `_max` and `_min`.

    `units` counts what the clip acts on (tokens, or answers at sequence level); `*_tokens` count the tokens that a measure
    was taken on. Loss parts are weighted sums like the loss itself; the rest are plain sums over tokens.
    """

    loss: torch.Tensor
    policy: torch.Tensor  # parts of the loss, before their coefficients
    kl: torch.Tensor
    entropy_part: torch.Tensor
    abs_terms: torch.Tensor  # Σ weight · |term|: the scale that errors of the loss are relative to
    tokens: torch.Tensor
    answers: torch.Tensor  # answers with an unmasked token
    units: torch.Tensor
    clip_low: torch.Tensor  # units whose clip binds
    clip_high: torch.Tensor
    clip_dual: torch.Tensor
    clamped: torch.Tensor  # log-ratios beyond ±20, of tokens, that the loss took an exp of
    ratio: torch.Tensor
    kl_old: torch.Tensor  # k3 of new against the ratio's denominator
    kl_ref: torch.Tensor
    kl_behav: torch.Tensor
    entropy: torch.Tensor
    ref_tokens: torch.Tensor
    behav_tokens: torch.Tensor
    entropy_tokens: torch.Tensor
    mismatch_abs: torch.Tensor  # |old − behav|
    mismatch_kl: torch.Tensor  # k3 of old against behav
    weight: torch.Tensor  # mismatch weight before and the part that the correction took away
    weight_removed: torch.Tensor
    mismatch_masked: torch.Tensor  # tokens whose weight the correction set to 0
    ratio_max: torch.Tensor
    mismatch_max: torch.Tensor
    ratio_min: torch.Tensor
    mismatch_min: torch.Tensor

    def __add__(self, other: ObjectiveSums) -> ObjectiveSums:
        """The statistics of both."""
        return self.from_vectors(*(op(a, b) for op, a, b in zip(_JOIN.values(), self.to_vectors(), other.to_vectors(), strict=True)))

    def to_vectors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(sums, maxima, minima), float64 vectors to all-reduce with SUM, MAX and MIN."""
        sums, high, low = (torch.stack([getattr(self, name) for name in _names(kind)]) for kind in _JOIN)
        return sums, high, low

    @classmethod
    def from_vectors(cls, sums: torch.Tensor, maxima: torch.Tensor, minima: torch.Tensor) -> ObjectiveSums:
        """The inverse of `to_vectors`."""
        values: dict[str, torch.Tensor] = {}
        for kind, vector in zip(_JOIN, (sums, maxima, minima), strict=True):
            values.update(zip(_names(kind), vector.unbind(), strict=True))
        return cls(**values)

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> ObjectiveSums:
        """The statistics of nothing, which a rank without a micro-batch contributes."""
        start = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}
        return cls(**{f.name: torch.tensor(start[_kind(f.name)], dtype=torch.float64, device=device) for f in fields(cls)})


_JOIN = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def _names(kind: str) -> list[str]:
    return [f.name for f in fields(ObjectiveSums) if _kind(f.name) == kind]


def _kind(name: str) -> str:
    return name[-3:] if name.endswith(("_max", "_min")) else "sum"


def objective_sums(
    tok: Tokens,
    log_ratio: torch.Tensor,
    binding: dict[str, torch.Tensor],
    per_answer: bool,
    weights: tuple[torch.Tensor, torch.Tensor],
    exponents: list[torch.Tensor],
    parts: dict[str, torch.Tensor],
) -> ObjectiveSums:
    """The statistics of a micro-batch. Tensors are [N], detached, and count where `tok.mask`.

    `binding`: tokens whose clip binds (counted per answer if `per_answer`); `weights`: mismatch weight before and after;
    `exponents`: the log-ratios that the loss took an exp of; `parts`: the scalars of the loss.
    """
    mask, zero = tok.mask, torch.zeros((), dtype=torch.float64, device=tok.mask.device)

    def total(x: torch.Tensor | None) -> torch.Tensor:
        return zero if x is None else x.masked_fill(~mask, 0).double().sum()

    def units(flag: torch.Tensor) -> torch.Tensor:
        return (answer_lengths(mask & flag, tok.answer, len(tok.lengths_B)) > 0).double().sum() if per_answer else total(flag)

    def largest(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.double().masked_fill(~mask, -torch.inf), zero[None] - torch.inf]).max()

    new, behav, ref, ratio, tokens = tok.new.detach(), tok.behav, tok.ref, bounded_exp(log_ratio), total(mask)
    log_w = None if behav is None else tok.old - behav
    return ObjectiveSums(
        **{name: x.detach().double() for name, x in parts.items()},
        **{name: units(flag) for name, flag in binding.items()},
        tokens=tokens,
        answers=(tok.lengths_B > 0).double().sum(),
        units=units(mask),
        clamped=sum((total(x.abs() > LOG_RATIO_BOUND) for x in exponents), zero),
        ratio=total(ratio),
        kl_old=total(kl_terms(new, tok.old)),
        kl_ref=total(None if ref is None else kl_terms(new, ref)),
        kl_behav=total(None if behav is None else kl_terms(new, behav)),
        entropy=total(None if tok.entropy is None else tok.entropy.detach()),
        ref_tokens=zero if ref is None else tokens,
        behav_tokens=zero if behav is None else tokens,
        entropy_tokens=zero if tok.entropy is None else tokens,
        mismatch_abs=total(None if log_w is None else log_w.abs()),
        mismatch_kl=total(None if behav is None else kl_terms(tok.old, behav)),
        weight=total(weights[0]),
        weight_removed=total(weights[0] - weights[1]),
        mismatch_masked=total(weights[1] == 0),
        ratio_max=largest(ratio),
        ratio_min=-largest(-ratio),
        mismatch_max=zero - torch.inf if log_w is None else largest(bounded_exp(log_w)),
        mismatch_min=zero + torch.inf if log_w is None else -largest(-bounded_exp(log_w)),
    )


@dataclass(frozen=True)
class ObjectiveStats:
    """What one optimiser step (or, added up, one batch) reports. Means are over unmasked tokens; None: not measured.

    KL values are the k3 estimate in nats per token. `clipfrac` is the share of unmasked tokens (answers at sequence level)
    whose clip binds; `mismatch_removed` the share of mismatch weight that the correction took away, and `mismatch_masked` the tokens
    whose weight it set to 0.
    """

    loss: float
    policy_loss: float
    kl_loss: float
    entropy_loss: float
    tokens: int
    answers: int
    clipfrac: float
    clipfrac_low: float
    clipfrac_high: float
    clipfrac_dual: float
    clamped: int
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    kl_old: float
    kl_ref: float | None
    kl_behav: float | None
    entropy: float | None
    mismatch_abs: float | None
    mismatch_kl: float | None
    mismatch_min: float | None
    mismatch_max: float | None
    mismatch_removed: float | None
    mismatch_masked: int


def finalise(total: ObjectiveSums) -> ObjectiveStats:
    """The named means of a step's summed statistics; with nothing unmasked, ratios read 1 and shares 0.

    Several optimiser steps of one batch may be added up first: loss and its parts are then their sums over the steps.
    """
    s = {f.name: getattr(total, f.name).item() for f in fields(total)}
    some = s["tokens"] > 0
    measured = s["behav_tokens"] > 0

    def mean(name: str, count: str = "tokens") -> float:
        return s[name] / max(s[count], 1)

    return ObjectiveStats(
        loss=s["loss"],
        policy_loss=s["policy"],
        kl_loss=s["kl"],
        entropy_loss=s["entropy_part"],
        tokens=int(s["tokens"]),
        answers=int(s["answers"]),
        clipfrac=mean("clip_low", "units") + mean("clip_high", "units") + mean("clip_dual", "units"),
        clipfrac_low=mean("clip_low", "units"),
        clipfrac_high=mean("clip_high", "units"),
        clipfrac_dual=mean("clip_dual", "units"),
        clamped=int(s["clamped"]),
        ratio_mean=mean("ratio") if some else 1.0,
        ratio_min=s["ratio_min"] if some else 1.0,
        ratio_max=s["ratio_max"] if some else 1.0,
        kl_old=mean("kl_old"),
        kl_ref=mean("kl_ref", "ref_tokens") if s["ref_tokens"] > 0 else None,
        kl_behav=mean("kl_behav", "behav_tokens") if measured else None,
        entropy=mean("entropy", "entropy_tokens") if s["entropy_tokens"] > 0 else None,
        mismatch_abs=mean("mismatch_abs", "behav_tokens") if measured else None,
        mismatch_kl=mean("mismatch_kl", "behav_tokens") if measured else None,
        mismatch_min=s["mismatch_min"] if measured else None,
        mismatch_max=s["mismatch_max"] if measured else None,
        mismatch_masked=int(s["mismatch_masked"]),
        mismatch_removed=s["weight_removed"] / s["weight"] if measured and s["weight"] > 0 else (0.0 if measured else None),
    )
