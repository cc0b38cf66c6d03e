"""Training with a critic: both losses against plain transformers, who moves when, what is left out, and exact resumption.

Two ranks against one are in test_step.py (case `critic`), the formulas in test_gae.py.
Not covered: that a policy learns better with it than without, GPUs and 16-bit values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learner.checkpoint import MANIFEST
from learner.gae import gae, token_rewards
from learner.model import build_tiny, check_value_model, local
from learner.pack import Answer
from rollout.errors import UserError

pytestmark = pytest.mark.usefixtures("one_rank")
FLAGS = dict(objective=dict(baseline="critic", adv_norm="batch", kl_coef=0))


def make(making: ModuleType, model: Path, head: float = 0.0, **settings: Any) -> Any:
    """A learner with a critic and one value step per step of the policy; `head` is the spread of the value head's weights, at first 0."""
    settings["critic"] = {"value_epochs": 1, **settings.get("critic", {})}
    learner = making.make_learner(model, **{**FLAGS, **settings})
    if head:
        weight = local(learner.critic.model.head.weight)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * head)
    return learner


def value_weights(learner: Any) -> dict[str, torch.Tensor]:
    return {name: local(p).detach().clone() for name, p in learner.critic.model.named_parameters()}


def policy_weights(learner: Any) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in learner.weights()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def plain_losses(folder: Path, head: torch.Tensor, groups: Any, lam: float, nll: float) -> dict[str, float]:
    """One step on fresh data with transformers alone: unpacked answers, a loop over tokens for GAE."""
    from transformers import AutoModelForCausalLM

    policy, value = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    head = nn.Parameter(head.clone())
    news, values, advantages, rewards = [], [], [], []
    for group in groups:
        first = len(group.group.prompt.tokens_P)
        for done, reward in zip(group.group.completions, group.rewards_G, strict=True):
            ids = torch.tensor(np.concatenate([group.group.prompt.tokens_P, done.tokens_T]).astype(np.int64))[None]
            logp = torch.log_softmax(policy(ids).logits[0], -1)
            news.append(logp[first - 1 : -1].gather(-1, ids[0, first:, None]).squeeze(-1))
            values.append((value.model(ids).last_hidden_state[0, first - 1 : -1] @ head.T).squeeze(-1))
            v, a = [*values[-1].tolist(), 0.0], [0.0]
            for t in reversed(range(len(v) - 1)):
                a.insert(0, (reward if t == len(v) - 2 else 0.0) + v[t + 1] - v[t] + lam * a[0])
            advantages.append(a[:-1])
            rewards.append(reward)
    flat = np.concatenate(advantages)
    total, right = len(flat), sum(len(x) for x, r in zip(news, rewards, strict=True) if r == 1)
    value_loss = sum((0.5 * (v - r) ** 2).sum() for v, r in zip(values, rewards, strict=True)) / total
    terms = [
        -(torch.tensor((np.array(a) - flat.mean()) / flat.std(), dtype=torch.float32) * torch.exp(x - x.detach())).sum() / total
        for a, x in zip(advantages, news, strict=True)
    ]
    likelihood = -sum(x.sum() for x, r in zip(news, rewards, strict=True) if r == 1) / right
    (sum(terms) + nll * likelihood).backward()
    value_loss.backward()
    models = ([*policy.parameters()], [head, *value.parameters()])
    norms = [torch.cat([p.grad.flatten() for p in model if p.grad is not None]).norm().item() for model in models]
    return {
        "loss": (sum(terms) + nll * likelihood).item(), "value_loss": value_loss.item(), "nll": likelihood.item(), "grad_norm": norms[0],
        "value_norm": norms[1], "adv_mean": flat.mean(), "adv_std": flat.std(),
    }  # fmt: skip


