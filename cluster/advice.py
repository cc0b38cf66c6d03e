"""Advice: what the logged metrics say about a run that does not learn as it might, with the evidence and the flag to try.

Every rule is a pure function of the series so far and a few facts of the config. "Recent" is the mean over the last few steps
in which a number was logged; a rule whose numbers are not there yet says nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.config import RunConfig, resolved_objective
from cluster.metrics import name
from learner.variants import inert_clip

RECENT = 5
"""Steps over which a recent value is averaged."""
TREND = 20
"""Steps over which a trend is seen: the mean of their last RECENT against that of their first."""
HOLDS = 3
"""Steps in a row that a rule must hold before it is said."""
REPEAT = 50
"""Steps after which a rule that holds is said again."""

FLAT = 0.01  # a reward that rose by less over TREND steps did not rise
FEW_INFORMATIVE = 0.1
LONGER = 1.15  # resp_len against TREND steps ago
CLIP_TINY, CLIP_LARGE = 1e-4, 0.6
EXPLAINED = 0.1  # explained variance of the values, below which they say next to nothing
ENTROPY_LEFT, SOLVED = 0.1, 0.95  # share of the first entropy; share of right answers at which a low entropy is no loss
MISMATCH_GROWN = 3.0
MISMATCH_FLOOR = {"float32": 1e-3}  # nats; below it rounding explains the difference, as it does in 16 bits below the next
MISMATCH_FLOOR_16_BITS = 0.05
TRUNCATED = 0.2
VERIFIER_ERRORS, VERIFIER_TIMEOUTS = 0.01, 0.05
LEARNER_WAITS, LEARNER_WAITS_SYNCHRONOUS = 0.5, 0.85
LEARNER_WORKS, LEARNER_WORKS_SYNCHRONOUS = 0.9, 0.8


@dataclass(frozen=True)
class Facts:
    """What the rules need to know of the config. `clip_inert`: every ratio is 1 when a step is taken, so no clip can bind.

    `whitened`: advantages are divided by their spread over the batch.
    """

    clip_inert: bool
    whitened: bool
    loss_agg: str
    clip_raised: bool
    overlong: str
    mismatch: str
    filter_groups: bool
    group_size: int
    batch_size: int
    max_tokens: int
    max_staleness: int
    engines: int
    learner_ranks: int
    engine_dtype: str

    @classmethod
    def of(cls, cfg: RunConfig) -> Facts:
        """Of a config, with its objective as it is trained."""
        objective = resolved_objective(cfg)
        no_ratio = objective.policy_loss == "reinforce"
        return cls(
            clip_inert=no_ratio or inert_clip(objective, cfg.optim.minibatches, cfg.optim.epochs),
            whitened=objective.adv_norm == "batch",
            loss_agg=objective.loss_agg,
            clip_raised=objective.clip_high is not None and objective.clip_high > objective.clip,
            overlong=objective.overlong,
            mismatch=objective.mismatch,
            filter_groups=objective.filter_groups,
            group_size=cfg.rollout.group_size,
            batch_size=cfg.buffer.batch_size,
            max_tokens=cfg.rollout.max_tokens,
            max_staleness=cfg.rollout.max_staleness,
            engines=cfg.rollout.engines,
            learner_ranks=cfg.model.learner_ranks,
            engine_dtype=cfg.rollout.engine_dtype,
        )


class Advice(NamedTuple):
    """One message: the rule that holds, the numbers that show it, and the flag to try."""

    rule: str
    step: int
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"advice: {self.evidence}; try {self.remedy}"


class Series:
    """The logged numbers of a run that rules ask for, looked up by field: the first RECENT of each, and the last TREND."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """One step's numbers by logged name; None counts as not logged."""
        for key, value in metrics.items():
            if isinstance(value, (int, float)):
                self._last.setdefault(key, deque(maxlen=TREND)).append(float(value))
                if len(first := self._first.setdefault(key, [])) < RECENT:
                    first.append(float(value))

    def last(self, field: str) -> list[float]:
        """The last values of a field, at most TREND."""
        return list(self._last.get(name(field), ()))

    def recent(self, field: str, count: int = RECENT) -> float | None:
        """Mean of the last `count` values; None while there are fewer."""
        return _mean(self.last(field)[-count:], count)

    def first(self, field: str) -> float | None:
        """Mean of the first RECENT values."""
        return _mean(self._first.get(name(field), []), RECENT)

    def before(self, field: str) -> float | None:
        """Mean of the RECENT values with which the last TREND begin."""
        values = self.last(field)
        return _mean(values[:RECENT], RECENT) if len(values) == TREND else None

    def middle(self, field: str) -> float | None:
        """Mean of the last TREND values but for the first and last RECENT."""
        values = self.last(field)
        return _mean(values[RECENT:-RECENT], 1) if len(values) == TREND else None

    def flat(self) -> bool:
        """Whether the reward did not rise over the last TREND steps."""
        before, now = self.before("buffer.reward"), self.recent("buffer.reward")
        return before is not None and now is not None and now - before < FLAT


