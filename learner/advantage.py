"""Advantages: how much better an answer did than its baseline. Pure formulas, in float64, once per batch.

Shape legend: B answers of the batch, R named rewards, P prompts, G answers per prompt.

Everything here is numpy, so that the controller and `winnow explain` need no torch; torch tensors are accepted, and
then a torch tensor is returned. Sums run over whole groups and over the whole batch: call it with all of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.errors import UserError

BASELINES = ("group", "loo", "batch", "critic")
SCALES = ("std", "none", "batch")


def group_advantages(
    rewards: Any,
    group: Any = None,
    *,
    baseline: str = "group",
    scale: str = "std",
    std_ddof: int = 0,
    std_eps: float = 0.0,
    spread_tol: float = 1e-6,
    masked: Any = None,
    absent: Any = None,
    raw: Any = None,
    reward_norm: str = "sum",
    reward_weights: Sequence[float] | None = None,
) -> Any:
    """The advantage of every answer: A_i = (r_i − baseline) / scale.

    `rewards` is [B], or [R, B] for several rewards, with `group` [B] naming the prompt of each answer. With `group`
    None, [G] is one group and [P, G] is one group a row. The result is float64 with one number per answer, in the
    shape of the answers.

    - `baseline`: `group` the group's mean (GRPO, arXiv 2402.03300) · `loo` the mean of the other answers, which gives
      n/(n−1)·(r_i − mean) (RLOO, arXiv 2402.14740) · `batch` the mean of all unmasked answers (REINFORCE++, arXiv 2501.03262).
    - `scale`: `std` the group's std plus `std_eps` · `none` (Dr. GRPO, arXiv 2503.20783) · `batch` the std of the
      baselined advantages of all unmasked answers plus `std_eps`. `std_ddof` 0 is the population std, 1 the sample std.
    - `reward_norm`: `sum` adds the rewards with `reward_weights` first · `gdpo` normalises each reward within its group,
      adds them with the weights, and whitens the sum over the unmasked answers of the batch (GDPO, arXiv 2601.05242).
    - `masked` [B]: answers masked as a whole; they stay in their group's baseline, but not in any statistic of the batch.
    - `absent` [B]: answers without a reward; they are in no baseline, their reward is not read, their advantage is 0.
    - `raw` [B]: the reward before penalties were added to it. Spread is judged on it (default: on `rewards`).

    Under `group` and `loo` a group whose rewards span no more than `spread_tol` has advantage exactly 0, whatever the
    scale; so has a group of one answer. Where a scale has nothing to measure (its values span no more than
    `spread_tol`) the advantage is 0 as well, not rounding noise divided by rounding noise.

    Raises UserError for a combination that has no meaning; a non-finite reward of a present answer is an internal error.
    """
    _check(baseline, scale, reward_norm)
    r_RB, group_B, shape = _flatten(rewards, group)
    masked_B, absent_B = (_flags(x, group_B.shape) for x in (masked, absent))
    present_B = ~absent_B
    assert np.isfinite(r_RB[:, present_B]).all(), "a reward that is not finite reached group_advantages"
    r_RB = np.where(present_B, r_RB, 0.0)
    batch_B = present_B & ~masked_B  # the answers that statistics of the batch are taken over
    weights_R = np.ones(len(r_RB)) if reward_weights is None else np.asarray(reward_weights, dtype=np.float64)
    assert weights_R.shape == (len(r_RB),), f"{len(r_RB)} rewards need as many weights, got {weights_R.shape}"

    if reward_norm == "gdpo":
        parts_RB = [_in_group(r_B, r_B, group_B, present_B, baseline, "std", std_ddof, std_eps, spread_tol) for r_B in r_RB]
        adv_B = weights_R @ np.stack(parts_RB)
        signal_B = _any_in_group(np.any(np.stack(parts_RB) != 0, axis=0), group_B)
        adv_B = np.where(signal_B, _over_batch(adv_B, batch_B, std_ddof, std_eps, spread_tol, centre=True), 0.0)
    else:
        r_B = weights_R @ r_RB
        raw_B = r_B if raw is None else np.where(present_B, _array(raw).reshape(-1), 0.0)
        if baseline == "batch":
            mean = r_B[batch_B].mean() if batch_B.any() else 0.0
            adv_B = r_B - mean
        else:
            adv_B = _in_group(r_B, raw_B, group_B, present_B, baseline, scale, std_ddof, std_eps, spread_tol)
        if scale == "batch":
            adv_B = _over_batch(adv_B, batch_B, std_ddof, std_eps, spread_tol, centre=False)
    adv_B = np.where(present_B, adv_B, 0.0).reshape(shape)
    return _like(adv_B, rewards)


def informative_groups(rewards: Any, group: Any, *, spread_tol: float = 1e-6, absent: Any = None) -> np.ndarray:
    """[B] bool: whether the answer's group has reward spread, max − min > `spread_tol` over its present answers, on the raw reward."""
    r_RB, group_B, _ = _flatten(rewards, group)
    assert len(r_RB) == 1, "spread is judged on one reward"
    present_B = ~_flags(absent, group_B.shape)
    return _span(np.where(present_B, r_RB[0], 0.0), group_B, present_B) > spread_tol


