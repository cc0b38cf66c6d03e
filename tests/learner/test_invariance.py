"""The loss and its gradient are the same however an optimiser step is cut: over micro-batches, ranks, order and layout.

Property-tested over random lengths, masks, rewards and flags, and once with real gloo processes. Not covered here: the
learner's own packing and FSDP's reduction of gradients (test_step), and mini-batches, which are optimiser steps of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.advantage import group_advantages
from learner.denominators import MODES, answer_weights
from learner.diagnostics import ObjectiveSums
from learner.objective import grpo_loss

ROOT = Path(__file__).parents[2]
MAX_LEN = 9


@dataclass(frozen=True)
class Step:
    """An optimiser step: answers with their tokens' log-probs by name, and the flags."""

    lengths: list[int]
    group: list[int]
    rewards: list[float]
    masked: list[bool]
    flags: dict[str, Any]
    advantage: dict[str, Any]
    seed: int
    dtype: torch.dtype
    holes: bool = False  # some tokens inside an answer were not written by the policy
    tokens: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.seed)
        for name, spread in (("new", 0.4), ("old", 0.4), ("behav", 0.3), ("ref", 0.3), ("entropy", 0.5)):
            draws = [torch.randn(n, generator=rng, dtype=torch.float64) * spread for n in self.lengths]
            self.tokens[name] = [(x.abs() if name == "entropy" else x - 1.5).to(self.dtype) for x in draws]
        self.tokens["mask"] = [torch.rand(n, generator=rng) < (0.7 if self.holes else 2.0) for n in self.lengths]

    def written(self) -> np.ndarray:
        """Unmasked tokens per answer."""
        return np.array([0 if m else int(x.sum()) for m, x in zip(self.masked, self.tokens["mask"], strict=True)])


@dataclass(frozen=True)
class Result:
    """Loss, its scale Σ|terms|, and the gradient by answer, of new and of entropy."""

    loss: float
    scale: float
    grads: list[torch.Tensor]
    sums: ObjectiveSums


def evaluate(step: Step, micro: list[list[int]], packed: bool, order: list[int] | None = None) -> Result:
    """The step cut into micro-batches of answers; statistics of the step are computed with its answers in `order`."""
    order = list(range(len(step.lengths))) if order is None else order
    place = {a: i for i, a in enumerate(order)}
    take = lambda values: [values[a] for a in order]  # noqa: E731
    advantages = group_advantages(
        np.array(take(step.rewards)), np.array(take(step.group)), masked=np.array(take(step.masked)), **step.advantage
    )
    weights = answer_weights(step.written()[order], take(step.group), mode=step.flags["loss_agg"], max_len=MAX_LEN)
    leaves = [torch.cat([step.tokens["new"][a], step.tokens["entropy"][a]]).requires_grad_() for a in range(len(step.lengths))]
    total, loss = ObjectiveSums.zeros(), 0.0
    for number, answers in enumerate(micro):
        rows = [place[a] for a in answers]
        columns = lay_out(step, answers, leaves, packed, pad=number % 3)
        if not answers:
            columns["new"].requires_grad_()
        out = grpo_loss(
            columns["new"], columns["old"], torch.tensor(advantages[rows]), columns["mask"].bool(), logp_behav=columns["behav"],
            logp_ref=columns["ref"], entropy=columns["entropy"], answer=columns.get("answer"), weights=weights[rows], max_len=MAX_LEN,
            **step.flags,
        )  # fmt: skip
        out.loss.backward()
        loss, total = loss + out.loss.item(), total + out.sums
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return Result(loss, total.abs_terms.item(), grads, total)