Finding = tuple[str, str]
"""(evidence, remedy)"""
Rule = Callable[[Series, Facts], Finding | None]


class Adviser:
    """Takes every step's metrics; `step` returns what is to be said at that step, which is seldom anything."""

    def __init__(self, facts: Facts, history: Iterable[Mapping[str, Any]] = ()) -> None:
        """`history` holds the lines of metrics.jsonl of the steps before a resumption."""
        self.facts = facts
        self._series = Series()
        self._held: dict[str, int] = {}
        self._said: dict[str, int] = {}
        for row in history:
            self.step(int(row["step"]), row)

    def step(self, step: int, metrics: Mapping[str, float]) -> list[Advice]:
        """The advice of step `step`: of each rule that has held for HOLDS steps, and was not said in the last REPEAT."""
        self._series.add({key: value for key, value in metrics.items() if key != "step"})
        said = []
        for rule, judge in RULES.items():
            found = judge(self._series, self.facts)
            self._held[rule] = self._held.get(rule, 0) + 1 if found else 0
            due = rule not in self._said or step - self._said[rule] >= REPEAT
            if found and due and self._held[rule] >= HOLDS:
                self._said[rule] = step
                said.append(Advice(rule, step, *found))
        return said


# -- rules --------------------------------------------------------------------------------------------------------------


def too_easy(series: Series, facts: Facts) -> Finding | None:
    """Few groups are informative, most because every answer is right."""
    return _uninformative(series, facts, "buffer.all_right")


def too_hard(series: Series, facts: Facts) -> Finding | None:
    """Few groups are informative, most because every answer is wrong."""
    return _uninformative(series, facts, "buffer.all_wrong")


def same_reward(series: Series, facts: Facts) -> Finding | None:
    """Few groups are informative, most because the reward tells no answer from another."""
    return _uninformative(series, facts, "buffer.equal")


_KINDS = {
    "buffer.all_right": (
        "in most every answer is right: the prompts are too easy",
        "harder prompts (the options or the mixture of data.sources)",
    ),
    "buffer.all_wrong": (
        "in most every answer is wrong: the prompts are too hard",
        "easier prompts (data.sources), a supervised start (--warmup_steps) or more answers per prompt (--group_size {twice})",
    ),
    "buffer.equal": (
        "in most all answers have one reward that is neither right nor wrong",
        "another verifier or other --reward_weights: this reward does not tell answers apart",
    ),
}


def _uninformative(series: Series, facts: Facts, kind: str) -> Finding | None:
    informative = series.recent("buffer.informative")
    shares = {key: series.recent(key) or 0.0 for key in _KINDS}
    if informative is None or informative >= FEW_INFORMATIVE or max(shares, key=lambda key: shares[key]) != kind:
        return None
    why, remedy = _KINDS[kind]
    evidence = f"{name('buffer.informative')} is {informative:.2f} ({name(kind)} {shares[kind]:.2f}): {why}"
    return evidence, remedy.format(twice=2 * facts.group_size)


