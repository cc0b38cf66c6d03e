"""The sharded policy on one rank: log-probabilities, packing, precision, weights by name, and what it refuses.

Not covered: several ranks (test_step.py), flash-attention and anything else on a GPU (tests/gpu).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from learner.attention import NAME
from learner.config import ModelConfig
from learner.model import build_tiny, free_gathered, full_weights, load_policy, make_mesh, pick_attention, whole
from learner.pack import Answer, build_micro
from rollout.errors import UserError

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_rank")


def load(folder: Path, **config: object):
    return load_policy(str(folder), ModelConfig(**config), mesh=make_mesh(CPU), device=CPU)


def some_answers(count: int = 7) -> dict[int, Answer]:
    rng = np.random.default_rng(0)
    return {i: Answer.example(rng.integers(2, 40, rng.integers(1, 6)), rng.integers(2, 40, rng.integers(1, 9))) for i in range(count)}


def run(policy, rows, answers, temperature: float = 1.0):
    micro = build_micro(rows, answers)
    tensors = (torch.from_numpy(x) for x in (micro.input_RW, micro.position_RW, micro.flat_N, micro.target_N))
    return policy(*tensors, temperature)


def plain_logp(folder: Path, answer: Answer, temperature: float = 1.0) -> torch.Tensor:
    """The reference: transformers alone, one unpacked sequence, full logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(np.concatenate([answer.prompt_P, answer.tokens_T]))[None]
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    first = len(answer.prompt_P)
    return logp[first - 1 : -1].gather(-1, ids[0, first:, None]).squeeze(-1)


@pytest.mark.parametrize("rows", [[[0, 1, 2], [3, 4], [5, 6]], [[0, 1, 2, 3, 4, 5, 6]], [[6], [5], [4], [3], [2], [1], [0]]])
def test_packed_answers_have_the_logprobs_of_lone_ones(tiny: Path, rows: list[list[int]]) -> None:
    answers = some_answers()
    with torch.no_grad():
        logp, _ = run(load(tiny), rows, answers, temperature=0.8)
    want = torch.cat([plain_logp(tiny, answers[a], 0.8) for row in rows for a in row])
    torch.testing.assert_close(logp, want, rtol=0, atol=5e-6)


def gradients(policy, rows=((0, 1, 2), (3, 4))) -> dict[str, torch.Tensor]:
    logp, entropy = run(policy, rows, some_answers())
    (logp.sum() + 0.1 * entropy.sum()).backward()
    return {name: whole(p.grad) for name, p in policy.hf.named_parameters()}