@pytest.mark.parametrize("micro_tokens", [16, 40, 8192])
def test_losses_and_gradients_are_the_formulas(tiny: Path, making: ModuleType, micro_tokens: int) -> None:
    """Whole-step denominators of the policy's, the value's and the likelihood's term: the same for any micro-batches."""
    groups = [making.make_group(i) for i in range(3)]
    critic = dict(gae_lambda=0.7, positive_nll=0.4)
    learner = make(making, tiny, head=0.3, config=dict(micro_tokens=micro_tokens), critic=critic, optim=dict(grad_clip=0))
    want = plain_losses(tiny, local(learner.critic.model.head.weight).detach(), groups, 0.7, 0.4)
    stats = learner.train_batch(making.make_batch(groups))
    (step,) = stats.steps
    assert step.loss == pytest.approx(want["loss"], abs=2e-6) and step.grad_norm == pytest.approx(want["grad_norm"], rel=2e-5)
    assert step.critic["loss"] == pytest.approx(want["value_loss"], rel=2e-5)
    assert step.critic["grad_norm"] == pytest.approx(want["value_norm"], rel=2e-5)
    assert step.critic["nll"] == pytest.approx(want["nll"], rel=2e-5)
    assert stats.critic["advantage_mean"] == pytest.approx(want["adv_mean"], abs=1e-5)
    assert stats.critic["advantage_std"] == pytest.approx(want["adv_std"], rel=1e-5)
    assert (step.micro_batches > 4) == (micro_tokens == 16) and (step.micro_batches == 1) == (micro_tokens == 8192)


def test_pre_training_moves_the_value_model_alone(tiny: Path, making: ModuleType) -> None:
    objective = {**FLAGS["objective"], "kl_coef": 0.1}
    learner = make(making, tiny, objective=objective, critic=dict(value_pretrain=2), optim=dict(lr_warmup_steps=2, minibatches=2))
    frozen, value = policy_weights(learner), value_weights(learner)
    for index in range(2):
        stats = learner.train_batch(making.make_batch([making.make_group(10 * index + i) for i in range(4)], index))
        assert [s.skipped for s in stats.steps] == ["frozen", "frozen"] and stats.stats == {} and stats.critic["frozen"] == 1.0
        assert all(s.lr == 0 and s.loss == 0 for s in stats.steps) and stats.tokens > 0 and stats.failed == ()
    assert same(frozen, policy_weights(learner)) and not same(value, value_weights(learner))
    assert learner._reference is None, "a pass that nothing uses"
    # A version is a batch; the policy's schedule has not begun, the value's has.
    counters = learner.counters
    assert (counters.batches, counters.optimiser_steps, counters.value_steps) == (2, 0, 4)
    stats = learner.train_batch(making.make_batch([making.make_group(30 + i) for i in range(4)], 2))
    assert [s.lr for s in stats.steps] == pytest.approx([5e-4, 1e-3]) and stats.steps[0].critic["lr"] == pytest.approx(1e-2)
    assert not same(frozen, policy_weights(learner)) and stats.critic["frozen"] == 0.0


def test_further_value_epochs_move_the_value_model_alone(tiny: Path, making: ModuleType) -> None:
    """The policy's step is the one that it takes without them, and the value model goes on towards the same targets."""
    once, thrice = (make(making, tiny, head=0.3, critic=dict(value_epochs=n, value_lr=1e-4), optim=dict(minibatches=2)) for n in (1, 3))
    batch = making.make_batch([making.make_group(i) for i in range(4)])
    one, three = once.train_batch(batch), thrice.train_batch(batch)
    assert same(policy_weights(once), policy_weights(thrice)) and not same(value_weights(once), value_weights(thrice))
    assert one.steps == three.steps and one.stats == three.stats and one.value_steps == ()
    assert [s.skipped for s in three.value_steps] == ["frozen"] * 4 and thrice.counters.value_steps == 3 * once.counters.value_steps == 6
    assert thrice.counters.optimiser_steps == once.counters.optimiser_steps == 2
    losses = [s.critic["loss"] for s in (*three.steps, *three.value_steps)]
    assert losses[4] < losses[2] < losses[0] and losses[5] < losses[3] < losses[1]


def test_pre_training_takes_monte_carlo_returns_whatever_the_lambda(tiny: Path, making: ModuleType) -> None:
    group = making.make_group(0, rewards=[1, 0, 1], lengths=[2, 3, 5])
    learner = make(making, tiny, head=0.3, critic=dict(value_pretrain=1, gae_lambda_value=0.5))
    first, second = (learner.train_batch(making.make_batch([group], i)).critic["return_mean"] for i in range(2))
    assert first == pytest.approx(0.7, abs=1e-6) and abs(second - 0.7) > 0.02