def weigh_rewards(rewards_RB: Any, reward_weights: Sequence[float] | None = None) -> np.ndarray:
    """[B] float64: Σ_R weight · reward, the one reward that several make (weights default to 1)."""
    r_RB = _array(rewards_RB)
    weights_R = np.ones(len(r_RB)) if reward_weights is None else np.asarray(reward_weights, dtype=np.float64)
    return weights_R @ r_RB


def kl_in_reward(rewards: Any, k1_sum_per_answer: Any, kl_coef: float) -> np.ndarray:
    """[B] float64: r_i − kl_coef · Σ_t k1_t, with k1 = old − ref of the detached old policy, summed over the answer's tokens (nats)."""
    return _array(rewards) - kl_coef * _array(k1_sum_per_answer)


def overlong_penalty(lengths: Any, max_len: int, cache: int) -> np.ndarray:
    """[B] float64, the soft penalty of DAPO (arXiv 2503.14476, section 3.4) for answers of `lengths` [B] tokens.

    0 up to `max_len` − `cache`, then linear, −1 at `max_len` and above.
    """
    lengths_B = _array(lengths)
    if cache <= 0:
        raise UserError(f"overlong_cache = {cache} leaves the soft penalty no zone; set overlong_cache to a number of tokens above 0.")
    return np.clip(((max_len - cache) - lengths_B) / cache, -1.0, 0.0) + 0.0  # + 0.0: no negative zero


def treat_overlong(mode: str, truncated: Any, lengths: Any, max_len: int, cache: int) -> tuple[np.ndarray, np.ndarray]:
    """What `--overlong` does: (what is added to the reward [B] float64, which answers are masked as a whole [B] bool).

    `score`: nothing · `mask`: answers that the engine cut off leave the loss, and stay in their group's baseline and in
    `informative` · `penalty`: the soft penalty by length. `truncated` [B] comes from the engine's finish reason.
    """
    truncated_B = np.asarray(truncated, dtype=bool)
    none_B, nothing_B = np.zeros(truncated_B.shape, dtype=bool), np.zeros(truncated_B.shape)
    if mode == "mask":
        return nothing_B, truncated_B.copy()
    if mode == "penalty":
        return overlong_penalty(lengths, max_len, cache), none_B
    assert mode == "score", mode
    return nothing_B, none_B


def _check(baseline: str, scale: str, reward_norm: str) -> None:
    """Refuse what no formula exists for."""
    assert baseline in BASELINES and scale in SCALES and reward_norm in ("sum", "gdpo"), (baseline, scale, reward_norm)
    if baseline == "critic":
        raise UserError("baseline = critic takes its advantages from a value network, not from group_advantages; use group, loo or batch.")
    if baseline == "batch" and scale == "std":
        raise UserError(
            "adv_norm = std divides by the group's std, which is 0 for the groups of equal rewards that baseline = batch keeps; "
            "set adv_norm to batch or none."
        )
    if reward_norm == "gdpo" and (scale != "std" or baseline == "batch"):
        raise UserError(
            f"reward_norm = gdpo normalises within the group and then over the batch by itself, so baseline = {baseline} with "
            f"adv_norm = {scale} has no place; leave adv_norm at std and baseline at group or loo."
        )