def test_gradients_do_not_depend_on_packing_and_match_plain_transformers(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    one, other = gradients(load(tiny)), gradients(load(tiny), rows=((4,), (3, 2), (1, 0)))
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for answer in list(some_answers().values())[:5]:
        ids = torch.tensor(np.concatenate([answer.prompt_P, answer.tokens_T]))[None]
        logp = torch.log_softmax(model(ids).logits[0], -1)[len(answer.prompt_P) - 1 : -1]
        entropy = -(logp.exp() * logp).sum(-1)
        (logp.gather(-1, ids[0, len(answer.prompt_P) :, None]).sum() + 0.1 * entropy.sum()).backward()
    for name, param in model.named_parameters():
        scale = param.grad.norm()
        assert (one[name] - param.grad).norm() < 1e-5 * scale, name
        assert (one[name] - other[name]).norm() < 1e-5 * scale, name


def test_activation_checkpointing_changes_no_gradient_and_saves_less(tiny: Path) -> None:
    sizes: list[int] = []
    results = []
    for on in (False, True):
        policy = load(tiny, activation_checkpointing=on)
        saved = 0

        def count(x: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            logp, _ = run(policy, [[0, 1, 2], [3, 4]], some_answers())
        sizes.append(saved)
        logp.sum().backward()
        results.append(torch.cat([whole(p.grad).flatten() for p in policy.parameters()]))
    torch.testing.assert_close(results[1], results[0])
    assert sizes[1] < 0.7 * sizes[0]


def test_bfloat16_computes_near_float32_and_keeps_float32_weights_and_gradients(tiny: Path) -> None:
    with torch.no_grad():
        want, _ = run(load(tiny), [[0, 1, 2, 3]], some_answers())
    policy = load(tiny, compute_dtype="bfloat16")
    got, _ = run(policy, [[0, 1, 2, 3]], some_answers())
    got.sum().backward()
    assert 1e-5 < (got - want).abs().mean() < 0.15
    assert got.dtype == torch.float32 and all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())


def test_full_weights_are_those_of_the_checkpoint_each_once(tiny: Path) -> None:
    from safetensors.torch import load_file

    saved = load_file(tiny / "model.safetensors")
    names = [name for name, _ in full_weights(load(tiny))]
    assert sorted(names) == sorted(saved) and "lm_head.weight" not in names
    for name, value in full_weights(load(tiny)):
        assert torch.equal(value, saved[name]), name
    assert {v.dtype for _, v in full_weights(load(tiny), torch.bfloat16)} == {torch.bfloat16}


def test_an_untied_head_is_a_weight_of_its_own_and_gets_gradient(tmp_path: Path, making: ModuleType) -> None:
    build_tiny(tmp_path, making.TINY | {"tie_word_embeddings": False}, seed=0)
    policy = load(tmp_path)
    grads = gradients(policy)
    assert "lm_head.weight" in grads and grads["lm_head.weight"].norm() > 0 and grads["model.embed_tokens.weight"].norm() > 0


def test_a_changed_weight_is_seen_after_a_pass_without_gradient(tiny: Path) -> None:
    policy = load(tiny)
    with torch.no_grad():
        before, _ = run(policy, [[0, 1]], some_answers())
        free_gathered(policy)
        for p in policy.parameters():
            p.mul_(1.1)
        after, _ = run(policy, [[0, 1]], some_answers())
        free_gathered(policy)
        fresh = load(tiny)
        for p in fresh.parameters():
            p.mul_(1.1)
        want, _ = run(fresh, [[0, 1]], some_answers())
    assert torch.equal(after, want) and not torch.allclose(after, before, atol=1e-3)


def test_the_seed_alone_decides_the_tiny_weights(tmp_path: Path, making: ModuleType) -> None:
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        build_tiny(tmp_path / name, making.TINY, seed=seed)
        torch.rand(1)
    data = {n: (tmp_path / n / "model.safetensors").read_bytes() for n in "abc"}
    assert data["a"] == data["b"] != data["c"]
    torch.set_rng_state(state)


def test_dropout_is_off(tmp_path: Path, making: ModuleType) -> None:
    build_tiny(tmp_path, making.TINY | {"attention_dropout": 0.5}, seed=0)
    policy = load(tmp_path)
    assert torch.equal(run(policy, [[0, 1]], some_answers())[0], run(policy, [[0, 1]], some_answers())[0])


def test_what_cannot_be_loaded_is_a_sentence(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(UserError, match=r"model = '.*nothing' could not be loaded"):
        load(tmp_path / "nothing")
    shutil.copytree(tiny, tmp_path / "capped")
    settings = json.loads((tiny / "config.json").read_text())
    (tmp_path / "capped" / "config.json").write_text(json.dumps(settings | {"final_logit_softcapping": 30.0}))
    with pytest.raises(UserError, match="final_logit_softcapping"):
        load(tmp_path / "capped")
    plain = Qwen3Config()
    with pytest.raises(UserError, match="attention = 'flash_attention_2' needs a GPU"):
        pick_attention("flash_attention_2", CPU, "float32", plain)
    with pytest.raises(UserError, match="attention = 'segments' needs a model with full causal attention"):
        pick_attention("segments", CPU, "float32", Qwen3Config(layer_types=["sliding_attention"], num_hidden_layers=1, sliding_window=8))


def test_the_attention_that_auto_stands_for() -> None:
    windowed = Qwen3Config(layer_types=["sliding_attention"] * 2, num_hidden_layers=2, use_sliding_window=True, sliding_window=8)
    gpu = torch.device("cuda")
    assert pick_attention("auto", CPU, "float32", Qwen3Config()) == pick_attention("segments", CPU, "bfloat16", Qwen3Config()) == NAME
    assert pick_attention("auto", CPU, "float32", windowed) == "sdpa"
    assert pick_attention("auto", gpu, "float32", Qwen3Config()) == "sdpa"
    assert pick_attention("auto", gpu, "bfloat16", Qwen3Config()) in (NAME, "flash_attention_2")
