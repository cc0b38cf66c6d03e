"""Presets as the table of the papers has them, what resolution fills in, and every refusal with its reason.

Not covered: how recipes and flags are layered over a preset (tests/cluster), and what the flags do (test_objective).
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from learner.config import CriticConfig, ObjectiveConfig
from learner.variants import PRESETS, check_critic, inert_clip, preset, resolve_objective
from rollout.errors import UserError

DEFAULTS = {
    "ratio_to": None, "baseline": "group", "adv_norm": "std", "std_ddof": 0, "std_eps": 0.0, "spread_tol": 1e-6, "reward_norm": "sum",
    "policy_loss": "clip", "clip": 0.2, "clip_high": None, "dual_clip": None, "ratio_level": "token", "tau_pos": 1.0, "tau_neg": 1.05,
    "kl_coef": 0.001, "kl_estimator": "k3", "kl_in": "loss", "entropy_coef": 0.0, "overlong": "score", "overlong_cache": 0,
    "filter_groups": False, "mismatch": "none", "mismatch_cap": 2.0, "mismatch_low": 0.5, "loss_agg": "token-mean",
}  # fmt: skip

# What differs from the defaults once resolved, with max_staleness 0 and one step per batch.
RESOLVED: dict[str, dict[str, Any]] = {
    "grpo": {"clip_high": 0.2},
    "grpo-paper": {"clip_high": 0.2, "loss_agg": "seq-mean-token-mean"},
    "dr_grpo": {"clip_high": 0.2, "adv_norm": "none", "loss_agg": "seq-mean-token-sum-norm"},
    "dapo": {"clip_high": 0.28, "filter_groups": True, "kl_coef": 0.0},
    "gspo": {"ratio_level": "sequence", "clip": 0.0003, "clip_high": 0.0004},
    "gspo-paper": {"ratio_level": "sequence", "clip": 0.0003, "clip_high": 0.0004, "loss_agg": "seq-mean-token-mean"},
    "cispo": {"policy_loss": "cispo", "clip": 1.0, "clip_high": 4.0, "kl_coef": 0.0},
    "sapo": {"policy_loss": "sapo", "loss_agg": "seq-mean-token-mean"},
    "rloo": {
        "baseline": "loo", "adv_norm": "none", "policy_loss": "reinforce", "loss_agg": "seq-mean-token-sum", "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "reinforce++": {"clip_high": 0.2, "baseline": "batch", "adv_norm": "batch", "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce++-baseline": {"clip_high": 0.2, "adv_norm": "batch", "kl_estimator": "k2"},
    "gdpo": {"clip_high": 0.2, "reward_norm": "gdpo"},
    "olmo3": {"clip_high": 0.272, "filter_groups": True, "kl_coef": 0.0, "adv_norm": "none", "mismatch": "tis"},
    "vc-ppo": {"clip_high": 0.2, "baseline": "critic", "adv_norm": "batch"},
    "vapo": {"clip_high": 0.28, "baseline": "critic", "adv_norm": "none", "kl_coef": 0.0},
}  # fmt: skip


# Of the critic's own settings: what differs from their defaults.
CRITIC: dict[str, dict[str, Any]] = {
    "vc-ppo": {"value_pretrain": 50},
    "vapo": {"value_pretrain": 50, "gae_length_alpha": 0.05, "positive_nll": 0.1},
}


def resolve(variant: str | None = None, staleness: int = 0, minibatches: int = 1, epochs: int = 1, **flags: Any) -> ObjectiveConfig:
    """As the command line does: the preset's flags, the user's over them."""
    given = objective_of(variant) | {k: v for k, v in flags.items() if k not in ("group_size", "max_tokens")}
    context = {k: flags[k] for k in ("group_size", "max_tokens") if k in flags}
    return resolve_objective(
        ObjectiveConfig(**given), max_staleness=staleness, minibatches=minibatches, epochs=epochs, variant=variant, **context
    )  # fmt: skip


def objective_of(variant: str | None) -> dict[str, Any]:
    return {k: v for k, v in preset(variant).items() if k in ObjectiveConfig.model_fields} if variant else {}


def critic_of(variant: str | None, **flags: Any) -> CriticConfig:
    own = {k: v for k, v in preset(variant).items() if k in CriticConfig.model_fields} if variant else {}
    return CriticConfig(**own | flags)


def test_defaults() -> None:
    assert ObjectiveConfig().model_dump() == DEFAULTS


@pytest.mark.parametrize("variant", RESOLVED)
def test_preset(variant: str) -> None:
    assert resolve(variant).model_dump() == DEFAULTS | {"ratio_to": "old"} | RESOLVED[variant]


def test_every_preset_is_tested_and_each_of_its_flags_is_one() -> None:
    assert set(PRESETS) == set(RESOLVED)
    known = {*ObjectiveConfig.model_fields, *CriticConfig.model_fields}
    assert [(v, k) for v, flags in PRESETS.items() for k in flags if k not in known] == []


@pytest.mark.parametrize("variant", PRESETS)
def test_a_preset_sets_the_critic_only_where_there_is_one(variant: str) -> None:
    critic = critic_of(variant)
    assert critic.model_dump() == CriticConfig().model_dump() | CRITIC.get(variant, {})
    check_critic(critic, resolve(variant), variant)
    check_critic(CriticConfig(**{k: v for k, v in critic.model_dump().items() if v is not None}), resolve(variant), variant)


def test_a_flag_of_the_critic_needs_one() -> None:
    check_critic(CriticConfig(gae_lambda=0.9, value_clip=0.2), resolve("vc-ppo"), "vc-ppo")
    check_critic(CriticConfig(gae_length_alpha=None), resolve("dapo"), "dapo")
    for name, value in {"gae_lambda": 0.95, "value_pretrain": 50, "positive_nll": 0.1, "value_lr": 1e-5, "value_model": "x"}.items():
        with pytest.raises(UserError, match=f"{name} = {value} belongs to baseline = critic, and baseline = group was chosen"):
            check_critic(CriticConfig(**{name: value}), resolve("dapo"), "dapo")


def test_a_lambda_by_length_leaves_no_place_for_another() -> None:
    with pytest.raises(UserError, match="gae_lambda = 0.9 has no effect with gae_length_alpha = 0.05"):
        check_critic(critic_of("vapo", gae_lambda=0.9), resolve("vapo"), "vapo")
    check_critic(critic_of("vapo", gae_lambda=0.9, gae_length_alpha=None), resolve("vapo"), "vapo")


def test_group_size_1_has_a_meaning_with_a_critic() -> None:
    assert resolve("vapo", group_size=1).baseline == "critic"


@pytest.mark.parametrize(
    ("typo", "nearest"), [("drgrpo", "dr_grpo"), ("DAPO", "dapo"), ("reinforcepp", "reinforce"), ("dpao", "dapo"), ("xyz", "")]
)
def test_unknown_preset_names_the_nearest(typo: str, nearest: str) -> None:
    said = f", the nearest is {nearest}" if nearest else "; choose one of grpo"
    with pytest.raises(UserError, match=f"variant = {typo} does not exist{said}"):
        preset(typo)


@pytest.mark.parametrize("variant", RESOLVED)
@pytest.mark.parametrize("staleness", [0, 2])
def test_resolving_again_and_from_a_whole_dump_changes_nothing(variant: str, staleness: int) -> None:
    """A run that resumes reads back every flag as if it had been given."""
    once = resolve(variant, staleness)
    context = {"max_staleness": staleness, "minibatches": 1, "epochs": 1, "variant": variant}
    assert resolve_objective(once, **context) == once
    assert resolve_objective(ObjectiveConfig(**once.model_dump()), **context) == once
    without_none = {k: v for k, v in once.model_dump().items() if v is not None}
    assert resolve_objective(ObjectiveConfig(**without_none), **context) == once


@pytest.mark.parametrize(
    ("staleness", "minibatches", "epochs", "expected"), [(0, 1, 1, "old"), (1, 1, 1, "behav"), (1, 2, 1, "old"), (3, 1, 2, "old")]
)
def test_default_of_ratio_to(staleness: int, minibatches: int, epochs: int, expected: str) -> None:
    assert resolve("grpo", staleness, minibatches, epochs).ratio_to == expected
    assert resolve("grpo", staleness, minibatches, epochs, ratio_to="old").ratio_to == "old"


def test_reinforce_has_no_ratio_so_the_mismatch_may_correct_it() -> None:
    cfg = resolve("rloo", 1, mismatch="tis")
    assert (cfg.ratio_to, cfg.mismatch) == ("old", "tis")


def test_clip_high_follows_clip() -> None:
    assert resolve(clip=0.1).clip_high == 0.1
    assert resolve(clip=0.1, clip_high=0.3).clip_high == 0.3


def test_dapo_penalises_length_when_a_cache_is_set() -> None:
    assert resolve("dapo").overlong == "score"
    cfg = resolve("dapo", overlong_cache=4, max_tokens=20)
    assert (cfg.overlong, cfg.overlong_cache) == ("penalty", 4)


def test_olmo3_corrects_the_mismatch_where_the_ratio_is_to_old() -> None:
    assert resolve("olmo3", 0).mismatch == "tis"
    assert resolve("olmo3", 1).mismatch == "none"
    assert resolve("olmo3", 1, minibatches=2).mismatch == "tis"
    assert resolve("olmo3", 0, mismatch="none").mismatch == "none"
    cfg = resolve("olmo3", 0, mismatch_cap=3.0)
    assert (cfg.mismatch, cfg.mismatch_cap) == ("tis", 3.0)


def test_later_flags_override_a_preset() -> None:
    cfg = resolve("dr_grpo", clip_high=0.28, kl_coef=0.0)
    assert (cfg.adv_norm, cfg.clip_high, cfg.kl_coef) == ("none", 0.28, 0.0)


def test_a_preset_whose_kl_is_switched_off_is_no_contradiction() -> None:
    """The estimator came with the preset; the user only said that there is no KL."""
    assert resolve("rloo", kl_coef=0.0).kl_coef == 0.0


def test_kl_in_the_reward_takes_k1() -> None:
    assert resolve(kl_in="reward").kl_estimator == "k1"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"baseline": "critic"}, "adv_norm = std divides by the std of a group's rewards"),
    ({"baseline": "critic", "adv_norm": "batch", "reward_norm": "gdpo"}, "reward_norm = gdpo normalises"),
    ({"baseline": "critic", "adv_norm": "batch", "group_size": 1, "filter_groups": True}, "filter_groups = true drops all others"),
    ({"baseline": "batch"}, "adv_norm = std divides by the group's std"),
    ({"reward_norm": "gdpo", "adv_norm": "none"}, "reward_norm = gdpo normalises"),
    ({"reward_norm": "gdpo", "adv_norm": "batch", "baseline": "batch"}, "reward_norm = gdpo normalises"),
    ({"reward_norm": "gdpo", "kl_in": "reward"}, "kl_in = reward takes kl_coef off one reward"),
    ({"adv_norm": "none", "std_ddof": 1}, "std_ddof = 1 has no effect with adv_norm = none"),
    ({"adv_norm": "none", "std_eps": 1e-4}, "std_eps = 0.0001 has no effect"),
    ({"group_size": 1}, "group_size = 1 gives each answer advantage 0"),
    ({"group_size": 1, "baseline": "batch", "adv_norm": "none", "filter_groups": True}, "filter_groups = true drops all others"),
    ({"policy_loss": "reinforce", "clip": 0.1}, "clip = 0.1 has no effect with policy_loss = reinforce"),
    ({"policy_loss": "reinforce", "clip": 0.2}, "clip = 0.2 has no effect with policy_loss = reinforce"),
    ({"policy_loss": "sapo", "clip_high": 0.3}, "clip_high = 0.3 has no effect with policy_loss = sapo"),
    ({"policy_loss": "reinforce", "ratio_level": "sequence"}, "ratio_level = sequence has no effect"),
    ({"policy_loss": "reinforce", "ratio_to": "behav"}, "ratio_to = behav has no effect"),
    ({"policy_loss": "cispo", "dual_clip": 3.0}, "dual_clip = 3.0 bounds the term of policy_loss = clip"),
    ({"policy_loss": "sapo", "dual_clip": 3.0}, "dual_clip = 3.0 bounds"),
    ({"policy_loss": "reinforce", "dual_clip": 3.0}, "dual_clip = 3.0 bounds"),
    ({"tau_pos": 2.0}, "tau_pos = 2.0 is a temperature of policy_loss = sapo"),
    ({"policy_loss": "cispo", "tau_neg": 2.0}, "tau_neg = 2.0 is a temperature"),
    ({"ratio_to": "behav", "mismatch": "tis"}, "mismatch = tis with ratio_to = behav would correct twice"),
    ({"staleness": 1, "mismatch": "icepop"}, "mismatch = icepop with ratio_to = behav would correct twice"),
    ({"mismatch_cap": 3.0}, "mismatch_cap = 3.0 has no effect with mismatch = none"),
    ({"mismatch_low": 0.1}, "mismatch_low = 0.1 has no effect with mismatch = none"),
    ({"mismatch": "tis", "mismatch_low": 0.1}, "mismatch_low = 0.1 has no effect with mismatch = tis"),
    ({"mismatch": "icepop", "mismatch_low": 3.0}, "mismatch_low = 3.0 is above mismatch_cap = 2.0"),
    ({"kl_estimator": "k1"}, "kl_estimator = k1 in the loss has an expected gradient of zero"),
    ({"kl_in": "reward", "kl_estimator": "k3"}, "kl_estimator = k3 is for the loss"),
    ({"kl_coef": 0.0, "kl_estimator": "k2"}, "kl_estimator = k2 has no effect with kl_coef = 0"),
    ({"kl_coef": 0.0, "kl_in": "reward"}, "kl_in = reward has no effect with kl_coef = 0"),
    ({"overlong": "penalty"}, "overlong = penalty needs a warning zone"),
    ({"overlong_cache": 10}, "overlong_cache = 10 has no effect with overlong = score"),
    ({"overlong": "mask", "overlong_cache": 10}, "overlong_cache = 10 has no effect with overlong = mask"),
    ({"overlong": "penalty", "overlong_cache": 10, "max_tokens": 5}, "overlong_cache = 10 is wider than max_tokens = 5"),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_refused_in_one_sentence(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        resolve(**flags)
    assert str(error.value).startswith(sentence) or sentence in str(error.value)
    assert str(error.value).count(". ") == 0 and "\n" not in str(error.value)


def test_values_out_of_range_are_refused_by_the_config() -> None:
    for flags in ({"dual_clip": 1.0}, {"clip": -0.1}, {"clip": 1.5}, {"std_ddof": 2}, {"tau_pos": 0.0}, {"kl_coef": -1.0}, {"clipp": 0.2}):
        with pytest.raises(ValidationError):
            ObjectiveConfig(**flags)
    for name, value in {"gae_lambda": 1.1, "positive_nll": -1, "value_clip": 0, "value_lr": 0, "value_pretrain": -1}.items():
        with pytest.raises(ValidationError):
            CriticConfig(**{name: value})
    for alpha in (0, -0.1, float("nan")):
        with pytest.raises(ValidationError):
            CriticConfig(gae_length_alpha=alpha)


def test_free_combinations() -> None:
    """Dr. GRPO with clip-higher, GSPO with a Dr. GRPO norm, CISPO at sequence level, and every aggregation with every loss."""
    assert resolve("dr_grpo", clip_high=0.28)
    assert resolve("gspo", adv_norm="none", loss_agg="seq-mean-token-sum-norm", dual_clip=3.0)
    assert resolve("cispo", ratio_level="sequence")
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean-token-sum", "token-sum", "prompt-mean")
    for policy_loss, mode, baseline in itertools.product(("clip", "cispo", "sapo", "reinforce"), modes, ("group", "loo", "batch")):
        assert resolve(policy_loss=policy_loss, loss_agg=mode, baseline=baseline, adv_norm="batch").loss_agg == mode


@pytest.mark.parametrize(
    ("flags", "inert"),
    [
        ({}, True),
        ({"minibatches": 2}, False),
        ({"epochs": 2}, False),
        ({"staleness": 1}, False),
        ({"staleness": 1, "ratio_to": "old"}, True),
        ({"policy_loss": "cispo"}, True),
        ({"policy_loss": "reinforce"}, False),
    ],
)
def test_inert_clip(flags: dict[str, Any], inert: bool) -> None:
    assert inert_clip(resolve(**flags), flags.get("minibatches", 1), flags.get("epochs", 1)) is inert


def test_the_documented_tests_and_variants_exist() -> None:
    """docs/objectives.md has a row per paper; what its rows name is there."""
    here = Path(__file__).parent
    text = (here.parents[1] / "docs" / "objectives.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", text)
    assert len(named) >= 17
    for file, test in named:
        assert f"def {test}(" in (here / file).read_text() if test else (here / file).is_file(), (file, test)
    assert all(f"`{variant}`" in text for variant in PRESETS)