def _in_group(
    r_B: np.ndarray,
    raw_B: np.ndarray,
    group_B: np.ndarray,
    present_B: np.ndarray,
    baseline: str,
    scale: str,
    ddof: int,
    eps: float,
    tol: float,
) -> np.ndarray:
    """[B]: (r − the group's baseline) / the group's std, exactly 0 where the group has no spread."""
    n_B = _sum(np.ones_like(r_B), group_B, present_B)
    # Two passes: the second takes off what rounding left in the first mean, and the variance is that of the residuals, so that
    # nothing cancels at rewards of 1e6 (E[x²] − E[x]² would).
    resid_B = r_B - _sum(r_B, group_B, present_B) / np.maximum(n_B, 1)
    resid_B = resid_B - _sum(resid_B, group_B, present_B) / np.maximum(n_B, 1)
    adv_B = resid_B * (n_B / np.maximum(n_B - 1, 1)) if baseline == "loo" else resid_B
    signal_B = (n_B >= 2) & (_span(raw_B, group_B, present_B) > tol)
    if scale == "std":
        var_B = _sum(resid_B**2, group_B, present_B) / np.maximum(n_B - ddof, 1)
        signal_B &= _span(r_B, group_B, present_B) > tol  # a penalty may have cancelled the spread that is divided by
        adv_B = adv_B / (np.sqrt(var_B) + eps + ~signal_B)
    return np.where(signal_B & present_B, adv_B, 0.0)


def _over_batch(adv_B: np.ndarray, batch_B: np.ndarray, ddof: int, eps: float, tol: float, *, centre: bool) -> np.ndarray:
    """[B]: advantages divided by their std over the unmasked answers of the batch; 0 where they do not differ."""
    seen = adv_B[batch_B]
    if len(seen) <= ddof or np.ptp(seen) <= tol:
        return np.zeros_like(adv_B)
    return (adv_B - seen.mean() * centre) / (seen.std(ddof=ddof) + eps)


def _sum(x_B: np.ndarray, group_B: np.ndarray, present_B: np.ndarray) -> np.ndarray:
    """[B]: the sum over the present answers of the answer's group."""
    return np.bincount(group_B, weights=np.where(present_B, x_B, 0.0))[group_B]


def _span(x_B: np.ndarray, group_B: np.ndarray, present_B: np.ndarray) -> np.ndarray:
    """[B]: max − min over the present answers of the answer's group; 0 where there is none."""
    groups = int(group_B.max(initial=-1)) + 1
    high, low = np.full(groups, -np.inf), np.full(groups, np.inf)
    np.maximum.at(high, group_B[present_B], x_B[present_B])
    np.minimum.at(low, group_B[present_B], x_B[present_B])
    return np.where(np.isfinite(high), high, 0.0)[group_B] - np.where(np.isfinite(low), low, 0.0)[group_B]


def _any_in_group(flag_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """[B]: whether any answer of the group has the flag."""
    return np.bincount(group_B, weights=flag_B.astype(np.float64))[group_B] > 0


def _flatten(rewards: Any, group: Any) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Rewards as [R, B], group indices [B] counted from 0, and the shape of the answers."""
    r = _array(rewards)
    if group is None:
        assert r.ndim in (1, 2), f"without group ids rewards are [G] or [P, G], not {r.shape}"
        rows = np.zeros(r.shape, dtype=np.int64) if r.ndim == 1 else np.repeat(np.arange(r.shape[0])[:, None], r.shape[1], axis=1)
        return r.reshape(1, -1), rows.reshape(-1), r.shape
    ids = np.asarray(group.detach().cpu() if hasattr(group, "detach") else group).reshape(-1)
    assert r.ndim in (1, 2) and r.shape[-1] == len(ids), f"rewards {r.shape} do not fit {len(ids)} group ids"
    _, group_B = np.unique(ids, return_inverse=True)
    return r.reshape(-1, len(ids)), group_B.reshape(-1), (len(ids),)


def _flags(x: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, dtype=bool) if x is None else _array(x).reshape(-1).astype(bool)


def _array(x: Any) -> np.ndarray:
    """Any array, list or tensor as float64 numpy."""
    return np.asarray(x.detach().cpu().double().numpy() if hasattr(x, "detach") else x, dtype=np.float64)


def _like(x: np.ndarray, model: Any) -> Any:
    """A torch tensor where a torch tensor was given."""
    if not hasattr(model, "detach"):
        return x
    import torch

    return torch.from_numpy(x).to(model.device)