def length_bias(series: Series, facts: Facts) -> Finding | None:
    """Answers grow steadily while the reward does not: the length bias of averaging each answer over its own length."""
    before, middle, now = (pick("buffer.resp_len") for pick in (series.before, series.middle, series.recent))
    if before is None or middle is None or now is None or not series.flat():
        return None
    if now < LONGER * before or not before < middle < now:
        return None
    reward = f"{name('buffer.reward')} went from {series.before('buffer.reward'):.3f} to {series.recent('buffer.reward'):.3f}"
    grew = f"{name('buffer.resp_len')} grew from {before:.0f} to {now:.0f} tokens in {TREND} steps"
    evidence = f"{grew} while {reward}: the length bias at work"
    if facts.loss_agg != "seq-mean-token-sum-norm":
        return evidence, f"--loss_agg seq-mean-token-sum-norm in place of {facts.loss_agg} (Dr. GRPO: --variant dr_grpo)"
    return evidence, f"--overlong penalty --overlong_cache {max(facts.max_tokens // 5, 1)}"


def clip_tiny(series: Series, facts: Facts) -> Finding | None:
    """No clip binds, though it could, and the reward does not rise."""
    share = series.recent("train.clipfrac", TREND)
    if facts.clip_inert or share is None or share >= CLIP_TINY or not series.flat():
        return None
    evidence = f"{name('train.clipfrac')} is {share:.1g} and {name('buffer.reward')} does not rise: the updates are tiny"
    return evidence, "a higher learning rate (--lr), threefold at first"


def clip_large(series: Series, facts: Facts) -> Finding | None:
    """Most tokens are clipped: the policy moves too fast for the clip range."""
    share = series.recent("train.clipfrac")
    if facts.clip_inert or share is None or share <= CLIP_LARGE:
        return None
    return (
        f"{name('train.clipfrac')} is {share:.2f}: the policy moves too fast for the clip range",
        "a lower learning rate (--lr), a third at first, or fewer optimiser steps a batch (--minibatches, --epochs)",
    )


def entropy_collapse(series: Series, facts: Facts) -> Finding | None:
    """The policy's entropy is nearly gone while answers are still wrong."""
    start, now = series.first("train.entropy"), series.recent("train.entropy")
    right = series.recent("buffer.right")
    if start is None or now is None or now >= ENTROPY_LEFT * start or (right is not None and right >= SOLVED):
        return None
    evidence = f"{name('train.entropy')} fell from {start:.3g} to {now:.3g} nats: exploration stops"
    if not facts.clip_inert and not facts.clip_raised:
        return evidence, "--clip_high 0.28, which lets rare tokens grow"
    return evidence, "--entropy_coef 0.001 or a lower --lr"


def mismatch_growing(series: Series, facts: Facts) -> Finding | None:
    """Engine and learner disagree ever more about the log-probabilities of what was sampled."""
    start, now = series.first("train.mismatch.mean_abs"), series.recent("train.mismatch.mean_abs")
    floor = MISMATCH_FLOOR.get(facts.engine_dtype, MISMATCH_FLOOR_16_BITS) if facts.max_staleness == 0 else MISMATCH_FLOOR_16_BITS
    if start is None or now is None or now <= max(MISMATCH_GROWN * start, floor):
        return None
    evidence = f"{name('train.mismatch.mean_abs')} grew from {start:.2g} to {now:.2g} nats: engine and learner drift apart"
    if facts.mismatch == "none":
        return evidence, "--mismatch tis"
    if facts.max_staleness > 0:
        return evidence, f"--max_staleness {facts.max_staleness - 1} or --kv_on_update recompute"
    return evidence, "--engine_dtype float32, or a lower --lr"


def critic_lost(series: Series, facts: Facts) -> Finding | None:
    """The value model, once trained, no longer says which answers will be right, and the policy follows its errors."""
    explained, frozen, right = (series.recent(f) for f in ("train.critic.explained_variance", "train.critic.frozen", "buffer.right"))
    if explained is None or explained >= EXPLAINED or frozen or not series.flat() or (right is not None and right >= SOLVED):
        return None
    numbers = f"{name('train.critic.explained_variance')} is {explained:.2f} and {name('buffer.reward')} does not rise"
    other = ", or --adv_norm none" if facts.whitened else ""
    return f"{numbers}: the policy outruns its critic", f"a lower learning rate (--lr), a third at first{other}"


def truncated(series: Series, facts: Facts) -> Finding | None:
    """The generation budget cuts many answers off."""
    share = series.recent("buffer.truncated")
    if share is None or share <= TRUNCATED:
        return None
    kind = "" if facts.overlong != "score" else ", or --overlong mask, so that they are not scored as wrong"
    return f"{share:.0%} of the answers are cut off at max_tokens = {facts.max_tokens}", f"--max_tokens {2 * facts.max_tokens}{kind}"


