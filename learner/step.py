"""The learner of one rank: a batch in, the optimiser steps it gives, and what they measured.

Every public method is a collective: all ranks call it with the same numbers (the tokens differ). Shape legend: A answers
of the batch, K answers of a micro-batch, N policy-written tokens of a micro-batch.

For each optimiser step the weight of every answer in the loss is computed from the whole step's lengths first; then
each rank's micro-batches add their shares, gradients sum over ranks, and all ranks agree on whether to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.abandon import Abandoned, Abandonment
from learner.answers import AnswerTable, batch_advantages, by_group, split_groups, tabulate
from learner.attention import NAME as SEGMENTS
from learner.checkpoint import VALUE, Counters, Trained, export_hf, load_checkpoint, save_checkpoint
from learner.critic import Critic
from learner.denominators import answer_weights
from learner.diagnostics import ObjectiveSums, finalise
from learner.logprob import Upstream
from learner.micro_loss import is_separable, objective_of, upstream_of
from learner.model import Policy, free_gathered, full_weights, load_policy, make_mesh
from learner.objective import LossOutputs
from learner.optim import Update, gradient_norm, learning_rate, local_gradients, make_adamw
from learner.pack import Answer, Groups, PackSettings, StepPlan, build_micro, plan_step
from learner.parts import Clock, MicroBatch, MismatchSums, Part, StepsTaken
from learner.records import Batch, OptimiserStep, StepStats, TrainGroup
from learner.settings import LOSS_FLAGS, LearnerSettings

__all__ = ["Learner", "LearnerSettings"]


class Learner:
    """One rank of the learner. The default process group must exist before it is made."""

    def __init__(self, settings: LearnerSettings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(settings.seed)
        self.replicas = settings.config.learner_replicas
        self.mesh = make_mesh(device, self.replicas)
        self.policy = load_policy(settings.model, settings.config, mesh=self.mesh, device=device)
        self.optimizer = make_adamw(self.policy, settings.optim)
        self.counters = Counters()
        # On GPUs the ranks agree to give up a step over a group of their CPUs, so that no kernel is waited for.
        self._cpus = dist.new_group(backend="gloo") if device.type == "cuda" and self.ranks > 1 else None
        self.abandonment = Abandonment(lambda asked: self.all_max(asked, self._cpus))
        self._changed = False  # whether the batch at work has taken an optimiser step
        self._reference: Policy | None = None
        self._reference_source: str | None = settings.reference or settings.model
        self._critic: Critic | None = None
        kernel = self.policy.hf.config._attn_implementation
        self.packing = PackSettings(
            micro_tokens=settings.config.micro_tokens,
            row_tokens=settings.config.row_tokens,
            single_row=kernel in (SEGMENTS, "flash_attention_2"),
            share=settings.config.share_prompts and kernel == SEGMENTS and device.type == "cpu",
            hidden=self.policy.hidden_size,
        )
        chosen = settings.objective
        self.flags = {name: getattr(chosen, name) for name in LOSS_FLAGS}
        self.separable = is_separable(chosen.ratio_level, chosen.mismatch)
        self.kl_in_reward = chosen.kl_coef > 0 and chosen.kl_in == "reward"
        repeated = settings.optim.minibatches * settings.optim.epochs > 1
        # With one step per batch `old` is the policy of that step itself: its pass would compute the same numbers again.
        self.needs_old = self.kl_in_reward or (repeated and settings.ratio_to == "old")

    # What a rank works on

    def _plans(self, table: AnswerTable) -> list[tuple[np.ndarray, StepPlan]]:
        """The mini-batches of a batch: their groups, and who computes which answer."""
        plans = []
        for groups in split_groups(len(table.uids), self.settings.optim.minibatches):
            ids = np.flatnonzero(table.trains_A & np.isin(table.group_A, groups))
            shared = Groups(table.group_A, table.prompt_A)
            plans.append((groups, plan_step(table.sequence_A, ids, ranks=self.ranks, settings=self.packing, groups=shared)))
        return plans

    def _tabulate(self, groups: Sequence[TrainGroup]) -> AnswerTable:
        return tabulate(groups, self.settings.objective, self.settings.max_tokens)

    def needs(self, groups: Sequence[TrainGroup]) -> list[int]:
        """The uids whose tokens this rank must be given to train on `groups`; not a collective."""
        table = self._tabulate(groups)
        return sorted({table.uids[table.group_A[a]] for _, plan in self._plans(table) for a in plan.answers_of(self.rank)})

    def _prepare(self, table: AnswerTable, batch: Batch) -> list[Part]:
        parts = []
        for groups, plan in self._plans(table):
            answers = {}
            for a in plan.answers_of(self.rank):
                group = batch.tokens[table.uids[table.group_A[a]]].group
                answers[a] = Answer.of(group.prompt, group.completions[table.slot_A[a]], int(table.group_A[a]))
                seen = (answers[a].size, len(answers[a].written))
                assert seen == (table.sequence_A[a], table.written_A[a]), f"group {group.uid}: tokens and numbers disagree"
            chosen_A = table.trains_A & np.isin(table.group_A, groups)
            lengths_A = np.where(chosen_A, table.written_A, 0)
            parts.append(
                Part(
                    groups=groups,
                    weights_A=answer_weights(lengths_A, table.group_A, mode=self.flags["loss_agg"], max_len=self.settings.max_tokens),
                    tokens=int(lengths_A.sum()),
                    answers=int(chosen_A.sum()),
                    micro=[MicroBatch.on(self.device, build_micro(r, answers, self.packing.share)) for r in plan.micro[self.rank]],
                )
            )
        return parts

    # Training

    def train_batch(self, batch: Batch) -> StepStats:
        """Advantages once, then M mini-batches x E epochs of optimiser steps. The same stats on every rank.

        Raises Abandoned, with the learner as it was before, when that was asked for before the first optimiser step is taken.
        """
        self._changed, before = False, self.counters
        try:
            return self._train_batch(batch)
        except Abandoned:
            self.counters = before
            for one in self._trained():
                one.optimizer.zero_grad()
                free_gathered(one.model)
            raise

    def _train_batch(self, batch: Batch) -> StepStats:
        clock = Clock()
        frozen = self.has_critic and batch.index < self.settings.critic.value_pretrain
        judged = not frozen or self.kl_in_reward  # whether log-probabilities of the batch are needed at all
        with clock.part("total"):
            with clock.part("prepare"):
                table = self._tabulate(batch.groups)
                parts = self._prepare(table, batch)
            if self.needs_old and judged:
                with clock.part("old"):
                    self._no_grad_pass(self.policy, parts, "old_N")
            if self.settings.objective.kl_coef > 0 and judged:
                with clock.part("reference"):
                    self._no_grad_pass(self.reference, parts, "ref_N")
            critic: dict[str, float | None] = {}
            if self.has_critic:
                with clock.part("values"):
                    advantage_A, critic = self.critic.assess(table, parts, pretraining=frozen)
            else:
                with clock.part("advantages"):
                    advantage_A = self._advantages(table, parts)
            mismatch = MismatchSums(self.device)
            taken = self._optimiser_steps(parts, advantage_A, clock, mismatch, frozen)
        self.all_reduce(mismatch.sums)
        self.all_max(mismatch.top)
        self.counters = replace(self.counters, batches=batch.index + 1)
        return StepStats(
            index=batch.index,
            steps=tuple(taken.steps),
            value_steps=tuple(taken.alone),
            mismatch=mismatch.finish(),
            advantages=by_group(table, advantage_A),
            tokens=int(sum(part.tokens for part in parts)),
            groups=len(table.uids),
            nonfinite=sum(s.skipped == "nonfinite" for s in (*taken.steps, *taken.alone)),
            nonfinite_in_a_row=self.counters.nonfinite_in_a_row,
            empty=sum(s.skipped == "empty" for s in taken.steps),
            failed=tuple(table.uids[g] for g in sorted(taken.failed)),
            masked_tokens=table.masked_tokens(taken.failed) | {"mismatch": taken.cut},
            seconds=dict(clock.seconds),
            stats={} if frozen else asdict(finalise(taken.total)),
            critic=critic,
        )

    def _optimiser_steps(
        self, parts: list[Part], advantage_A: np.ndarray, clock: Clock, mismatch: MismatchSums, frozen: bool
    ) -> StepsTaken:
        """E passes over the mini-batches, then the value model's further passes. `mismatch` gets each token once."""
        taken, trained = StepsTaken(ObjectiveSums.zeros(self.device)), set[int]()
        for epoch in range(self.settings.optim.epochs):
            for part in parts:
                first = epoch == 0 and (self.needs_old or not any(s.tokens for s in taken.steps))
                step, sums = self._optimiser_step(part, advantage_A, clock, mismatch if first else None, frozen)
                taken.steps.append(step)
                if step.skipped == "nonfinite":
                    taken.failed.update(part.groups.tolist())
                else:
                    trained.update(part.groups.tolist())
                    taken.total = taken.total + sums
                    taken.cut += int(sums.mismatch_masked) if epoch == 0 else 0
        taken.failed -= trained
        # The value model has to keep up with a policy that moves: more passes over the batch, which move it alone.
        more = self.settings.critic.value_epochs - self.settings.optim.epochs if self.has_critic else 0
        taken.alone = [self._optimiser_step(part, advantage_A, clock, None, True)[0] for _ in range(more) for part in parts]
        return taken

    def _advantages(self, table: AnswerTable, parts: list[Part]) -> np.ndarray:
        kl_sum_A = None
        if self.kl_in_reward:
            sums = torch.zeros(len(table.group_A), dtype=torch.float64, device=self.device)
            for micro in (m for part in parts for m in part.micro):
                assert micro.old_N is not None and micro.ref_N is not None
                ids_N = torch.from_numpy(micro.ids_K).to(self.device)[micro.answer_N]
                sums.index_add_(0, ids_N.clamp(min=0), ((micro.old_N - micro.ref_N).double()).masked_fill(~micro.mask_N, 0.0))
            self.all_reduce(sums)
            kl_sum_A = sums.cpu().numpy()
            if not np.isfinite(kl_sum_A).all():
                # Weights that are not finite show as a loss that is not: the step is skipped and counted there.
                return np.full(len(kl_sum_A), np.nan)
        return batch_advantages(table, self.settings.objective, kl_sum_A=kl_sum_A, reward_weights=self.settings.reward_weights)

    def _optimiser_step(
        self, part: Part, advantage_A: np.ndarray, clock: Clock, mismatch: MismatchSums | None, frozen: bool = False
    ) -> tuple[OptimiserStep, ObjectiveSums]:
        """Policy and value step together or not at all; while the policy is `frozen` the value steps alone."""
        lr = 0.0 if frozen else learning_rate(self.counters.optimiser_steps, self.settings.total_steps, self.settings.optim)
        in_a_row, total = self.counters.nonfinite_in_a_row, ObjectiveSums.zeros(self.device)
        if part.tokens == 0:
            self._count_step(in_a_row, frozen)
            return OptimiserStep(loss=0.0, grad_norm=0.0, lr=lr, tokens=0, answers=0, micro_batches=0, skipped="empty"), total
        with clock.part("forward_backward"):
            for micro in () if frozen else part.micro:
                self._heed()
                loss, out, new_N = self._loss(micro, part, advantage_A)
                loss.backward()
                total = total + out.sums
                if mismatch is not None:
                    mismatch.add(new_N if micro.old_N is None else micro.old_N, micro.behav_N, micro.mask_N)
            total = self._over_ranks(total)
        updates, critic = list[Update](), dict[str, float | None]()
        if self.has_critic:
            with clock.part("value"):
                self.critic.accumulate(part)
                update, critic = self.critic.update(self.counters.value_steps, part.tokens)
                updates.append(update)
        with clock.part("optimiser"):
            policy_loss = total.loss.item() + self.settings.critic.positive_nll * (critic.get("nll") or 0.0)
            if not frozen:
                grads = local_gradients(self.policy.parameters())
                norm = gradient_norm(grads, self.all_reduce, self.device, self.replicas)
                updates.append(Update(self.optimizer, grads, policy_loss, norm, lr))
            finite = all(update.finite for update in updates)
            self._changed = True
            for update in updates:
                if finite:
                    update.take(self.settings.optim.grad_clip)
                update.optimizer.zero_grad()
        self._count_step(0 if finite else in_a_row + 1, frozen)
        step = OptimiserStep(
            loss=policy_loss,
            grad_norm=0.0 if frozen else updates[-1].norm,
            lr=lr,
            tokens=part.tokens,
            answers=part.answers,
            micro_batches=len(part.micro),
            skipped="nonfinite" if not finite else "frozen" if frozen else "",
            stats={} if frozen else asdict(finalise(total)),
            critic=critic,
        )
        return step, total

    def _over_ranks(self, sums: ObjectiveSums) -> ObjectiveSums:
        vectors = sums.to_vectors()
        for vector, op in zip(vectors, (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN), strict=True):
            dist.all_reduce(vector, op=op)
        return ObjectiveSums.from_vectors(*vectors)

    def _loss(self, micro: MicroBatch, part: Part, advantage_A: np.ndarray) -> tuple[Tensor, LossOutputs, Tensor]:
        """(the loss to call `backward` on, the objective's outputs, the log-probabilities [N] detached)."""
        nll = self.has_critic and self.settings.critic.positive_nll > 0
        told = {"ratio_to": self.settings.ratio_to, "max_len": self.settings.max_tokens}
        objective = objective_of(micro, part.weights_A, advantage_A, self.flags, **told)
        upstream = upstream_of(objective, self.flags["entropy_coef"] != 0)
        new_N, entropy_N = self._forward(self.policy, micro, upstream=upstream if self.separable and not nll else None)
        new_N = new_N.view_as(new_N) if nll else new_N
        out = objective(new_N, entropy_N, slice(None))
        loss = out.loss + self.critic.nll(out.loss, new_N, micro, part) if nll else out.loss
        return loss, out, new_N.detach()

    def _forward(
        self, model: Policy, micro: MicroBatch, with_entropy: bool = True, upstream: Upstream | None = None
    ) -> tuple[Tensor, Tensor]:
        where = (micro.input_RW, micro.position_RW, micro.flat_N, micro.target_N)
        return model(*where, self.settings.temperature, with_entropy, micro.segments, upstream)

    def _no_grad_pass(self, model: Policy, parts: list[Part], name: str) -> None:
        """Log-probabilities of every token under `model`, kept in the micro-batches as `name`."""
        with torch.no_grad():
            for micro in (m for part in parts for m in part.micro):
                self._heed()
                setattr(micro, name, self._forward(model, micro, with_entropy=False)[0])
        free_gathered(model)

    def _heed(self) -> None:
        """Between two micro-batches: give the batch up if that is asked for and still possible."""
        if not self._changed:
            self.abandonment.check()

    def _count_step(self, nonfinite_in_a_row: int, frozen: bool) -> None:
        self.counters = replace(
            self.counters,
            optimiser_steps=self.counters.optimiser_steps + (not frozen),
            value_steps=self.counters.value_steps + self.has_critic,
            nonfinite_in_a_row=nonfinite_in_a_row,
        )

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""
        dist.all_reduce(tensor)

    def all_max(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """The largest over ranks, in place."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)

    # Besides training

    @property
    def reference(self) -> Policy:
        """The frozen reference model, loaded at its first use, sharded like the policy."""
        if self._reference is None:
            source = self._reference_source
            assert source is not None, "after a warm-up the reference is its result: call use_reference"
            self._reference = load_policy(source, self.settings.config, mesh=self.mesh, device=self.device, trainable=False)
        return self._reference

    def use_reference(self, source: str | None) -> None:
        """Take the reference model from another checkpoint, at its next use; None: there is none yet."""
        self._reference, self._reference_source = None, source

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a value model."""
        return self.settings.objective.baseline == "critic"

    @property
    def critic(self) -> Critic:
        """The value model and its optimiser, loaded at their first use, which is after a warm-up."""
        if self._critic is None:
            source = self.settings.critic.value_model or self._reference_source
            assert source is not None, "after a warm-up the value model starts from its result: call use_reference"
            self._critic = Critic(source, self.settings, self.mesh, self.device, self.all_reduce, self.all_max)
        return self._critic

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, in a fixed order; all ranks must exhaust it together (see `full_weights`)."""
        return full_weights(self.policy, dtype)

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint (see `save_checkpoint`)."""
        save_checkpoint(self._trained(), self.counters, folder)

    def load(self, folder: Path | str) -> Counters:
        """Go on from a checkpoint (see `load_checkpoint`)."""
        self.counters = load_checkpoint(self._trained(), folder)
        return self.counters

    def _trained(self) -> list[Trained]:
        trained = {name: p for name, p in self.policy.hf.named_parameters() if p.requires_grad}
        own = [Trained("", self.policy, trained, self.optimizer)]
        if self.has_critic:
            model = self.critic.model
            own.append(Trained(VALUE, model, dict(model.named_parameters()), self.critic.optimizer))
        return own

    def export(self, folder: Path | str, *, dtype: torch.dtype = torch.float32, tokenizer_folder: Path | str | None = None) -> None:
        """Write an ordinary Hugging Face checkpoint (see `export_hf`)."""
        export_hf(self.policy, folder, dtype=dtype, tokenizer_folder=tokenizer_folder)

    def logprobs(self, answers: Sequence[Answer]) -> list[np.ndarray]:
        """The policy's log-probabilities of the policy-written tokens of each answer, at the sampling temperature.

        Every rank gives the same answers and gets all the results (float32, one array per answer).
        """
        sizes = [len(a.written) for a in answers]
        ends = np.cumsum([0, *sizes])
        plan = plan_step([a.size for a in answers], np.flatnonzero(sizes), ranks=self.ranks, settings=self.packing)
        flat = torch.zeros(int(ends[-1]), dtype=torch.float32, device=self.device)
        with torch.no_grad():
            for rows in plan.micro[self.rank]:
                micro = MicroBatch.on(self.device, build_micro(rows, dict(enumerate(answers))))
                logp_N, _ = self._forward(self.policy, micro, with_entropy=False)
                if rows:
                    flat[torch.cat([torch.arange(ends[a], ends[a + 1]) for row in rows for a in row]).to(self.device)] = logp_N
        free_gathered(self.policy)
        self.all_reduce(flat)
        found = flat.cpu().numpy()
        return [found[a:b] for a, b in zip(ends, ends[1:], strict=False)]
