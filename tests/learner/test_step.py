"""Training a batch: the loss against plain transformers, what is left out, what is skipped, and two ranks against one.

The two-rank test starts two processes over gloo, with micro-batches and dummies that differ from those of one rank.
Not covered: the formulas of every objective flag (test_objective.py), GPUs and nccl (tests/gpu), a rank that dies.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from learner.pack import Answer
from learner.records import Batch

pytestmark = pytest.mark.usefixtures("one_rank")


def weights_of(learner: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner.weights()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def all_answers(groups: Any) -> list[Answer]:
    return [Answer.of(g.group.prompt, c) for g in groups for c in g.group.completions]


def with_logp(group: Any, logps: list[np.ndarray]) -> Any:
    """The same group, with other engine log-probabilities."""
    pairs = zip(group.group.completions, logps, strict=True)
    done = tuple(dataclasses.replace(c, logp_T=np.asarray(p, dtype=np.float32)) for c, p in pairs)
    return dataclasses.replace(group, group=dataclasses.replace(group.group, completions=done))


def plain_loss(folder: Path, groups: Any, agg: str, temperature: float) -> tuple[float, float]:
    """GRPO on fresh data, with transformers alone: −Σ w·A·exp(new − sg new) over unpacked answers. The loss, and its gradient's norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lengths = [len(c.tokens_T) for g in groups for c in g.group.completions]
    total = torch.zeros(())
    for group in groups:
        r = group.rewards_G
        advantages = (r - r.mean()) / r.std() if r.std() > 0 else 0 * r
        for done, advantage in zip(group.group.completions, advantages, strict=True):
            ids = torch.tensor(np.concatenate([group.group.prompt.tokens_P, done.tokens_T]).astype(np.int64))[None]
            logp = torch.log_softmax(model(ids).logits[0] / temperature, -1)
            first = len(group.group.prompt.tokens_P)
            new = logp[first - 1 : -1].gather(-1, ids[0, first:, None]).squeeze(-1)
            weight = 1 / sum(lengths) if agg == "token-mean" else 1 / (len(lengths) * len(new))
            total = total - weight * advantage * torch.exp(new - new.detach()).sum()
    total.backward()
    return total.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("micro_tokens", [20, 8192])
def test_loss_and_gradient_are_the_formulas_for_any_micro_batches(tiny: Path, making: ModuleType, agg: str, micro_tokens: int) -> None:
    groups = [making.make_group(i) for i in range(3)]
    learner = making.make_learner(
        tiny, objective=dict(kl_coef=0, loss_agg=agg), config=dict(micro_tokens=micro_tokens), temperature=0.8, optim=dict(grad_clip=0)
    )
    stats = learner.train_batch(making.make_batch(groups))
    loss, norm = plain_loss(tiny, groups, agg, 0.8)
    (step,) = stats.steps
    assert step.loss == pytest.approx(loss, abs=1e-6) and step.grad_norm == pytest.approx(norm, rel=1e-5)
    assert (step.micro_batches > 4) == (micro_tokens == 20)
    assert step.tokens == sum(g.group.tokens for g in groups) and step.answers == 12


def test_training_raises_the_probability_of_rewarded_answers(tiny: Path, making: ModuleType) -> None:
    groups = [making.make_group(i, rewards=[1, 0, 0, 1]) for i in range(3)]
    learner = making.make_learner(tiny, objective=dict(kl_coef=0))
    answers = all_answers(groups)
    before = [p.mean() for p in learner.logprobs(answers)]
    for index in range(3):
        learner.train_batch(making.make_batch(groups, index))
    gain = np.array([p.mean() for p in learner.logprobs(answers)]) - before
    right = np.concatenate([g.rewards_G for g in groups]) > 0
    assert gain[right].mean() > 0.3 and gain[~right].mean() < -0.3


def test_random_numbers_begin_at_the_seed_whatever_the_process_has_drawn(tiny: Path, making: ModuleType) -> None:
    states = []
    for drawn, seed in ((1, 5), (2, 5), (1, 6)):
        torch.manual_seed(drawn)
        making.make_learner(tiny, seed=seed)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_old_is_the_policy_when_the_batch_began(tiny: Path, making: ModuleType) -> None:
    learner = making.make_learner(tiny, optim=dict(minibatches=2, epochs=2, lr=1e-2), objective=dict(kl_coef=0))
    stats = learner.train_batch(making.make_batch([making.make_group(i) for i in range(4)]))
    assert len(stats.steps) == 4 and learner.counters.optimiser_steps == 4 and learner.counters.batches == 1
    first, second, third, fourth = (s.stats for s in stats.steps)
    assert first["ratio_min"] == first["ratio_max"] == 1.0
    # The second mini-batch's first step already differs from `old`, as do both of the second epoch.
    assert all(s["ratio_max"] > 1.001 for s in (second, third, fourth))