def verifier_errors(series: Series, facts: Facts) -> Finding | None:
    """Answers without a reward: the verifier or the gold answers are at fault."""
    share = _per_answer(series, facts, "buffer.verifier_errors")
    if share is None or share <= VERIFIER_ERRORS:
        return None
    evidence = f"{share:.1%} of the answers have no reward ({name('buffer.verifier_errors')}): the verifier's fault or the gold answers'"
    return evidence, "winnow check RECIPE, which scores the gold answers, and another verifier for that source"


def verifier_timeouts(series: Series, facts: Facts) -> Finding | None:
    """Many answers outlast the verifier's deadline and score 0 for it."""
    share = _per_answer(series, facts, "buffer.verifier_timeouts")
    if share is None or share <= VERIFIER_TIMEOUTS:
        return None
    evidence = f"{share:.1%} of the answers outlasted the verifier's deadline and scored 0 ({name('buffer.verifier_timeouts')})"
    return evidence, "a longer --verify_timeout, or more --verifier_processes"


def learner_starves(series: Series, facts: Facts) -> Finding | None:
    """The learner waits for batches most of the time."""
    wait = _share_of_step(series, "seconds_generate_wait")
    synchronous = facts.max_staleness == 0
    if wait is None or wait <= (LEARNER_WAITS_SYNCHRONOUS if synchronous else LEARNER_WAITS):
        return None
    evidence = f"the learner waits for a batch {wait:.0%} of the time ({name('seconds_generate_wait')})"
    if synchronous:
        return evidence, f"--max_staleness 1, which lets generation and training overlap, or --engines {facts.engines + 1}"
    oldest, refill = (_share_of_step(series, field) or 0.0 for field in ("buffer.blocked_by_oldest_s", "buffer.refill_wait_s"))
    if oldest > wait / 2:
        evidence += f", mostly for one long group ({name('buffer.blocked_by_oldest_s')})"
        return evidence, f"--max_staleness {facts.max_staleness + 1}"
    if refill > wait / 2:
        evidence += f", mostly for refills ({name('buffer.refill_wait_s')})"
        return evidence, "prompts nearer to what the model can do (data.sources)"
    return evidence, f"--engines {facts.engines + 1}"


def generators_starve(series: Series, facts: Facts) -> Finding | None:
    """The learner is at work most of the time, and the engines have nothing to generate meanwhile."""
    work, in_flight = _share_of_step(series, "seconds_train"), series.recent("buffer.in_flight")
    synchronous = facts.max_staleness == 0
    if work is None or work <= (LEARNER_WORKS_SYNCHRONOUS if synchronous else LEARNER_WORKS):
        return None
    if in_flight is None or in_flight > 0.1 * facts.batch_size:
        return None
    evidence = f"the engines wait for the learner, which is at work {work:.0%} of the time ({name('seconds_train')})"
    more = f"--learner_ranks {2 * facts.learner_ranks}"
    return evidence, f"--max_staleness 1, or {more}" if synchronous else f"{more}, or fewer --engines"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        too_easy, too_hard, same_reward, length_bias, clip_tiny, clip_large, entropy_collapse, mismatch_growing, critic_lost, truncated,
        verifier_errors, verifier_timeouts, learner_starves, generators_starve,
    )
}  # fmt: skip
"""Every rule by its name, which advice.jsonl has."""


def _mean(values: list[float], least: int) -> float | None:
    return sum(values) / len(values) if len(values) >= least else None


def _per_answer(series: Series, facts: Facts, field: str) -> float | None:
    """Recent count per answer that was scored."""
    count, groups = series.recent(field), series.recent("buffer.scored")
    return None if count is None or not groups else count / (groups * facts.group_size)


def _share_of_step(series: Series, field: str) -> float | None:
    """Recent seconds of `field` per second of a step, evaluation left out (and checkpoints, which lie between two steps)."""
    part, whole = series.recent(field, 2 * RECENT), series.recent("seconds_step", 2 * RECENT)
    if part is None or whole is None:
        return None
    rest = series.recent("seconds_eval", 2 * RECENT) or 0.0
    return part / (whole - rest) if whole > rest else None