def test_values_learn_what_decides_the_reward(tiny: Path, making: ModuleType) -> None:
    groups = [making.make_group(i, rewards=[float(i % 2)] * 4) for i in range(4)]
    learner = make(making, tiny, critic=dict(value_pretrain=30, value_lr=4e-3))
    found = [learner.train_batch(making.make_batch(groups, i)).critic["explained_variance"] for i in range(20)]
    assert found[0] == pytest.approx(0.0, abs=1e-9) and found[-1] > 0.9


def test_neither_loss_reaches_the_other_model(tiny: Path, making: ModuleType) -> None:
    batch = making.make_batch([making.make_group(i) for i in range(3)])
    one, other = make(making, tiny, head=0.3), make(making, tiny, head=0.3, critic=dict(value_coef=7.0, value_lr=0.1))
    for learner in (one, other):
        learner.train_batch(batch)
    assert same(policy_weights(one), policy_weights(other)) and not same(value_weights(one), value_weights(other))
    third = make(making, tiny, head=0.3, objective={**FLAGS["objective"], "clip": 0.1, "entropy_coef": 0.5})
    third.train_batch(batch)
    assert same(value_weights(one), value_weights(third)) and not same(policy_weights(one), policy_weights(third))


def assessed(learner: Any, batch: Any, pretraining: bool = False) -> tuple[dict[int, np.ndarray], dict[str, Any]]:
    """Advantages per token of each answer that trains, and the statistics."""
    table = learner._tabulate(batch.groups)
    parts = learner._prepare(table, batch)
    _, stats = learner.critic.assess(table, parts, pretraining=pretraining)
    found = {}
    for micro in (m for part in parts for m in part.micro):
        for k, a in enumerate(micro.ids_K):
            found[int(a)] = micro.advantage_N[micro.answer_N == k].numpy()
    return found, stats


def test_advantages_are_whitened_over_all_tokens_of_the_batch(tiny: Path, making: ModuleType) -> None:
    batch = making.make_batch([making.make_group(i) for i in range(4)])
    settings = dict(optim=dict(minibatches=2), config=dict(micro_tokens=24), head=0.3)
    plain, stats = assessed(make(making, tiny, objective=dict(baseline="critic", adv_norm="none", kl_coef=0), **settings), batch)
    white, _ = assessed(make(making, tiny, **settings), batch)
    sample, _ = assessed(make(making, tiny, objective={**FLAGS["objective"], "std_ddof": 1, "std_eps": 0.5}, **settings), batch)
    flat = np.concatenate([plain[a] for a in sorted(plain)]).astype(np.float64)
    assert stats["advantage_min"] == pytest.approx(flat.min()) and stats["advantage_max"] == pytest.approx(flat.max())
    np.testing.assert_allclose(np.concatenate([white[a] for a in sorted(white)]), (flat - flat.mean()) / flat.std(), rtol=2e-5, atol=1e-6)
    want = (flat - flat.mean()) / (flat.std(ddof=1) + 0.5)
    np.testing.assert_allclose(np.concatenate([sample[a] for a in sorted(sample)]), want, rtol=2e-5, atol=1e-6)


def test_lambda_follows_the_length_of_each_answer(tiny: Path, making: ModuleType) -> None:
    batch = making.make_batch([making.make_group(0, rewards=[1, 0], lengths=[10, 4])])
    settings = dict(head=0.3, objective=dict(baseline="critic", adv_norm="none", kl_coef=0))
    found, stats = assessed(make(making, tiny, critic=dict(gae_length_alpha=0.2), **settings), batch)
    alone, _ = assessed(make(making, tiny, critic=dict(gae_lambda=0.5), **settings), batch)
    zero, _ = assessed(make(making, tiny, critic=dict(gae_lambda=0.0), **settings), batch)
    assert found[0] == pytest.approx(alone[0]) and found[1] == pytest.approx(zero[1]) and stats["lambda"] == pytest.approx(0.25)