def lay_out(step: Step, answers: list[int], leaves: list[torch.Tensor], packed: bool, pad: int) -> dict[str, torch.Tensor]:
    """Tokens of the answers as padded rows or one packed row; padding holds NaN."""
    columns: dict[str, torch.Tensor] = {}
    width = max([step.lengths[a] for a in answers], default=0) + pad
    for name in ("new", "old", "behav", "ref", "entropy", "mask"):
        values = []
        for a in answers:
            n = step.lengths[a]
            x = {"new": leaves[a][:n], "entropy": leaves[a][n:]}.get(name, step.tokens[name][a])
            x = x & (not step.masked[a]) if name == "mask" else x
            fill = torch.zeros(pad, dtype=torch.bool) if name == "mask" else torch.full((pad,), torch.nan, dtype=step.dtype)
            if not packed:
                fill = fill.new_full((width - n,), 0 if name == "mask" else torch.nan)
            values.append(torch.cat([x, fill]))
        kind = torch.bool if name == "mask" else step.dtype
        if packed:
            columns[name] = torch.cat(values) if values else torch.zeros(0, dtype=kind)
        else:
            columns[name] = torch.stack(values) if values else torch.zeros(0, width, dtype=kind)
    if packed:
        sizes = torch.tensor([step.lengths[a] + pad for a in answers], dtype=torch.long)
        columns["answer"] = torch.repeat_interleave(torch.arange(len(answers)), sizes)
    return columns


@st.composite
def steps(draw: st.DrawFn, dtype: torch.dtype, loss_agg: str | None = None) -> Step:
    """A random step with random flags that have a meaning together."""
    count = draw(st.integers(1, 8))
    each = lambda s: draw(st.lists(s, min_size=count, max_size=count))  # noqa: E731
    policy_loss = draw(st.sampled_from(["clip", "clip", "cispo", "sapo", "reinforce"]))
    ratio_to = draw(st.sampled_from(["old", "behav"])) if policy_loss != "reinforce" else "old"
    mismatch = draw(st.sampled_from(["none", "tis", "mis", "icepop", "seq-tis", "seq-mis", "geo-mask"])) if ratio_to == "old" else "none"
    baseline, scale = draw(st.sampled_from([("group", "std"), ("group", "none"), ("loo", "none"), ("batch", "batch"), ("group", "batch")]))
    return Step(
        lengths=each(st.integers(0, 7)),
        group=each(st.integers(0, 2)),
        rewards=each(st.sampled_from([0.0, 1.0, 0.1, 0.7, -3.0])),
        masked=each(st.sampled_from([False, False, False, True])),
        flags={
            "policy_loss": policy_loss,
            "ratio_to": ratio_to,
            "ratio_level": draw(st.sampled_from(["token", "sequence"])) if policy_loss != "reinforce" else "token",
            "clip_high": draw(st.sampled_from([None, 0.28])),
            "dual_clip": draw(st.sampled_from([None, 1.5])) if policy_loss == "clip" else None,
            "kl_coef": draw(st.sampled_from([0.0, 0.3])),
            "kl_estimator": draw(st.sampled_from(["k2", "k3"])),
            "kl_in": draw(st.sampled_from(["loss", "loss", "reward"])),
            "entropy_coef": draw(st.sampled_from([0.0, 0.2])),
            "mismatch": mismatch,
            "loss_agg": loss_agg or draw(st.sampled_from(MODES)),
        },
        advantage={"baseline": baseline, "scale": scale},
        seed=draw(st.integers(0, 10_000)),
        dtype=dtype,
        holes=draw(st.booleans()),
    )


@st.composite
def cuts(draw: st.DrawFn, count: int) -> tuple[list[list[int]], list[int]]:
    """Answers in any order cut into micro-batches, empty ones anywhere; and the order for the statistics of the step."""
    order = draw(st.permutations(range(count)))
    ends = sorted(draw(st.lists(st.integers(0, count), min_size=0, max_size=4)))
    micro = [list(order[a:b]) for a, b in zip([0, *ends], [*ends, count], strict=True)]
    return micro, list(draw(st.permutations(range(count))))


