"""Numeric cross-check with the GRPO trainer of TRL 1.16.0: its own `_compute_loss`, fed with log-probabilities.

Losses are compared relative to Σ|terms|, gradients relative to their norm, in float32. Not covered: answers masked as a whole
(TRL counts them) and unequal micro-batches (TRL averages over micro-batches; test_invariance has ours).
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.advantage import group_advantages
from learner.denominators import answer_weights
from learner.objective import grpo_loss

pytest.importorskip("trl", reason="trl is in the dev extra")

GROUPS, GROUP, T, MICRO, MAX_LEN = 3, 4, 11, 2, 16
TOLERANCE = 1e-6

# loss_type and further settings of TRL -> our flags (epsilon 0.2 and 0.28 on both sides unless given)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"loss_agg": "seq-mean-token-mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss_agg": "seq-mean-token-sum-norm"}),
    "dapo": ({"loss_type": "dapo"}, {"loss_agg": "token-mean"}),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"policy_loss": "cispo", "clip": 1.0, "clip_high": 0.5, "loss_agg": "token-mean"},
    ),
    "sapo": ({"loss_type": "sapo"}, {"policy_loss": "sapo", "loss_agg": "seq-mean-token-mean"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.003, "epsilon_high": 0.004},
        {"ratio_level": "sequence", "clip": 0.003, "clip_high": 0.004, "loss_agg": "seq-mean-token-mean"},
    ),
}


@pytest.fixture(scope="module")
def trainer_class() -> Any:
    """TRL's GRPOTrainer; its import is told that there is no vLLM, which it would load in full."""
    import trl
    from trl import import_utils

    assert trl.__version__ == "1.16.0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *args, **kwargs: False)
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


def data(seed: int) -> dict[str, torch.Tensor]:
    """Answers of 1 to T tokens, ratios well away from 1, rewards with spread in every group."""
    rng = torch.Generator().manual_seed(seed)
    count = GROUPS * GROUP
    new = -2 + torch.randn(count, T, generator=rng)
    lengths = torch.randint(1, T + 1, (count,), generator=rng)
    rewards = torch.randint(0, 3, (GROUPS, GROUP), generator=rng).float()
    rewards[:, 0], rewards[:, 1] = 0.0, 1.0
    return {
        "new": new,
        "old": new + 0.3 * torch.randn(count, T, generator=rng),
        "ref": new + 0.3 * torch.randn(count, T, generator=rng),
        "mask": (torch.arange(T)[None] < lengths[:, None]).long(),
        "rewards": rewards,
    }


def theirs(
    trainer_class: Any, settings: dict[str, Any], d: dict[str, torch.Tensor], adv: torch.Tensor, beta: float
) -> tuple[float, torch.Tensor]:
    """(loss of the generation batch, its gradient) by TRL, over equal micro-batches."""
    count, new = len(d["new"]), d["new"].clone().requires_grad_()
    accumulate = count // MICRO
    trainer = object.__new__(trainer_class)
    args = SimpleNamespace(
        delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=accumulate
    )  # fmt: skip
    same = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True)
    known: dict[str, Any] = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token",
        "beta": beta, "epsilon_low": 0.2, "epsilon_high": 0.28, "use_vllm": False, "_entropy_bonus_enabled": False, "args": args,
        "max_completion_length": MAX_LEN, "current_gradient_accumulation_steps": accumulate, "accelerator": same,
        "model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)}, "tools": None,
    }  # fmt: skip
    vars(trainer).update(known | settings)
    total = 0.0
    for start in range(0, count, MICRO):
        rows = slice(start, start + MICRO)
        logps = new[rows]
        trainer._get_per_token_logps_and_entropies = lambda *a, logps=logps, **k: (logps, torch.zeros_like(logps), None)
        inputs = {
            "prompt_ids": torch.zeros(MICRO, 1, dtype=torch.long), "prompt_mask": torch.ones(MICRO, 1, dtype=torch.long),
            "completion_ids": torch.zeros(MICRO, T, dtype=torch.long), "completion_mask": d["mask"][rows], "advantages": adv[rows],
            "old_per_token_logps": d["old"][rows], "ref_per_token_logps": d["ref"][rows], "num_items_in_batch": d["mask"].sum(),
        }  # fmt: skip
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
    assert new.grad is not None
    return total, new.grad


def ours(flags: dict[str, Any], d: dict[str, torch.Tensor], adv: torch.Tensor, beta: float) -> tuple[float, torch.Tensor, float]:
    """(loss, gradient, Σ|terms|) here, over the same micro-batches."""
    new = d["new"].clone().requires_grad_()
    weights = answer_weights(d["mask"].sum(1), mode=flags["loss_agg"], max_len=MAX_LEN)
    loss, scale = 0.0, 0.0
    for start in range(0, len(new), MICRO):
        rows = slice(start, start + MICRO)
        out = grpo_loss(
            new[rows], d["old"][rows], adv[rows], d["mask"][rows], logp_ref=d["ref"][rows], weights=weights[rows], kl_coef=beta,
            **{"clip": 0.2, "clip_high": 0.28} | flags,
        )  # fmt: skip
        out.loss.backward()
        loss, scale = loss + out.loss.item(), scale + out.sums.abs_terms.item()
    assert new.grad is not None
    return loss, new.grad, scale


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(trainer_class: Any, case: str, beta: float) -> None:
    for seed in range(3):
        d = data(seed)
        scale = "none" if case == "dr_grpo" else "std"
        adv = group_advantages(d["rewards"], scale=scale, std_ddof=1, std_eps=1e-4 if scale == "std" else 0.0).float().reshape(-1)
        centred = d["rewards"] - d["rewards"].mean(1, keepdim=True)
        expected = centred if scale == "none" else centred / (d["rewards"].std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(adv, expected.reshape(-1), rtol=1e-5, atol=1e-6)

        settings, flags = CASES[case]
        their_loss, their_grad = theirs(trainer_class, settings, d, adv, beta)
        our_loss, our_grad, terms = ours(flags, d, adv, beta)
        assert abs(their_loss - our_loss) <= TOLERANCE * terms
        assert (their_grad - our_grad).norm() <= TOLERANCE * their_grad.norm()
        assert their_grad.norm() > 0