def test_the_ratio_to_behav_is_taken_against_the_engine(tiny: Path, making: ModuleType) -> None:
    groups = [making.make_group(i) for i in range(2)]
    learner = making.make_learner(tiny, ratio_to="behav", objective=dict(kl_coef=0))
    logps = learner.logprobs(all_answers(groups))
    shifted = [with_logp(g, [p - 0.1 for p in logps[4 * i : 4 * i + 4]]) for i, g in enumerate(groups)]
    step = learner.train_batch(making.make_batch(shifted)).steps[0]
    assert step.stats["ratio_mean"] == pytest.approx(np.exp(0.1), rel=1e-5)


def test_engine_and_learner_are_compared_before_the_first_step(tiny: Path, making: ModuleType) -> None:
    groups = [making.make_group(i) for i in range(2)]
    for minibatches in (1, 2):
        learner = making.make_learner(tiny, optim=dict(minibatches=minibatches), temperature=0.7)
        logps = learner.logprobs(all_answers(groups))
        shifted = []
        for i, group in enumerate(groups):
            own = [p.copy() for p in logps[4 * i : 4 * i + 4]]
            own[0][0] -= 0.5  # the engine thinks it half a nat less likely
            shifted.append(with_logp(group, own))
        found = learner.train_batch(making.make_batch(shifted)).mismatch
        tokens = sum(g.group.tokens for g in groups)
        assert found.tokens == tokens
        assert found.max_abs == pytest.approx(0.5, abs=1e-5) and found.mean_abs == pytest.approx(1.0 / tokens, abs=1e-5)
        assert found.kl == pytest.approx(-1.0 / tokens, abs=1e-5)


def test_masked_absent_and_cut_off_answers_are_out_of_loss_and_denominators(tiny: Path, making: ModuleType) -> None:
    cut = making.make_group(0, rewards=[1, 0, 1, 0], finish=["stop", "length", "stop", "stop"], lengths=[3, 5, 2, 4])
    error = making.make_group(1, rewards=[1, np.nan, 0, 0], lengths=[3, 6, 2, 4])
    filler = making.make_group(2, lengths=[2, 3, 4, 5])
    learner = making.make_learner(tiny, objective=dict(overlong="mask", kl_coef=0))
    batch = making.make_batch([cut, error, filler], masked=(2,))
    assert learner.needs(batch.groups) == [0, 1]
    stats = learner.train_batch(Batch(0, batch.groups, batch.names, {0: cut, 1: error}))
    assert stats.tokens == 18 and stats.steps[0].answers == 6
    assert stats.masked_tokens == {"overlong": 5, "error": 6, "filler": 14, "mismatch": 0}
    # A cut-off answer stays in its group's baseline; one without a reward is in none.
    assert stats.advantages[0] == pytest.approx([1, -1, 1, -1])
    assert stats.advantages[1] == pytest.approx([np.sqrt(2), 0, -np.sqrt(0.5), -np.sqrt(0.5)])


def test_nothing_unmasked_is_no_step_and_counted(tiny: Path, making: ModuleType) -> None:
    learner = making.make_learner(tiny, optim=dict(minibatches=2, weight_decay=0.5))
    batch = making.make_batch([making.make_group(i) for i in range(4)], masked=(0, 1))
    stats = learner.train_batch(batch)
    assert [s.skipped for s in stats.steps] == ["empty", ""] and stats.empty == 1 and stats.nonfinite == 0
    assert stats.mismatch.tokens == sum(batch.tokens[u].group.tokens for u in (2, 3))
    before = weights_of(learner)
    stats = learner.train_batch(making.make_batch([making.make_group(i) for i in range(4)], 1, masked=(0, 1, 2, 3)))
    assert stats.empty == 2 and stats.steps[0].loss == 0 and same(before, weights_of(learner))


