"""What the loop reports of a step."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.evaluate import EvalStats
from cluster.timeline import Use
from cluster.weights import TransferStats
from learner.buffer_records import CutBatch, StepSummary
from learner.ledger import Ledger
from learner.records import StepStats


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step by what the loop did; `checkpoint` is the one written before the step began.

    `engines_idle`: an engine without a group, mean over the engines, from the step's start to its evaluation.
    """

    wait: float
    train: float
    publish: float
    evaluate: float
    checkpoint: float
    engines_idle: float
    total: float


@dataclass(frozen=True)
class PromptTotals:
    """Passes begun over the prompts when the batch's last group was drawn; rows retired, and dropped as overlong, so far."""

    epoch: int
    retired: int
    dropped: int


@dataclass(frozen=True)
class StepReport:
    """All that is known of one step."""

    step: int
    batch: CutBatch
    summary: StepSummary
    train: StepStats
    transfer: TransferStats | None
    evaluation: EvalStats | None
    times: StepTimes
    prompts: PromptTotals
    use: Use  # since the step before was reported
    ledger: Ledger  # the books at its end, before the next groups were dispatched
