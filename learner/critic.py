"""The critic of one rank: a value model beside the policy, the advantages that follow from its values, and its own optimiser.

Once per batch `assess` leaves value, return and advantage of every token in the micro-batches; then, for each optimiser step,
`accumulate` adds up the value's gradient. Every public method but `nll` is a collective. Shape legend: A answers of the batch,
K answers of a micro-batch, N policy-written tokens of a micro-batch.

Sources: VC-PPO (arXiv 2503.01491): pre-training on Monte-Carlo returns, one lambda for the policy and another for the value;
VAPO (arXiv 2504.05118): a lambda by length, and the likelihood of right answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.admission import RIGHT
from learner.aggregate import aggregate_token_loss
from learner.answers import AnswerTable
from learner.denominators import answer_weights
from learner.gae import gae, length_adaptive_lambda, push_size, token_rewards, value_terms
from learner.model import free_gathered, load_value
from learner.optim import Update, gradient_norm, learning_rate, local_gradients, make_adamw
from learner.parts import MicroBatch, Part
from learner.settings import LearnerSettings

Reduce = Callable[[Tensor], None]
VALUE_RATE = 10.0  # of the policy's learning rate: the value model has to keep up with a policy that moves
SUMS = ("loss", "clipped", "nll", "nll_push", "policy_push")


class Critic:
    """`all_sum` and `all_max` reduce a tensor over ranks in place; `source` is the checkpoint that the value model starts from."""

    def __init__(self, source: str, settings: LearnerSettings, mesh: Any, device: torch.device, all_sum: Reduce, all_max: Reduce) -> None:
        self.config, self.objective = settings.critic, settings.objective
        self.kl_in_reward = self.objective.kl_coef > 0 and self.objective.kl_in == "reward"
        self.model = load_value(source, settings.config, mesh=mesh, device=device)
        rate = self.config.value_lr if self.config.value_lr is not None else VALUE_RATE * settings.optim.lr
        self.optim = settings.optim.model_copy(update={"lr": rate, "lr_schedule": "constant"})
        self.optimizer = make_adamw(self.model, self.optim)
        self.replicas = settings.config.learner_replicas
        self.device, self.all_sum, self.all_max = device, all_sum, all_max
        self._sums = self._nothing()

    # Once per batch

    def assess(self, table: AnswerTable, parts: list[Part], *, pretraining: bool) -> tuple[np.ndarray, dict[str, float | None]]:
        """Value, return and advantage of every token, into the micro-batches of all parts, and the weights of both losses.

        Gives the mean advantage of each answer [A], and statistics: values, returns and advantages are those before `adv_norm`.
        """
        micros = [micro for part in parts for micro in part.micro]
        with torch.no_grad():
            for micro in micros:
                micro.value_N = self.model(micro.input_RW, micro.position_RW, micro.flat_N, micro.segments)
        free_gathered(self.model)
        alpha = self.config.gae_length_alpha
        lam_A = np.full(len(table.written_A), self.config.gae_lambda) if alpha is None else length_adaptive_lambda(table.written_A, alpha)
        reward_A = np.where(table.absent_A, 0.0, table.rewards_A) + table.penalty_A
        for micro in micros:
            self._targets(micro, reward_A, lam_A, 1.0 if pretraining else self.config.gae_lambda_value)
        for part in parts:
            self._weigh(table, part)
        stats = self._statistics(micros) | {"lambda": float(lam_A[table.trains_A].mean()) if table.trains_A.any() else None}
        self._normalise(micros, stats)
        stats.pop("tokens", None)
        return self._by_answer(micros, table), stats | {"frozen": float(pretraining)}

    def _targets(self, micro: MicroBatch, reward_A: np.ndarray, lam_A: np.ndarray, lam_value: float) -> None:
        """Advantages and returns in float64."""
        assert micro.value_N is not None
        k1_N = None
        if self.kl_in_reward:
            assert micro.old_N is not None and micro.ref_N is not None
            k1_N = (micro.old_N.double() - micro.ref_N.double()).cpu().numpy()
        answer_N, value_N = micro.answer_N.cpu().numpy(), micro.value_N.double().cpu().numpy()
        ids_K = np.maximum(micro.ids_K, 0)
        reward_N = token_rewards(np.where(micro.ids_K >= 0, reward_A[ids_K], 0.0), answer_N, k1_N, self.objective.kl_coef)
        advantage_N = gae(reward_N, value_N, answer_N, lam_A[ids_K])
        return_N = gae(reward_N, value_N, answer_N, lam_value) + value_N
        micro.advantage_N, micro.return_N = (torch.from_numpy(x).to(self.device) for x in (advantage_N, return_N))

    def _weigh(self, table: AnswerTable, part: Part) -> None:
        """Whole-step denominators: all tokens of the step for values, all tokens of its right answers for their likelihood."""
        chosen_A = table.trains_A & np.isin(table.group_A, part.groups)
        right_A = chosen_A & (np.where(table.absent_A, -np.inf, table.rewards_A) >= RIGHT)
        part.value_weights_A = answer_weights(np.where(chosen_A, table.written_A, 0))
        part.nll_weights_A = answer_weights(np.where(right_A, table.written_A, 0))

    def _statistics(self, micros: list[MicroBatch]) -> dict[str, float | None]:
        """Over all unmasked tokens of the batch and all ranks; in two passes, so that no difference of large squares is taken."""
        value, back, adv = (self._tokens(micros, name) for name in ("value_N", "return_N", "advantage_N"))
        table = torch.stack([value, back, adv, back - value])
        count = torch.tensor([table.shape[1]], dtype=torch.float64, device=self.device)
        sums = torch.cat([count, table.sum(1)])
        self.all_sum(sums)
        tokens, mean = sums[0].item(), sums[1:] / sums[0].clamp(min=1)
        squares = (table - mean[:, None]).square().sum(1)
        self.all_sum(squares)
        ends = torch.stack([adv.max(), -adv.min()]) if len(adv) else torch.full((2,), -math.inf, dtype=torch.float64, device=self.device)
        self.all_max(ends)
        if not tokens:
            return {}
        std = (squares / tokens).sqrt().tolist()
        spread = std[1] > self.objective.spread_tol
        return {
            "tokens": tokens,
            "value_mean": mean[0].item(),
            "return_mean": mean[1].item(),
            "return_std": std[1],
            "explained_variance": 1.0 - (std[3] / std[1]) ** 2 if spread else None,
            "advantage_mean": mean[2].item(),
            "advantage_std": std[2],
            "advantage_max": ends[0].item(),
            "advantage_min": -ends[1].item(),
        }

    def _normalise(self, micros: list[MicroBatch], stats: Mapping[str, float | None]) -> None:
        """`adv_norm` batch: whitened over the unmasked tokens of the batch, 0 where they do not differ. Ends in float32."""
        shift, scale = 0.0, 1.0
        if self.objective.adv_norm == "batch" and stats.get("tokens"):
            tokens, low, high = (float(stats[name] or 0) for name in ("tokens", "advantage_min", "advantage_max"))
            shift, scale = float(stats["advantage_mean"] or 0), 0.0
            if tokens > self.objective.std_ddof and not high - low <= self.objective.spread_tol:
                square = float(stats["advantage_std"] or 0) ** 2 * tokens / (tokens - self.objective.std_ddof)
                scale = 1.0 / (math.sqrt(square) + self.objective.std_eps)
        for micro in micros:
            assert micro.advantage_N is not None and micro.return_N is not None
            micro.advantage_N = ((micro.advantage_N - shift) * scale).float()
            micro.return_N = micro.return_N.float()

    def _by_answer(self, micros: list[MicroBatch], table: AnswerTable) -> np.ndarray:
        """[A] float64: the mean advantage over an answer's tokens, 0 for those that do not train."""
        total = torch.zeros(len(table.group_A), dtype=torch.float64, device=self.device)
        for micro in micros:
            assert micro.advantage_N is not None
            ids_N = torch.from_numpy(np.maximum(micro.ids_K, 0)).to(self.device)[micro.answer_N]
            total.index_add_(0, ids_N, micro.advantage_N.double().masked_fill(~micro.mask_N, 0.0))
        self.all_sum(total)
        return total.cpu().numpy() / np.maximum(table.written_A, 1)

    def _tokens(self, micros: list[MicroBatch], name: str) -> Tensor:
        """A column of all unmasked tokens of this rank, float64."""
        columns = [getattr(micro, name)[micro.mask_N].double() for micro in micros]
        return torch.cat([torch.zeros(0, dtype=torch.float64, device=self.device), *columns])

    # For each optimiser step

    def accumulate(self, part: Part) -> None:
        """Forward and backward passes of the value's loss: its mean over all unmasked tokens of the step, times `value_coef`."""
        assert part.value_weights_A is not None
        for micro in part.micro:
            assert micro.value_N is not None and micro.return_N is not None
            value_N = self.model(micro.input_RW, micro.position_RW, micro.flat_N, micro.segments)
            terms_N, clipped_N = value_terms(value_N, micro.value_N, micro.return_N, self.config.value_clip)
            loss = aggregate_token_loss(terms_N, micro.mask_N, answer=micro.answer_N, weights=micro.per_answer(part.value_weights_A))
            (self.config.value_coef * loss).backward()
            self._sums["loss"] += loss.detach().double()
            self._sums["clipped"] += (clipped_N & micro.mask_N).double().sum()

    def nll(self, policy_loss: Tensor, new_N: Tensor, micro: MicroBatch, part: Part) -> Tensor:
        """`positive_nll` times this micro-batch's share of the likelihood term; `policy_loss` is only compared with it.

        `new_N` must not be an output of the model itself, whose hooks the comparison would set off.
        """
        assert part.nll_weights_A is not None
        weights = micro.per_answer(part.nll_weights_A)
        share = aggregate_token_loss(-new_N, micro.mask_N, answer=micro.answer_N, weights=weights)
        term = self.config.positive_nll * share
        for name, loss in (("nll_push", term), ("policy_push", policy_loss)):
            (grad_N,) = torch.autograd.grad(loss, new_N, retain_graph=True)
            self._sums[name] += push_size(grad_N, micro.mask_N)
        self._sums["nll"] += share.detach().double()
        return term

    def update(self, step: int, tokens: int) -> tuple[Update, dict[str, float | None]]:
        """What `accumulate` has added up since the last time, over all ranks; `step` counts the value's own, from 0."""
        sums = torch.stack([self._sums[name] for name in SUMS])
        self.all_sum(sums)
        self._sums = self._nothing()
        loss, clipped, nll, nll_push, policy_push = sums.tolist()
        grads = local_gradients(self.model.parameters())
        norm = gradient_norm(grads, self.all_sum, self.device, self.replicas)
        update = Update(self.optimizer, grads, self.config.value_coef * loss, norm, learning_rate(step, 0, self.optim))
        found: dict[str, float | None] = {"loss": loss, "grad_norm": norm, "lr": update.lr}
        if self.config.value_clip is not None:
            found["clipfrac"] = clipped / max(tokens, 1)
        if nll_push or policy_push:
            found |= {"nll": nll, "nll_share": nll_push / (nll_push + policy_push)}
        return update, found

    def _nothing(self) -> dict[str, Tensor]:
        return {name: torch.zeros((), dtype=torch.float64, device=self.device) for name in SUMS}