def test_a_step_that_is_not_finite_is_skipped_whole(tiny: Path, making: ModuleType) -> None:
    learner = making.make_learner(tiny, ratio_to="behav", optim=dict(minibatches=2))
    good = [making.make_group(i) for i in range(4)]
    learner.train_batch(making.make_batch(good))
    bad = with_logp(good[3], [np.full(len(c.tokens_T), np.nan) for c in good[3].group.completions])
    before = weights_of(learner)
    stats = learner.train_batch(making.make_batch([bad], 1))
    assert [s.skipped for s in stats.steps] == ["nonfinite"] and stats.failed == (3,)
    assert same(before, weights_of(learner)), "weights moved in a skipped step"
    stats = learner.train_batch(making.make_batch([bad, *good[:3]], 2))
    assert [s.skipped for s in stats.steps] == ["nonfinite", ""] and stats.failed == (3, 0)
    assert stats.nonfinite == 1 and stats.nonfinite_in_a_row == 0 and np.isfinite(stats.stats["loss"])
    stats = learner.train_batch(making.make_batch([good[0], bad], 3))
    assert stats.nonfinite_in_a_row == 1 and learner.train_batch(making.make_batch([bad], 4)).nonfinite_in_a_row == 2


def test_the_reference_is_loaded_only_for_a_kl_term_and_stays_put(tiny: Path, making: ModuleType) -> None:
    groups = [making.make_group(i) for i in range(3)]
    without = making.make_learner(tiny, objective=dict(kl_coef=0))
    without.train_batch(making.make_batch(groups))
    assert without._reference is None
    learner = making.make_learner(tiny, objective=dict(kl_coef=0.1), optim=dict(lr=1e-2))
    kls = [learner.train_batch(making.make_batch(groups, i)).stats["kl_ref"] for i in range(3)]
    assert kls[0] == pytest.approx(0, abs=1e-9) and kls[0] < kls[1] < kls[2]


def test_kl_in_the_reward_moves_advantages_by_its_sum_over_the_answer(tiny: Path, making: ModuleType) -> None:
    groups = [making.make_group(i, lengths=[2, 9, 4]) for i in range(3)]
    flags = dict(objective=dict(kl_coef=0.3, kl_in="reward", kl_estimator="k1", adv_norm="none"), optim=dict(lr=1e-2))
    learner = making.make_learner(tiny, **flags)
    reference = learner.logprobs(all_answers(groups))
    learner.train_batch(making.make_batch(groups))
    old = learner.logprobs(all_answers(groups))
    stats = learner.train_batch(making.make_batch(groups, 1))
    for i, group in enumerate(groups):
        k1 = np.array([(old[3 * i + j].astype(float) - reference[3 * i + j]).sum() for j in range(3)])
        shaped = group.rewards_G - 0.3 * k1
        assert np.abs(k1).max() > 1e-3
        assert stats.advantages[group.uid] == pytest.approx(shaped - shaped.mean(), abs=1e-5)


def test_the_gradient_is_clipped_and_the_schedule_followed(tiny: Path, making: ModuleType) -> None:
    groups = [making.make_group(i) for i in range(2)]
    moved = {}
    for clip in (0.0, 1e-9):
        # AdamW's eps above the clipped gradient makes the clip visible in the update.
        learner = making.make_learner(tiny, optim=dict(grad_clip=clip, eps=1e-5, lr_warmup_steps=2), objective=dict(kl_coef=0))
        before = weights_of(learner)
        steps = [learner.train_batch(making.make_batch(groups, i)).steps[0] for i in range(3)]
        assert [s.lr for s in steps] == pytest.approx([5e-4, 1e-3, 1e-3]) and steps[0].grad_norm > 1e-3
        moved[clip] = max((w - before[n]).abs().max().item() for n, w in weights_of(learner).items())
    assert moved[1e-9] < 1e-3 * moved[0.0]


def test_logprobs_come_back_by_answer_in_order(tiny: Path, making: ModuleType) -> None:
    learner = making.make_learner(tiny, config=dict(micro_tokens=16))
    answers = all_answers([making.make_group(i) for i in range(3)])
    together, alone = learner.logprobs(answers), [learner.logprobs([a])[0] for a in answers]
    assert [len(p) for p in together] == [len(a.tokens_T) for a in answers]
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one - other).max() < 5e-6
    assert learner.logprobs([]) == []


# Two ranks