def test_kl_in_the_reward_goes_off_each_token(tiny: Path, making: ModuleType) -> None:
    groups = [making.make_group(0, rewards=[1, 0], lengths=[6, 3])]
    objective = dict(baseline="critic", adv_norm="none", kl_coef=0.3, kl_in="reward", kl_estimator="k1")
    learner = make(making, tiny, head=0.3, objective=objective, critic=dict(gae_lambda=0.0), optim=dict(lr=1e-2))
    learner.train_batch(making.make_batch(groups))
    batch = making.make_batch(groups, 1)
    table = learner._tabulate(batch.groups)
    parts = learner._prepare(table, batch)
    learner._no_grad_pass(learner.policy, parts, "old_N")
    learner._no_grad_pass(learner.reference, parts, "ref_N")
    learner.critic.assess(table, parts, pretraining=False)
    (micro,) = parts[0].micro
    k1, answer = (micro.old_N - micro.ref_N).double().numpy(), micro.answer_N.numpy()
    reward = token_rewards(groups[0].rewards_G[micro.ids_K], answer, k1, 0.3)
    assert np.abs(k1).max() > 1e-3 and (reward != 0).sum() == 9
    np.testing.assert_allclose(micro.advantage_N, gae(reward, micro.value_N.double().numpy(), answer, 0.0), rtol=1e-6, atol=1e-7)


def test_a_group_of_one_answer_and_one_without_spread_train(tiny: Path, making: ModuleType) -> None:
    learner = make(making, tiny)
    groups = [making.make_group(0, rewards=[1], lengths=[4]), making.make_group(1, rewards=[0], lengths=[3])]
    stats = learner.train_batch(making.make_batch(groups))
    assert stats.steps[0].skipped == "" and stats.steps[0].grad_norm > 0
    assert stats.advantages[0][0] > 0.1 > -0.1 > stats.advantages[1][0]


def test_answers_out_of_the_loss_are_in_no_value_statistic_or_denominator(tiny: Path, making: ModuleType) -> None:
    cut = making.make_group(0, rewards=[1, 1, 0], finish=["stop", "length", "stop"], lengths=[3, 5, 2])
    error = making.make_group(1, rewards=[np.nan, 0], lengths=[6, 2])
    filler = making.make_group(2, rewards=[1, 1], lengths=[2, 3])
    objective = {**FLAGS["objective"], "overlong": "mask"}
    learner = make(making, tiny, objective=objective, critic=dict(positive_nll=0.1))
    stats = learner.train_batch(making.make_batch([cut, error, filler], masked=(2,)))
    # Values are 0: the loss is ½ R² over 3 + 2 + 2 tokens, of which the first 3 have R = 1.
    assert stats.steps[0].critic["loss"] == pytest.approx(0.5 * 3 / 7) and stats.critic["return_mean"] == pytest.approx(3 / 7)
    (logp,) = making.make_learner(tiny).logprobs([Answer.of(cut.group.prompt, cut.group.completions[0])])
    assert stats.steps[0].critic["nll"] == pytest.approx(-logp.mean(), rel=1e-5)
    assert stats.advantages[0][1] == 0 and stats.advantages[1][0] == 0 and not stats.advantages[2].any()


def test_the_likelihood_term_is_of_right_answers_and_says_its_share(tiny: Path, making: ModuleType) -> None:
    wrong = [making.make_group(i, rewards=[0, 0.5], lengths=[3, 2]) for i in range(2)]
    stats = make(making, tiny, critic=dict(positive_nll=0.3)).train_batch(making.make_batch(wrong))
    assert (stats.steps[0].critic["nll"], stats.steps[0].critic["nll_share"]) == (0.0, 0.0)
    assert "nll" not in make(making, tiny).train_batch(making.make_batch(wrong)).steps[0].critic
    # One token each, V = 0: advantages are ±1 after whitening, so the policy pushes by ½ on each token and the likelihood by m on one.
    groups = [making.make_group(i, rewards=[r], lengths=[1]) for i, r in enumerate((1, 0))]
    stats = make(making, tiny, critic=dict(positive_nll=0.25)).train_batch(making.make_batch(groups))
    assert stats.steps[0].critic["nll_share"] == pytest.approx(0.25 / (0.25 + 0.5 + 0.5), rel=1e-5)


def test_value_clip_binds_only_after_the_values_have_moved(tiny: Path, making: ModuleType) -> None:
    learner = make(making, tiny, critic=dict(value_clip=1e-4), optim=dict(epochs=2, lr=1e-2))
    first, second = learner.train_batch(making.make_batch([making.make_group(i, rewards=[1] * 4) for i in range(2)])).steps
    assert first.critic["clipfrac"] == 0 and second.critic["clipfrac"] > 0.5