def agree(whole: Result, parts: Result, tolerance: float) -> None:
    """The loss relative to Σ|terms|, the gradient relative to its norm, and the statistics that are counts or extremes."""
    assert abs(whole.loss - parts.loss) <= tolerance * max(whole.scale, 1e-300)
    one, other = torch.cat(whole.grads).double(), torch.cat(parts.grads).double()
    assert (one - other).norm() <= tolerance * one.norm() + 1e-300
    for a, b in zip(whole.sums.to_vectors(), parts.sums.to_vectors(), strict=True):
        torch.testing.assert_close(a, b, rtol=max(tolerance, 1e-9), atol=tolerance * max(whole.scale, 1.0))


def check(data: st.DataObject, step: Step, tolerance: float) -> None:
    count = len(step.lengths)
    whole = evaluate(step, [list(range(count))], packed=False)
    micro, order = data.draw(cuts(count))
    agree(whole, evaluate(step, micro, packed=data.draw(st.booleans()), order=order), tolerance)


QUIET = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@QUIET
@given(st.data())
def test_any_split_float64(data: st.DataObject) -> None:
    check(data, data.draw(steps(torch.float64)), 1e-10)


@QUIET
@given(st.data())
def test_any_split_float32(data: st.DataObject) -> None:
    check(data, data.draw(steps(torch.float32)), 1e-5)


@settings(QUIET, max_examples=20)
@given(st.data())
def test_any_split_for_every_loss_agg_with_all_terms(data: st.DataObject) -> None:
    """Every aggregation in each example, with KL and entropy in the loss."""
    for loss_agg in MODES:
        step = data.draw(steps(torch.float64, loss_agg))
        step.flags.update(kl_coef=0.3, kl_in="loss", entropy_coef=0.2)
        check(data, step, 1e-10)


def test_a_broken_denominator_would_be_seen() -> None:
    """The check can fail: with the weights of each micro-batch alone the same comparison does not hold."""
    step = example_step()
    whole = evaluate(step, [list(range(len(step.lengths)))], packed=False)
    parts = [evaluate(part_of(step, answers), [list(range(len(answers)))], packed=False) for answers in ([0, 1], [2, 3, 4, 5])]
    assert abs(whole.loss - sum(p.loss for p in parts)) > 1e-3 * whole.scale


def example_step(loss_agg: str = "token-mean", dtype: torch.dtype = torch.float64) -> Step:
    """A step with a fully masked answer, an empty one, and every term."""
    return Step(
        lengths=[3, 7, 0, 5, 1, 6],
        group=[0, 0, 0, 1, 1, 1],
        rewards=[1.0, 0.0, 0.0, 1.0, 0.0, 0.3],
        masked=[False, False, False, True, False, False],
        flags={"loss_agg": loss_agg, "kl_coef": 0.3, "entropy_coef": 0.2, "mismatch": "tis", "clip_high": 0.28},
        advantage={"baseline": "group", "scale": "std"},
        seed=7,
        dtype=dtype,
    )


def part_of(step: Step, answers: list[int]) -> Step:
    """Some answers as if they were the whole step."""
    pick = lambda values: [values[a] for a in answers]  # noqa: E731
    part = Step(pick(step.lengths), pick(step.group), pick(step.rewards), pick(step.masked), step.flags, step.advantage, 0, step.dtype)
    part.tokens.update({name: pick(values) for name, values in step.tokens.items()})
    return part


def test_real_ranks(tmp_path: Path) -> None:
    """Three gloo processes, and two of them as a group of their own: gradients and statistics are all-reduced sums.

    The answers of one rank are all masked in one of the cuts, and a rank without any answer takes part.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    worker = Path(__file__).with_name("invariance_worker.py")
    command = [sys.executable, str(worker)]
    ranks = [
        subprocess.Popen([*command, str(r), "3", str(tmp_path / "store")], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for r in range(3)
    ]
    outputs = [p.communicate(timeout=120)[0] for p in ranks]
    assert [p.returncode for p in ranks] == [0, 0, 0], outputs
    assert outputs[0].split() == [f"{mode}:{world}" for world in (3, 2) for mode in MODES]