@pytest.fixture(scope="module")
def two_ranks(tiny: Path, making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What two processes computed, and the checkpoint of one rank that they went on from."""
    out = tmp_path_factory.mktemp("ranks")
    learner = making.make_learner(tiny)
    learner.train_batch(making.case_batches("minibatches")[0])
    learner.save(out / "start")
    command = [sys.executable, str(Path(__file__).with_name("making.py"))]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(r), "2", str(out / "store"), str(tiny), str(out), str(out / "start")], env=env, stderr=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    try:
        errors = [p.communicate(timeout=120)[1] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0, 0], "\n".join(errors)
    return SimpleNamespace(out=out, reports=json.loads((out / "reports.json").read_text()))


@pytest.mark.parametrize("case", ["minibatches", "gspo_kl_in_reward", "critic", "one_answer", "replicas", "offload", "adapters"])
def test_two_ranks_give_what_one_rank_gives(tiny: Path, making: ModuleType, two_ranks: SimpleNamespace, case: str) -> None:
    learner, stats = making.run_case(case, tiny, micro_tokens=8192)
    one, two = making.report(stats), two_ranks.reports[case]
    assert one["tokens"] == two["tokens"]
    for name in ("loss", "grad_norm", "advantages", "mismatch", "entropy", "critic", "values"):
        np.testing.assert_allclose(np.array(two[name]), np.array(one[name]), rtol=2e-5, atol=2e-6, err_msg=name)
    saved = np.load(two_ranks.out / f"{case}.npz")
    difference = sum(float(np.square(w.numpy() - saved[n]).sum()) for n, w in learner.weights()) ** 0.5
    scale = sum(float(np.square(saved[n]).sum()) for n in saved.files) ** 0.5
    assert difference < 1e-6 * scale
    start = dict(making.make_learner(tiny).weights())
    moved = sum(float((w - start[n]).square().sum()) for n, w in learner.weights()) ** 0.5
    assert moved > 1e-3 * scale, "nothing was trained"


def test_the_cases_have_several_micro_batches_and_a_rank_without_answers(two_ranks: SimpleNamespace) -> None:
    assert min(two_ranks.reports["minibatches"]["micro_batches"]) >= 2
    assert two_ranks.reports["one_answer"]["micro_batches"] == [1, 1]
    assert all(t > 0 for t in two_ranks.reports["one_answer"]["tokens"])


def test_a_checkpoint_goes_on_with_another_number_of_ranks(tiny: Path, making: ModuleType, two_ranks: SimpleNamespace) -> None:
    straight = making.make_learner(tiny)
    batches = [*making.case_batches("minibatches"), *making.case_batches("gspo_kl_in_reward")]
    for index in (0, 1, 2):
        straight.train_batch(dataclasses.replace(batches[index], index=index))
    # Batch 0 on one rank, batch 1 on two, batch 2 on one again.
    resumed = making.make_learner(tiny)
    assert resumed.load(two_ranks.out / "checkpoint").batches == 2
    resumed.train_batch(dataclasses.replace(batches[2], index=2))
    for (name, a), (_, b) in zip(straight.weights(), resumed.weights(), strict=True):
        assert (a - b).norm() < 2e-6 * a.norm(), name


def test_a_batch_is_given_up_between_micro_batches_and_nothing_has_changed(tiny: Path, making: ModuleType) -> None:
    """Before its first optimiser step; after that it is too late, and the batch is trained."""
    from learner.abandon import Abandoned

    learner = making.make_learner(tiny, optim=dict(minibatches=2), config=dict(micro_tokens=16))
    other = making.make_learner(tiny, optim=dict(minibatches=2), config=dict(micro_tokens=16))
    batches = making.case_batches("minibatches")
    for each in (learner, other):
        each.train_batch(batches[0])
    heed, seen = learner._heed, []

    def ask_in_the_third() -> None:
        seen.append(1)
        if len(seen) == 3:
            learner.abandonment.ask()
        heed()

    learner._heed = ask_in_the_third
    with pytest.raises(Abandoned):
        learner.train_batch(batches[1])
    assert len(seen) == 3 and learner.counters == other.counters
    learner.abandonment._asked.clear()
    for stats in zip(*(each.train_batch(batches[1]).steps for each in (learner, other)), strict=True):
        assert stats[0].loss == stats[1].loss and stats[0].grad_norm == stats[1].grad_norm
    for (name, mine), (_, its) in zip(learner.weights(), other.weights(), strict=True):
        assert torch.equal(mine, its), name
    heed_late = learner.abandonment.ask
    learner._changed = False
    learner._heed = lambda: heed_late() if learner._changed else heed()
    assert learner.train_batch(making.make_batch([making.make_group(50 + i, answers=3, seed=7) for i in range(5)], 2)).steps
