"""The independent checker itself: its sums, how it reads an answer, and that its batches are plain greedy decoding.

Does not cover: trained checkpoints (the tests that train one do).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rollout.tiny import build_tokenizer, tiny_model_config


@pytest.fixture(scope="module")
def recompute() -> ModuleType:
    """The program as a module; it is no part of a package."""
    spec = importlib.util.spec_from_file_location("recompute", Path(__file__).with_name("recompute.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sums_are_distinct_two_digit_and_drawn_by_the_seed(recompute: ModuleType) -> None:
    asked = recompute.sums(500, 7)
    assert len({prompt for prompt, _ in asked}) == 500 and asked == recompute.sums(500, 7) != recompute.sums(500, 8)
    for prompt, value in asked:
        a, b = prompt.rstrip("=").split("+")
        assert len(a) == len(b) == 2 and int(a) + int(b) == value


READ = [("85", 85), ("7+8=15 4+3+1=8 85", 85), ("085", 85), ("no number", None), ("", None), ("85.", 85)]


@pytest.mark.parametrize(("text", "value"), READ)
def test_an_answer_is_its_last_integer(recompute: ModuleType, text: str, value: int | None) -> None:
    assert recompute.last_integer(text) == value


def test_it_imports_nothing_of_winnow(recompute: ModuleType) -> None:
    source = Path(recompute.__file__ or "").read_text()
    ours = ("rollout", "verifier", "learner", "cluster")
    assert not [f"{word} {package}" for word in ("import", "from") for package in ours if f"{word} {package}" in source]


def test_batches_of_mixed_lengths_decode_as_one_prompt_at_a_time(recompute: ModuleType, tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer(tmp_path)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**tiny_model_config(tokenizer, hidden=32, layers=2)))
    for parameter in model.parameters():
        parameter.data.mul_(8 if parameter.dim() > 1 else 1)  # spreads the logits, so that no two answers are alike
    model.save_pretrained(tmp_path)
    prompts = ["12+34=", "1+2=", "99+99=", "100+23=", "56+78="]

    def greedy(prompt: str) -> str:
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        start = len(ids)
        while len(ids) < start + 10 and ids[-1:] != [tokenizer.eos_token_id]:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return tokenizer.decode(ids[start:], skip_special_tokens=True)

    expected = [greedy(p) for p in prompts]
    assert len(set(expected)) == len(prompts)
    assert recompute.answers(tmp_path, prompts, max_new_tokens=10, batch=2) == expected