def test_a_value_that_is_not_finite_skips_both_steps(tiny: Path, making: ModuleType) -> None:
    learner = make(making, tiny, critic=dict(value_pretrain=1))
    with torch.no_grad():
        local(learner.critic.model.head.weight).fill_(torch.nan)
    policy, body = policy_weights(learner), value_weights(learner)
    for index in range(2):
        stats = learner.train_batch(making.make_batch([making.make_group(i) for i in range(2)], index))
        assert [s.skipped for s in stats.steps] == ["nonfinite"] and stats.failed == (0, 1) and stats.nonfinite_in_a_row == index + 1
    assert same(policy, policy_weights(learner))
    assert all(torch.equal(w, body[n]) for n, w in value_weights(learner).items() if n != "head.weight")


# Keeping, and what is refused


def test_a_resumed_run_is_the_same_run_to_the_bit(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    flags = dict(critic=dict(value_pretrain=1, positive_nll=0.1, value_epochs=2), optim=dict(minibatches=2))
    batches = [making.make_batch([making.make_group(10 * i + j) for j in range(2)], i) for i in range(3)]
    straight, first = make(making, tiny, **flags), make(making, tiny, **flags)
    for batch in batches:
        last = straight.train_batch(batch)
    first.train_batch(batches[0])
    first.save(tmp_path / "frozen")
    second = make(making, tiny, **flags)
    second.load(tmp_path / "frozen")  # before the policy has moved at all
    second.train_batch(batches[1])
    second.save(tmp_path / "moved")
    third = make(making, tiny, **flags)
    counters = third.load(tmp_path / "moved")
    assert (counters.batches, counters.optimiser_steps, counters.value_steps) == (2, 2, 8)
    again = third.train_batch(batches[2])
    assert [s.critic for s in again.steps] == [s.critic for s in last.steps] and again.critic == last.critic
    assert same(policy_weights(straight), policy_weights(third)) and same(value_weights(straight), value_weights(third))


def test_a_checkpoint_of_a_run_with_a_critic_is_for_one_with_a_critic(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    make(making, tiny).save(tmp_path / "with")
    making.make_learner(tiny).save(tmp_path / "without")
    assert "value" not in json.loads((tmp_path / "without" / MANIFEST).read_text())
    with pytest.raises(UserError, match="holds a value model, which this run has not"):
        making.make_learner(tiny).load(tmp_path / "with")
    with pytest.raises(UserError, match="holds no value model"):
        make(making, tiny).load(tmp_path / "without")


def test_without_a_critic_no_value_model_is_loaded(tiny: Path, making: ModuleType) -> None:
    learner = making.make_learner(tiny, critic=dict(value_pretrain=3))
    stats = learner.train_batch(making.make_batch([making.make_group(0)]))
    assert learner._critic is None and stats.critic == {} and stats.steps[0].critic == {} and learner.counters.value_steps == 0
    assert learner.counters.optimiser_steps == 1


def test_the_value_model_starts_from_the_checkpoint_that_is_named(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    build_tiny(tmp_path / "other", making.TINY, seed=5)
    check_value_model(str(tmp_path / "other"), str(tiny), False)
    own, other = make(making, tiny), make(making, tiny, critic=dict(value_model=str(tmp_path / "other")))
    reference = make(making, tiny, reference=str(tmp_path / "other"))  # what RL starts from, after a warm-up
    name = "decoder.layers.0.mlp.up_proj.weight"
    policy = policy_weights(own)["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(value_weights(own)[name], policy) and not torch.equal(value_weights(other)[name], policy)
    assert torch.equal(value_weights(reference)[name], value_weights(other)[name])


def test_a_value_model_of_another_architecture_is_refused(tiny: Path, making: ModuleType, tmp_path: Path) -> None:
    build_tiny(tmp_path / "wide", making.TINY | {"hidden_size": 64}, seed=0)
    shutil.copytree(tiny, tmp_path / "bert")
    settings = json.loads((tiny / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps(settings | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    wanted = {"wide": "hidden_size = 64 and the policy 32", "bert": "model_type = bert and the policy qwen3", "gone": "could not be loaded"}
    for name, words in wanted.items():
        with pytest.raises(UserError, match=words) as caught:
            check_value_model(str(tmp_path / name), str(tiny), False)
        assert str(caught.value).startswith("value_model = ") and "\n" not in str(caught.value)
