"""Presets of objective flags, and the resolution of an objective: defaults that depend on others, combinations that have no meaning.

No torch here: the command line resolves an objective before anything else is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollout.errors import UserError, nearest_name

if TYPE_CHECKING:
    from pydantic import BaseModel

    from learner.config import CriticConfig, ObjectiveConfig

_GSPO = {"ratio_level": "sequence", "clip": 0.0003, "clip_high": 0.0004}
_CRITIC = {"baseline": "critic", "adv_norm": "batch", "gae_lambda_value": 1.0, "value_pretrain": 50}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"adv_norm": "std", "loss_agg": "token-mean"},
    "grpo-paper": {"loss_agg": "seq-mean-token-mean"},
    "dr_grpo": {"adv_norm": "none", "loss_agg": "seq-mean-token-sum-norm"},
    # and overlong = penalty where overlong_cache is set, see resolve_objective
    "dapo": {"clip_high": 0.28, "filter_groups": True, "kl_coef": 0.0, "loss_agg": "token-mean"},
    "gspo": {**_GSPO},
    "gspo-paper": {**_GSPO, "loss_agg": "seq-mean-token-mean"},
    "cispo": {"policy_loss": "cispo", "clip": 1.0, "clip_high": 4.0, "kl_coef": 0.0, "loss_agg": "token-mean"},
    "sapo": {"policy_loss": "sapo", "loss_agg": "seq-mean-token-mean"},
    "rloo": {
        "baseline": "loo",
        "adv_norm": "none",
        "policy_loss": "reinforce",
        "loss_agg": "seq-mean-token-sum",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "reinforce++": {"baseline": "batch", "adv_norm": "batch", "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce++-baseline": {"baseline": "group", "adv_norm": "batch", "kl_estimator": "k2"},
    "gdpo": {"reward_norm": "gdpo"},
    # and mismatch = tis with mismatch_cap = 2 where the ratio is to old, see resolve_objective
    "olmo3": {
        "filter_groups": True,
        "loss_agg": "token-mean",
        "clip": 0.2,
        "clip_high": 0.272,
        "kl_coef": 0.0,
        "adv_norm": "none",
    },
    "vc-ppo": {**_CRITIC, "gae_lambda": 0.95},
    # gae_length_alpha stands in the place of gae_lambda
    # Advantages as they are: divided by their spread, some 0.1 where lambda is near 0, they leave positive_nll a tenth of its weight.
    "vapo": {
        **_CRITIC,
        "adv_norm": "none",
        "gae_length_alpha": 0.05,
        "positive_nll": 0.1,
        "clip_high": 0.28,
        "loss_agg": "token-mean",
        "kl_coef": 0.0,
    },
}
"""Variant -> the flags of objective and critic that it sets, by their bare names; any of them a later flag overrides."""

_LOW_MISMATCH = ("icepop", "geo-mask")


def preset(name: str) -> dict[str, Any]:
    """The flags that `--variant NAME` sets. Raises UserError for an unknown name, naming the nearest if there is one."""
    if name not in PRESETS:
        close = nearest_name(name, PRESETS)
        nearest = f", the nearest is {close}" if close else ""
        raise UserError(f"variant = {name} does not exist{nearest}; choose one of {', '.join(PRESETS)}.")
    return dict(PRESETS[name])


def resolve_objective(
    cfg: ObjectiveConfig,
    *,
    max_staleness: int,
    minibatches: int,
    epochs: int,
    variant: str | None = None,
    group_size: int | None = None,
    max_tokens: int | None = None,
) -> ObjectiveConfig:
    """The objective with every default filled in that depends on something else, or UserError with one sentence that says why not.

    Filled in: `ratio_to` (behav where max_staleness > 0 and minibatches · epochs = 1, else old; without a ratio always old),
    `clip_high` (= clip), `kl_estimator` (k1 where the KL goes into the reward), and what depends on the context in `variant`:
    dapo's `overlong` = penalty with a cache, olmo3's `mismatch` = tis where the ratio is to old. A flag counts as given by the user
    when it is in `model_fields_set` and the variant has not set it so. Resolving a resolved objective changes nothing.
    `group_size` and `max_tokens` (tokens), where given, are checked against too.
    """
    said = cfg.model_fields_set
    fill: dict[str, Any] = {}
    if cfg.ratio_to is None:
        one_step = minibatches * epochs == 1
        fill["ratio_to"] = "behav" if max_staleness > 0 and one_step and cfg.policy_loss != "reinforce" else "old"
    if cfg.kl_in == "reward" and "kl_estimator" not in said:
        fill["kl_estimator"] = "k1"
    if variant == "dapo" and cfg.overlong_cache > 0 and "overlong" not in said:
        fill["overlong"] = "penalty"
    if variant == "olmo3" and fill.get("ratio_to", cfg.ratio_to) == "old" and "mismatch" not in said:
        fill["mismatch"] = "tis"
    if cfg.policy_loss in ("clip", "cispo") and cfg.clip_high is None:
        fill["clip_high"] = cfg.clip
    resolved = cfg.model_copy(update=fill)
    for sentence in _refusals(resolved, _given(cfg, variant), group_size, max_tokens):
        raise UserError(sentence)
    return resolved


def check_critic(critic: CriticConfig, objective: ObjectiveConfig, variant: str | None = None, epochs: int = 1) -> None:
    """Raises UserError, one sentence, for a flag of the critic that has no effect with this objective or number of epochs."""
    given = {flag for flag in _given(critic, variant) if getattr(critic, flag) is not None}
    if objective.baseline != "critic":
        for flag in sorted(given):
            value, chosen = getattr(critic, flag), objective.baseline
            raise UserError(f"{flag} = {value} belongs to baseline = critic, and baseline = {chosen} was chosen; drop one of the two.")
    if "gae_lambda" in given and critic.gae_length_alpha is not None:
        raise UserError(
            f"gae_lambda = {critic.gae_lambda} has no effect with gae_length_alpha = {critic.gae_length_alpha}, by which lambda follows "
            "the length; set gae_length_alpha to null or drop gae_lambda."
        )
    if "value_epochs" in given and critic.value_epochs < epochs:
        raise UserError(
            f"value_epochs = {critic.value_epochs} is less than epochs = {epochs}, and the value model takes part in each of them; "
            f"raise it to {epochs} or more, or drop it."
        )


def inert_clip(cfg: ObjectiveConfig, minibatches: int, epochs: int) -> bool:
    """True where every ratio is 1, so that no clip ever binds: the ratio is to old, and old is the policy of the only step on a batch."""
    return cfg.policy_loss != "reinforce" and cfg.ratio_to != "behav" and minibatches * epochs == 1


def _given(cfg: BaseModel, variant: str | None) -> set[str]:
    """The flags that the user set, as far as they differ from what the variant sets.

    A config that was written out whole sets every flag: there only those that differ from their defaults count.
    """
    fields, given = type(cfg).model_fields, set(cfg.model_fields_set)
    if given >= {name for name in fields if getattr(cfg, name) is not None}:
        given = {name for name in given if getattr(cfg, name) != fields[name].default}
    chosen = PRESETS.get(variant or "", {})
    return {name for name in given if name not in chosen or getattr(cfg, name) != chosen[name]}


def _refusals(cfg: ObjectiveConfig, given: set[str], group_size: int | None, max_tokens: int | None) -> Iterator[str]:
    """Why this objective has no meaning, in sentences; none if it has."""
    yield from _refuse_advantage(cfg, given, group_size)
    yield from _refuse_ratio(cfg, given)
    yield from _refuse_terms(cfg, given, max_tokens)


def _refuse_advantage(cfg: ObjectiveConfig, given: set[str], group_size: int | None) -> Iterator[str]:
    if cfg.reward_norm == "gdpo":
        if cfg.adv_norm != "std" or cfg.baseline in ("batch", "critic"):
            yield (
                f"reward_norm = gdpo normalises within the group and then over the batch by itself, so baseline = {cfg.baseline} with "
                f"adv_norm = {cfg.adv_norm} has no place; leave adv_norm at std and baseline at group or loo."
            )
        if cfg.kl_in == "reward" and cfg.kl_coef > 0:
            yield "kl_in = reward takes kl_coef off one reward, but reward_norm = gdpo normalises each away; set kl_in to loss."
    if cfg.baseline == "critic" and cfg.adv_norm == "std":
        yield (
            "adv_norm = std divides by the std of a group's rewards, and baseline = critic has an advantage for every token; "
            "set adv_norm to batch or none."
        )
    if cfg.baseline == "batch" and cfg.adv_norm == "std":
        yield (
            "adv_norm = std divides by the group's std, which is 0 for the groups of equal rewards that baseline = batch keeps; "
            "set adv_norm to batch or none."
        )
    if cfg.adv_norm == "none":
        for flag in sorted({"std_ddof", "std_eps"} & given):
            yield f"{flag} = {getattr(cfg, flag)} has no effect with adv_norm = none, which divides by no std; leave one of them out."
    if group_size == 1:
        if cfg.baseline in ("group", "loo"):
            yield f"group_size = 1 gives each answer advantage 0 with baseline = {cfg.baseline}; raise it or set baseline to batch."
        if cfg.filter_groups:
            yield "group_size = 1 leaves no group with reward spread, and filter_groups = true drops all others; change one of them."


def _refuse_ratio(cfg: ObjectiveConfig, given: set[str]) -> Iterator[str]:
    if cfg.policy_loss == "reinforce":
        if cfg.ratio_level == "sequence":
            yield "ratio_level = sequence has no effect with policy_loss = reinforce, which has no ratio; set ratio_level to token."
        if cfg.ratio_to == "behav":
            yield "ratio_to = behav has no effect with policy_loss = reinforce, which has no ratio; correct with mismatch instead."
    if cfg.policy_loss in ("reinforce", "sapo"):
        for flag in sorted({"clip", "clip_high"} & given):
            value, chosen = getattr(cfg, flag), cfg.policy_loss
            yield f"{flag} = {value} has no effect with policy_loss = {chosen}, which has no clip; leave one of them out."
    if cfg.dual_clip is not None and cfg.policy_loss != "clip":
        yield f"dual_clip = {cfg.dual_clip} bounds the term of policy_loss = clip, not of {cfg.policy_loss}; leave one of them out."
    if cfg.policy_loss != "sapo":
        for flag in sorted({"tau_pos", "tau_neg"} & given):
            yield f"{flag} = {getattr(cfg, flag)} is a temperature of policy_loss = sapo, not of {cfg.policy_loss}; leave one of them out."
    if cfg.mismatch != "none":
        if cfg.ratio_to == "behav":
            yield (
                f"mismatch = {cfg.mismatch} with ratio_to = behav would correct twice for the sampling policy; "
                "set mismatch to none or ratio_to to old."
            )
        if cfg.mismatch in _LOW_MISMATCH and cfg.mismatch_low > cfg.mismatch_cap:
            yield f"mismatch_low = {cfg.mismatch_low} is above mismatch_cap = {cfg.mismatch_cap}, so nothing would train; lower it."
    elif "mismatch_cap" in given:
        yield f"mismatch_cap = {cfg.mismatch_cap} has no effect with mismatch = none; choose a mismatch, such as tis, or leave it out."
    if "mismatch_low" in given and cfg.mismatch not in _LOW_MISMATCH:
        yield f"mismatch_low = {cfg.mismatch_low} has no effect with mismatch = {cfg.mismatch}; choose icepop or geo-mask, or leave it out."


def _refuse_terms(cfg: ObjectiveConfig, given: set[str], max_tokens: int | None) -> Iterator[str]:
    if cfg.kl_coef == 0:
        for flag in sorted({"kl_estimator", "kl_in"} & given):
            yield f"{flag} = {getattr(cfg, flag)} has no effect with kl_coef = 0; set kl_coef above 0 or leave {flag} out."
    elif cfg.kl_in == "loss" and cfg.kl_estimator == "k1":
        yield "kl_estimator = k1 in the loss has an expected gradient of zero; set kl_estimator to k2 or k3, or kl_in to reward."
    elif cfg.kl_in == "reward" and cfg.kl_estimator != "k1":
        yield f"kl_estimator = {cfg.kl_estimator} is for the loss, kl_in = reward takes k1; set kl_estimator to k1 or kl_in to loss."
    if cfg.overlong == "penalty" and cfg.overlong_cache == 0:
        yield "overlong = penalty needs a warning zone, and overlong_cache is 0; set overlong_cache to a number of tokens."
    if cfg.overlong != "penalty" and cfg.overlong_cache > 0:
        yield f"overlong_cache = {cfg.overlong_cache} has no effect with overlong = {cfg.overlong}; set overlong to penalty or drop it."
    if max_tokens is not None and cfg.overlong == "penalty" and cfg.overlong_cache > max_tokens:
        yield f"overlong_cache = {cfg.overlong_cache} is wider than max_tokens = {max_tokens}; lower overlong_cache."
