"""The character-level tokenizer, the tiny model's settings and the texts of the arithmetic warm-up.

Not covered: what a model learns from the texts.
"""

from __future__ import annotations

import random
import re
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import DataConfig, SourceConfig
from rollout.errors import UserError
from rollout.prompts import PromptStream
from rollout.tiny import CHARACTERS, build_tokenizer, tiny_model_config, warmup_batches, warmup_completion, worked_sum, wrong_guess

TOKENIZER = build_tokenizer()


@given(st.text(alphabet=CHARACTERS, max_size=60))
@settings(deadline=None)
def test_one_id_per_character_and_back(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text) and all(i > 2 for i in ids)
    assert TOKENIZER.decode(ids) == text


def test_ids_are_fixed_and_survive_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    build_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (TOKENIZER, loaded):
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
        assert tokenizer("47+38=\n é")["input_ids"] == [7, 10, 13, 6, 11, 17, 28, 27, 2]
        assert tokenizer.decode([7, 10, 1, 0], skip_special_tokens=True) == "47"
        assert tokenizer("<eos>")["input_ids"] == [1]
        assert tokenizer.chat_template is None
    assert len(loaded) == len(TOKENIZER) == len(CHARACTERS) + 3


def test_model_settings_make_a_qwen3_config() -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(**tiny_model_config(TOKENIZER, hidden=96, layers=3))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size) == (3, 3, 32, 288)
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id, config.tie_word_embeddings) == (len(TOKENIZER), 1, 0, True)
    with pytest.raises(UserError, match="tiny_hidden = 100 must be a multiple of 32"):
        tiny_model_config(TOKENIZER, hidden=100)


def check_work(text: str) -> None:
    """Every equation in a worked sum holds."""
    for left, right in re.findall(r"([-+\d]+)=(-?\d+)", text):
        assert sum(int(t) for t in re.findall(r"[+-]?\d+", left)) == int(right), text


def test_worked_sums_are_right_for_all_two_digit_sums() -> None:
    for a in range(10, 100):
        for b in range(10, 100):
            words = worked_sum(f"{a}+{b}=").split(" ")
            ones, tens = a % 10 + b % 10, a // 10 + b // 10 + (a % 10 + b % 10) // 10
            carry = "+1" if ones > 9 else ""
            assert words == [f"{a % 10}+{b % 10}={ones}", f"{a // 10}+{b // 10}{carry}={tens}", str(a + b)]


def test_worked_sums_by_example() -> None:
    assert worked_sum("47+38=") == "7+8=15 4+3+1=8 85"
    assert worked_sum("95+7=") == "5+7=12 9+0+1=10 102"
    assert worked_sum("3+4+9=") == "3+4=7 7 7+9=16 16"
    assert worked_sum("47+38+25=") == "7+8=15 4+3+1=8 85 5+5=10 8+2+1=11 110"
    assert worked_sum("3-9+12=") == "3-9=-6 -6 -6+12=6 6"


@given(st.lists(st.integers(0, 99999), min_size=2, max_size=6), st.integers(0, 63))
@settings(deadline=None)
def test_worked_sums_of_any_length(terms: list[int], signs: int) -> None:
    signed = [terms[0], *(-t if signs >> i & 1 else t for i, t in enumerate(terms[1:]))]
    text = worked_sum(str(terms[0]) + "".join(f"{'-' if signs >> i & 1 else '+'}{t}" for i, t in enumerate(terms[1:])) + "=")
    check_work(text)
    assert int(text.split(" ")[-1]) == sum(signed)


@given(st.integers(-500, 99999), st.integers(0, 1000))
@settings(deadline=None)
def test_wrong_guesses_are_wrong_and_near(answer: int, seed: int) -> None:
    guess = wrong_guess(answer, random.Random(seed))
    assert guess != answer
    assert answer < 0 or 0 <= guess < 10 * max(answer, 9) + 10


def test_shares_of_the_two_habits() -> None:
    rng, n = random.Random(0), 6000
    said = [warmup_completion("47+38=", "85", rng) for _ in range(n)]
    guesses = [s for s in said if " " not in s]
    assert {s for s in said if " " in s} == {"7+8=15 4+3+1=8 85"}
    assert abs(len(guesses) / n - 0.7) < 0.02
    assert abs(guesses.count("85") / len(guesses) - 1 / 3) < 0.02
    assert all(re.fullmatch(r"\d+", g) for g in guesses)
    assert warmup_completion("1+1=", "2", random.Random(0), guess_share=0) == "1+1=2 2"
    assert warmup_completion("1+1=", "2", random.Random(0), guess_share=1, right_share=1) == "2"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_other_prompts_are_refused(share: float) -> None:
    with pytest.raises(UserError, match=r"not the prompt 'gcd\(4,6\)='"):
        warmup_completion("gcd(4,6)=", "2", random.Random(0), guess_share=share)


def test_batches_are_seeded_and_never_held_out() -> None:
    config = DataConfig(sources=[SourceConfig(task="addition", options={"digits": 1}), SourceConfig(task="chain_sum")])

    def batches(seed: int) -> list[list[tuple[str, str]]]:
        return list(islice(warmup_batches(PromptStream(config, TOKENIZER, seed), seed, batch_size=16), 20))

    first = batches(1)
    assert first == batches(1) != batches(2)
    held = {p.text for p in PromptStream(config, TOKENIZER, 0).heldout(10_000)}
    prompts = {prompt for batch in first for prompt, _ in batch}
    assert len(held) > 50 and not held & prompts
    assert {prompt.count("+") for prompt in prompts} == {1, 2}
