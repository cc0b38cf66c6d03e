"""The table of metrics: every logged number has one row, and this file is the only one that spells a logged name.

Stages return typed records; `step_record` turns a step's into internal fields ("buffer.reward", "train.loss", "seconds_step"),
and `logged` maps fields to their names. A field without a row is an error of ours.
`python -m cluster.metrics > docs/metrics.md` writes the table out for people.

In a row whose field ends in `.*` the rest of the field (a verifier's, a source's name) stands for the `*` of the name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from learner.buffer_records import StepSummary
from learner.ledger import CLOSED, Ledger
from learner.records import StepStats

if TYPE_CHECKING:  # both import ray, which reading the table does not need
    from cluster.evaluate import EvalStats
    from cluster.loop_records import StepReport

Reduction = Literal["mean", "share", "sum", "min", "max", "last", "total"]


class Metric(NamedTuple):
    """One logged number.

    `reduction` says how a step's many values became one: mean, share (of those that are counted), sum over the step, min,
    max, last (the value at the step's end), or total (a sum since the run began).
    """

    field: str
    name: str
    unit: str
    reduction: Reduction
    meaning: str


M = Metric
TABLE: tuple[Metric, ...] = (
    M("buffer.reward", "reward", "reward", "mean", "reward of the answers of all groups of the step, dropped ones included"),
    M("buffer.informative", "informative", "1", "share", "groups whose rewards differ, of all groups of the step"),
    M("buffer.resp_len", "resp_len", "tokens", "mean", "length of the answers of all groups of the step, dropped ones included"),
    M("train.clipfrac", "clipfrac", "1", "share", "unmasked tokens (answers, at sequence level) whose clip binds"),
    # what was sampled
    M("buffer.rewards.*", "reward/*", "reward", "mean", "the same as `reward`, for the named reward alone"),
    M("buffer.reward_by_source.*", "source/reward/*", "reward", "mean", "the same as `reward`, for that source alone"),
    M("buffer.informative_by_source.*", "source/informative/*", "1", "share", "the same as `informative`, for that source alone"),
    M("buffer.all_right", "groups/all_right", "1", "share", "groups with every answer right: too easy to learn from"),
    M("buffer.all_wrong", "groups/all_wrong", "1", "share", "groups with every answer wrong: too hard to learn from"),
    M("buffer.equal", "groups/equal", "1", "share", "groups with equal rewards that are neither right nor wrong"),
    M("buffer.right", "answers/right", "1", "share", "answers with a reward of at least 1"),
    M("buffer.truncated", "answers/truncated", "1", "share", "answers that the generation budget cut off, by the engine's finish reason"),
    M("buffer.resp_len_right", "resp_len/right", "tokens", "mean", "length of right answers"),
    M("buffer.resp_len_wrong", "resp_len/wrong", "tokens", "mean", "length of wrong answers"),
    M("buffer.verifier_errors", "verifier/errors", "answers", "sum", "answers without a reward: verifier or gold answer is at fault"),
    M("buffer.verifier_timeouts", "verifier/timeouts", "answers", "sum", "answers that outlasted the verifier's deadline and scored 0"),
    # dynamic sampling
    M("buffer.scored", "buffer/scored", "groups", "sum", "groups of the step that came back with verdicts"),
    M("buffer.judged", "buffer/judged", "groups", "sum", "groups among them whose rewards are known"),
    M("buffer.dispatched", "buffer/dispatched", "groups", "sum", "groups of the step, whatever became of them"),
    M("buffer.unkept", "buffer/unkept", "groups", "sum", "groups resolved without being kept: what refill replaced"),
    M("buffer.failed.*", "buffer/failed/*", "groups", "sum", "groups that failed for that reason"),
    M("buffer.attempts_failed", "buffer/attempts_failed", "attempts", "sum", "attempts at a group that failed; most are repeated"),
    M("buffer.surplus", "buffer/surplus", "groups", "sum", "groups dispatched beyond need (`overprovision`), never trained"),
    M("buffer.fillers", "buffer/fillers", "groups", "sum", "masked groups that fill a batch up under `on_refill_limit = relax`"),
    M("buffer.kept", "buffer/kept", "groups", "last", "informative groups that wait for a batch"),
    M("buffer.in_flight", "buffer/in_flight", "groups", "last", "groups queued, generating or verifying"),
    M("buffer.refill_left", "buffer/refill_left", "groups", "last", "groups that may still be resolved unkept before refilling stops"),
    M("buffer.informative_rate", "buffer/informative_rate", "1", "last", "estimate of `informative` that sizes `overprovision`"),
    M("buffer.staleness.*", "staleness/groups/*", "groups", "sum", "groups of the batch whose oldest token is that many versions behind"),
    M("buffer.staleness_mean", "staleness/mean", "versions", "mean", "versions between a group's oldest token and the policy it trains"),
    M("staleness", "staleness/max", "versions", "max", "the same, largest of the batch; never above `max_staleness`"),
    # the learner
    M("train.loss", "train/loss", "loss", "mean", "loss of the optimiser steps taken; the three below are its parts without coefficients"),
    M("train.policy_loss", "train/policy_loss", "loss", "mean", "policy term"),
    M("train.kl_loss", "train/kl_loss", "nats", "mean", "KL term, where it is in the loss"),
    M("train.entropy_loss", "train/entropy_loss", "nats", "mean", "entropy term"),
    M("train.grad_norm", "train/grad_norm", "norm", "mean", "global gradient norm before clipping, over the optimiser steps taken"),
    M("train.grad_norm_max", "train/grad_norm_max", "norm", "max", "the same, the largest"),
    M("train.lr", "train/lr", "1", "last", "learning rate"),
    M("train.entropy", "train/entropy", "nats", "mean", "entropy of the policy over the full vocabulary, per unmasked token"),
    M("train.kl_ref", "train/kl_ref", "nats", "mean", "KL from the reference model per unmasked token, k3 estimate"),
    M("train.kl_old", "train/kl_old", "nats", "mean", "KL from the policy when the batch began, per unmasked token, k3 estimate"),
    M("train.kl_behav", "train/kl_behav", "nats", "mean", "KL from the policy and engine that sampled, per unmasked token, k3 estimate"),
    M("train.steps", "train/optimiser_steps", "steps", "sum", "optimiser steps of the batch, skipped ones included"),
    M("train.micro_batches", "train/micro_batches", "micro-batches", "sum", "micro-batches over all ranks"),
    M("train.groups", "train/groups", "groups", "sum", "groups of the batch"),
    M("train.groups_failed", "train/groups_failed", "groups", "sum", "groups of the batch none of whose optimiser steps was finite"),
    M("train.nonfinite", "train/nonfinite", "steps", "sum", "optimiser steps skipped because loss or gradient was not finite"),
    M("train.nonfinite_in_a_row", "train/nonfinite_in_a_row", "steps", "last", "the same in a row, as of now; too many stop the run"),
    M("train.empty", "train/empty", "steps", "sum", "optimiser steps skipped because every token was masked"),
    M("train.clipfrac_low", "clip/low", "1", "share", "`clipfrac`, the part below 1 - clip"),
    M("train.clipfrac_high", "clip/high", "1", "share", "`clipfrac`, the part above 1 + clip_high"),
    M("train.clipfrac_dual", "clip/dual", "1", "share", "`clipfrac`, the part that `dual_clip` bounds"),
    M("train.ratio_mean", "ratio/mean", "1", "mean", "probability ratio of the objective, per unmasked token"),
    M("train.ratio_min", "ratio/min", "1", "min", "the same, the smallest"),
    M("train.ratio_max", "ratio/max", "1", "max", "the same, the largest"),
    M("train.clamped", "ratio/clamped", "tokens", "sum", "tokens whose log-ratio lay beyond ±20 and was clamped"),
    # the critic; advantages, values and returns are those before the batch's first step, over its unmasked tokens
    M("train.critic.frozen", "critic/frozen", "1", "last", "1 while the value model is pre-trained and the policy stays as it is"),
    M("train.critic.loss", "critic/loss", "reward²", "mean", "the value's loss, ½ (V − R)², over its optimiser steps"),
    M("train.critic.explained_variance", "critic/explained_variance", "1", "last", "1 − Var(R − V) / Var(R)"),
    M("train.critic.grad_norm", "critic/grad_norm", "norm", "mean", "the value's gradient norm before clipping, over its optimiser steps"),
    M("train.critic.lr", "critic/lr", "1", "last", "learning rate of the value model"),
    M("train.critic.clipfrac", "critic/clipfrac", "1", "share", "unmasked tokens whose `value_clip` binds"),
    M("train.critic.value_mean", "critic/value_mean", "reward", "mean", "value V"),
    M("train.critic.return_mean", "critic/return_mean", "reward", "mean", "return R, the value's target"),
    M("train.critic.return_std", "critic/return_std", "reward", "last", "its standard deviation"),
    M("train.critic.advantage_mean", "advantage/mean", "reward", "mean", "advantage per token, before `adv_norm`"),
    M("train.critic.advantage_std", "advantage/std", "reward", "last", "its standard deviation"),
    M("train.critic.advantage_min", "advantage/min", "reward", "min", "the same, the smallest"),
    M("train.critic.advantage_max", "advantage/max", "reward", "max", "the same, the largest"),
    M("train.critic.lambda", "advantage/lambda", "1", "mean", "lambda of the policy's advantages, over the answers"),
    M("train.critic.nll", "nll/loss", "nats", "mean", "negative log-likelihood per token of right answers, before its coefficient"),
    M("train.critic.nll_share", "nll/share", "1", "mean", "its part of Σ |d loss / d log-probability| over tokens, it and the rest apart"),
    # engine against learner
    M("train.mismatch.mean_abs", "mismatch/mean", "nats", "mean", "|learner − engine| log-probability, before the batch's first step"),
    M("train.mismatch.max_abs", "mismatch/max", "nats", "max", "the same, the largest"),
    M("train.mismatch.kl", "mismatch/kl", "nats", "mean", "engine − learner: an estimate of KL(engine‖learner), k1"),
    M("train.mismatch.tokens", "mismatch/tokens", "tokens", "sum", "tokens that the three above were taken over"),
    M("train.mismatch_kl", "mismatch/kl_k3", "nats", "mean", "KL of the proximal policy from the sampling one, k3 estimate"),
    M("train.mismatch_min", "mismatch/weight_min", "1", "min", "exp(old − behav), before the correction, the smallest"),
    M("train.mismatch_max", "mismatch/weight_max", "1", "max", "the same, the largest"),
    M("train.mismatch_removed", "mismatch/removed", "1", "share", "part of the mismatch weight that the correction took away"),
    M("probe_mean_abs", "mismatch/probe_mean", "nats", "mean", "|learner − engine| on the probe at the run's start"),
    M("probe_max_abs", "mismatch/probe_max", "nats", "max", "the same, the largest"),
    # the books: totals since the run began; dispatched = trained + uninformative + failed + surplus + kept + in flight
    M("ledger.groups_dispatched", "ledger/groups_dispatched", "groups", "total", "groups ever dispatched"),
    M("ledger.groups_trained", "ledger/groups_trained", "groups", "total", "groups that were trained"),
    M("ledger.groups_uninformative", "ledger/groups_uninformative", "groups", "total", "groups dropped for lack of reward spread"),
    M("ledger.groups_failed", "ledger/groups_failed", "groups", "total", "groups that failed, for whatever reason"),
    M("ledger.groups_surplus", "ledger/groups_surplus", "groups", "total", "groups dispatched beyond need"),
    M("ledger.groups_kept", "ledger/groups_kept", "groups", "last", "groups kept whose batch has not committed"),
    M("ledger.groups_in_flight", "ledger/groups_in_flight", "groups", "last", "groups queued, generating or verifying"),
    M("ledger.tokens_received", "ledger/tokens_received", "tokens", "total", "generated tokens ever received; the sum of the tokens below"),
    M("ledger.tokens_trained", "ledger/tokens_trained", "tokens", "total", "tokens that a loss counted"),
    M("ledger.tokens_masked_overlong", "ledger/tokens_masked_overlong", "tokens", "total", "tokens of trained groups left out as overlong"),
    M("ledger.tokens_masked_error", "ledger/tokens_masked_error", "tokens", "total", "the same, for a verifier's error"),
    M("ledger.tokens_masked_mismatch", "ledger/tokens_masked_mismatch", "tokens", "total", "the same, by the mismatch correction"),
    M("ledger.tokens_uninformative", "ledger/tokens_uninformative", "tokens", "total", "tokens of dropped groups"),
    M("ledger.tokens_failed", "ledger/tokens_failed", "tokens", "total", "tokens of failed groups"),
    M("ledger.tokens_surplus", "ledger/tokens_surplus", "tokens", "total", "tokens of surplus groups"),
    M("ledger.tokens_lost_attempt", "ledger/tokens_lost_attempt", "tokens", "total", "tokens of attempts that did not count"),
    M("ledger.tokens_held", "ledger/tokens_held", "tokens", "last", "tokens of kept groups"),
    # tokens of this step
    M("buffer.tokens", "tokens/generated", "tokens", "sum", "tokens of the groups of the step"),
    M("train.tokens", "tokens/trained", "tokens", "sum", "tokens that the batch's loss counts"),
    M("train.masked_tokens.*", "tokens/masked/*", "tokens", "sum", "tokens of the batch left out of the loss for that reason"),
    M("tokens_per_second", "tokens/per_second", "tokens/s", "mean", "generated tokens over the step's wall-clock time"),
    # time
    M("seconds_step", "time/step", "s", "sum", "wall-clock time of the step, from the last one's end"),
    M("seconds_generate_wait", "time/wait_generate", "s", "sum", "learner idle, waiting for a batch"),
    M("buffer.refill_wait_s", "time/wait_refill", "s", "sum", "no batch, and only refills were in flight"),
    M("buffer.blocked_by_oldest_s", "time/wait_oldest", "s", "sum", "enough groups were kept, and an earlier one was unresolved"),
    M("seconds_engines_idle", "time/wait_engines", "s", "sum", "an engine without a group, mean over the engines; evaluation left out"),
    M("seconds_train", "time/train", "s", "sum", "the learner's work on the batch, as the loop sees it"),
    M("train.seconds.total", "time/train_total", "s", "sum", "the learner's work on the batch, as the learner sees it; its parts follow"),
    M("train.seconds.prepare", "time/train_prepare", "s", "sum", "packing"),
    M("train.seconds.old", "time/train_old", "s", "sum", "log-probabilities under `old`, where that is a pass of its own"),
    M("train.seconds.reference", "time/train_reference", "s", "sum", "log-probabilities of the reference model"),
    M("train.seconds.values", "time/train_values", "s", "sum", "values, and the advantages that follow, where there is a critic"),
    M("train.seconds.value", "time/train_value", "s", "sum", "forward and backward passes of the value model"),
    M("train.seconds.advantages", "time/train_advantages", "s", "sum", "advantages"),
    M("train.seconds.forward_backward", "time/train_forward_backward", "s", "sum", "forward and backward passes"),
    M("train.seconds.optimiser", "time/train_optimiser", "s", "sum", "gradient norm, clipping and AdamW"),
    M("seconds_sync", "time/publish", "s", "sum", "the loop held up by the transfer of weights"),
    M("seconds_eval", "time/eval", "s", "sum", "evaluation"),
    M("seconds_checkpoint", "time/checkpoint", "s", "sum", "writing a checkpoint"),
    M("use.window", "time/between_reports", "s", "sum", "wall-clock time since the step before was told; within it:"),
    M("use.engines", "time/engines_busy", "s", "sum", "at least one engine generated"),
    M("use.verifiers", "time/verifiers_busy", "s", "sum", "at least one verifier scored"),
    M("use.learner", "time/learner_busy", "s", "sum", "the learner took a batch in, trained, or wrote a checkpoint"),
    M("use.transfer", "time/transfer_busy", "s", "sum", "weights were on their way"),
    M("use.idle", "time/idle", "s", "sum", "nothing of these: what the loop itself and its messages cost"),
    M("seconds_elapsed", "time/elapsed", "s", "total", "wall-clock time since the run, or its resumption, began"),
    M("transfer.seconds", "sync/seconds", "s", "sum", "a transfer of weights, from the shards to every engine's acknowledgement"),
    M("transfer.seconds_publish", "sync/seconds_publish", "s", "sum", "the learner's part of it"),
    M("transfer.seconds_drained", "sync/seconds_drained", "s", "max", "engines ending their answers before it (`weight_update = drained`)"),
    M("transfer.seconds_paused", "sync/seconds_paused", "s", "max", "the engines' pause for it, the longest"),
    M("transfer.size", "sync/bytes", "B", "sum", "bytes of it, to one engine"),
    M("transfer.sent", "sync/bytes_sent", "B", "sum", "bytes sent to engines on other hosts than the learner's, together"),
    M("buffer.seconds_generate", "time/group_generate", "s", "mean", "generation of a group, from its dispatch in the engine"),
    M("buffer.seconds_verify", "time/group_verify", "s", "mean", "verification of a group, summed over its answers"),
    # evaluation on held-out prompts
    M("eval.greedy", "eval/greedy", "1", "share", "held-out prompts answered rightly by greedy decoding"),
    M("eval.resp_len", "eval/resp_len", "tokens", "mean", "length of the greedy answers"),
    M("eval.truncated", "eval/truncated", "1", "share", "greedy answers that the budget cut off"),
    M("eval.prompts", "eval/prompts", "prompts", "sum", "held-out prompts asked"),
    M("eval.k", "eval/k", "answers", "last", "sampled answers per held-out prompt"),
    M("eval.avg_at_k", "eval/avg_at_k", "1", "mean", "right answers among k sampled ones"),
    M("eval.pass_at_k", "eval/pass_at_k", "1", "share", "prompts with at least one right answer among k"),
    M("eval.maj_at_k", "eval/maj_at_k", "1", "share", "prompts whose most frequent answer among k is right"),
    # where the run is
    M("version", "run/version", "batches", "last", "policy version: batches committed"),
    M("epoch", "run/epoch", "epochs", "last", "passes begun over the prompts when the batch's last group was drawn"),
    M("prompts_retired", "run/prompts_retired", "prompts", "total", "prompts retired because they stayed solved (`retire_after`)"),
    M("prompts_dropped", "run/prompts_dropped", "prompts", "total", "prompts dropped because they are longer than `max_prompt_tokens`"),
    M("resident_gb", "run/resident_gb", "GiB", "last", "resident memory of all processes of the run on this machine"),
)

_EXACT = {m.field: m for m in TABLE if not m.field.endswith(".*")}
_PREFIX = {m.field[:-1]: m for m in TABLE if m.field.endswith(".*")}

HEADLINE = ("reward", "informative", "resp_len", "clipfrac")
"""What a display shows first, in this order."""


def row(field: str) -> Metric:
    """The row of an internal field."""
    if field in _EXACT:
        return _EXACT[field]
    for prefix, metric in _PREFIX.items():
        if field.startswith(prefix):
            return metric
    raise AssertionError(f"the field {field!r} has no row in cluster/metrics.py")


def name(field: str) -> str:
    """The logged name of an internal field. AssertionError when it has no row."""
    metric = row(field)
    return metric.name.replace("*", field[len(metric.field) - 1 :]) if metric.field.endswith(".*") else metric.name


def logged(record: Mapping[str, float | None]) -> dict[str, float]:
    """Internal fields -> logged names, in the table's order; None and NaN, which say "nothing to measure", are left out.

    AssertionError for a field without a row.
    """
    order = {m: i for i, m in enumerate(TABLE)}
    known = [(order[row(f)], name(f), v) for f, v in record.items()]
    return {n: _number(v) for _, n, v in sorted(known, key=lambda item: item[:2]) if v is not None and not math.isnan(v)}


def _number(value: Any) -> float:
    return int(value) if isinstance(value, (bool, int, np.integer)) else float(value)


# -- records -> fields ------------------------------------------------------------------------------------------------


def flat(prefix: str, record: Any) -> dict[str, float]:
    """The numbers of a dataclass as fields: "prefix.field", and "prefix.field.key" for a mapping of numbers.

    None, NaN and whatever is no number are left out.
    """
    found: dict[str, float] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        pairs: Any = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, number in pairs:
            if isinstance(number, (int, float, np.number)) and not math.isnan(number):
                found[f"{prefix}.{field.name}{'.' if key != '' else ''}{key}"] = _number(number)
    return found


def buffer_record(summary: StepSummary) -> dict[str, float]:
    """Fields of what was sampled since the last step."""
    found = flat("buffer", summary)
    if groups := sum(summary.staleness.values()):
        found["buffer.staleness_mean"] = sum(s * n for s, n in summary.staleness.items()) / groups
        found["staleness"] = max(summary.staleness)
    return found


_SUMMED = ("policy_loss", "kl_loss", "entropy_loss")  # in StepStats.stats these are sums over the optimiser steps
_ELSEWHERE = ("loss", "tokens", "answers", "mismatch_abs", "mismatch_masked")  # in StepStats.stats, and told by other fields


def train_record(stats: StepStats) -> dict[str, float]:
    """Fields of what the learner did with a batch: the optimiser steps reduced as the table says."""
    taken = [s for s in stats.steps if not s.skipped]
    judged = [s.critic for s in (*stats.steps, *stats.value_steps) if s.critic and s.skipped != "nonfinite"]
    found = {f"train.{k}": v for k, v in stats.stats.items() if k not in _ELSEWHERE and v is not None}
    found |= {f"train.{k}": float(stats.stats[k] or 0) / max(len(taken), 1) for k in _SUMMED if k in stats.stats}
    found |= flat("train.mismatch", stats.mismatch) if stats.mismatch.tokens else {}
    found |= {f"train.seconds.{k}": v for k, v in stats.seconds.items()}
    found |= {f"train.masked_tokens.{k}": v for k, v in stats.masked_tokens.items()}
    found |= {f"train.{k}": getattr(stats, k) for k in ("tokens", "groups", "nonfinite", "nonfinite_in_a_row", "empty")}
    found |= {
        "train.groups_failed": len(stats.failed),
        "train.steps": len(stats.steps),
        "train.micro_batches": sum(s.micro_batches for s in stats.steps),
    }
    found |= {f"train.critic.{k}": v for k, v in stats.critic.items() if v is not None}
    for key in sorted({key for critic in judged for key in critic}):
        values = [v for critic in judged if (v := critic.get(key)) is not None]
        found[f"train.critic.{key}"] = values[-1] if key == "lr" else math.fsum(values) / len(values)
    if stats.steps:
        found["train.lr"] = stats.steps[-1].lr
    if taken:
        found["train.loss"] = math.fsum(s.loss for s in taken) / len(taken)
        found["train.grad_norm"] = math.fsum(s.grad_norm for s in taken) / len(taken)
        found["train.grad_norm_max"] = max(s.grad_norm for s in taken)
    return found


def ledger_record(ledger: Ledger) -> dict[str, float]:
    """Fields of the books as they stand."""
    tokens = {f"ledger.tokens_{account.replace('(', '_').rstrip(')')}": n for account, n in ledger.tokens.items()}
    return {
        "ledger.groups_dispatched": ledger.dispatched,
        **{f"ledger.groups_{state}": ledger.closed(state) for state in CLOSED},
        "ledger.groups_kept": ledger.kept,
        "ledger.groups_in_flight": ledger.in_flight,
        "ledger.tokens_received": ledger.received,
        "ledger.tokens_held": ledger.held,
        **tokens,
    }


def step_record(report: StepReport) -> dict[str, float]:
    """Fields of everything that the loop reports of one step, and of the books at its end."""
    times = report.times
    found = buffer_record(report.summary) | train_record(report.train) | ledger_record(report.ledger)
    found |= {
        "version": report.step,
        "tokens_per_second": report.summary.tokens / times.total if times.total > 0 else math.nan,
        "seconds_step": times.total,
        "seconds_generate_wait": times.wait,
        "seconds_engines_idle": times.engines_idle,
        "seconds_train": times.train,
        "seconds_sync": times.publish,
        "seconds_eval": times.evaluate,
        "seconds_checkpoint": times.checkpoint,
        "epoch": report.prompts.epoch,
        "prompts_retired": report.prompts.retired,
        "prompts_dropped": report.prompts.dropped,
    }
    found |= flat("use", report.use)
    if report.transfer is not None:
        found |= {k: v for k, v in flat("transfer", report.transfer).items() if k != "transfer.version"}
    return found | (eval_record(report.evaluation) if report.evaluation is not None else {})


def eval_record(stats: EvalStats) -> dict[str, float]:
    """Fields of an evaluation."""
    found = flat("eval", stats)
    return found if stats.k else {k: v for k, v in found.items() if k != "eval.k"}


# -- docs -------------------------------------------------------------------------------------------------------------


def document() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every number that a run logs, under the names that `metrics.jsonl`, wandb and the display use. This page is written by",
        "`python -m cluster.metrics > docs/metrics.md` from the table in `cluster/metrics.py`.",
        "",
        "A number is left out of a step in which there was nothing to measure (`resp_len/right` without a right answer). The",
        "reduction says how a step's many values became one: *share* is among those that are counted, *sum* is over the step,",
        "*last* is the value at the step's end, *total* adds up since the run began. `*` stands for a name.",
        "",
        "The groups of a step are those after the last batch's end, in the order of their dispatch, up to the end of its own",
        "batch: trained, dropped and failed ones. So no number of theirs depends on who finished first, or on where a run was cut in two.",
        "",
        "| name | unit | reduction | meaning |",
        "|---|---|---|---|",
    ]
    cells = ((f"`{m.name}`", m.unit, m.reduction, m.meaning.replace("|", "\\|")) for m in TABLE)
    return "\n".join([*lines, *("| " + " | ".join(c) + " |" for c in cells)]) + "\n"


if __name__ == "__main__":
    print(document(), end="")
