"""Prompts to tokens, stop ids, decoding, with a small tokenizer and a template in the manner of Qwen3.

Not covered: the templates of real checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.chat import decode, encode_prompt, generation_eos, load_tokenizer, require_template, stop_token_ids
from rollout.config import DataConfig
from rollout.errors import UserError
from rollout.tiny import build_tokenizer

TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)


@pytest.fixture(scope="module")
def qwen() -> Any:
    """Turns end with <|im_end|>, which is not the EOS: <|endoftext|> is."""
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def test_raw_is_the_text_as_it_is() -> None:
    tokens_P, text = encode_prompt(build_tokenizer(), "47+38=", DataConfig())
    assert text == "47+38=" and tokens_P.dtype == np.int32 and tokens_P.tolist() == [7, 10, 13, 6, 11, 17]


def test_raw_keeps_a_bos_and_loses_an_eos() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A <eos>", special_tokens=[("<unk>", 2), ("<eos>", 1)])
    assert encode_prompt(tokenizer, "47", DataConfig())[0].tolist() == [2, 7, 10]


def test_chat_renders_system_messages_and_settings(qwen: Any) -> None:
    config = DataConfig(prompt_format="chat", system_prompt="Be brief.", template={"enable_thinking": False})
    tokens_P, text = encode_prompt(qwen, "47+38?", config)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n47+38?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert tokens_P[0] == qwen.convert_tokens_to_ids("<|im_start|>")
    assert (tokens_P == qwen.convert_tokens_to_ids("<|im_end|>")).sum() == 2
    assert "<think>" not in encode_prompt(qwen, "47+38?", DataConfig(prompt_format="chat"))[1]


def test_chat_takes_messages_and_its_own_system_prompt_wins(qwen: Any) -> None:
    messages = [{"role": "system", "content": "old"}, {"role": "user", "content": "a"}]
    kept = encode_prompt(qwen, messages, DataConfig(prompt_format="chat"))[1]
    assert kept == "<|im_start|>system\nold<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    won = encode_prompt(qwen, messages, DataConfig(prompt_format="chat", system_prompt="new"))[1]
    assert won == kept.replace("old", "new")
    assert messages[0]["content"] == "old"


def test_chat_text_gets_no_second_bos(qwen: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer(chat_template="<unk>{{ messages[0].content }}")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    assert encode_prompt(tokenizer, "47", DataConfig(prompt_format="chat"))[0].tolist() == [2, 7, 10]


def test_sentences(qwen: Any) -> None:
    with pytest.raises(UserError, match="data.prompt_format = 'chat' needs a tokenizer with a chat template"):
        require_template(build_tokenizer(), DataConfig(prompt_format="chat"))
    with pytest.raises(UserError, match="prompt_format = 'raw' needs prompts that are text"):
        encode_prompt(qwen, [{"role": "user", "content": "a"}], DataConfig())
    with pytest.raises(UserError, match="is empty once tokenised"):
        encode_prompt(qwen, "", DataConfig())
    refusing = build_tokenizer(chat_template="{{ raise_exception('no system role here') }}")
    with pytest.raises(UserError, match="roles system, user .*no system role here"):
        encode_prompt(refusing, "a", DataConfig(prompt_format="chat", system_prompt="s"))
    with pytest.raises(UserError, match="has no eos_token"):
        tokenizer = build_tokenizer()
        tokenizer.eos_token = None
        stop_token_ids(tokenizer)


def test_stop_ids_of_every_origin(qwen: Any) -> None:
    text_end, turn_end = (qwen.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_end|>"))
    assert stop_token_ids(qwen) == [text_end]
    assert stop_token_ids(qwen, [turn_end, text_end]) == sorted([text_end, turn_end])
    assert stop_token_ids(qwen, turn_end) == sorted([text_end, turn_end])
    assert stop_token_ids(qwen, chat=True) == sorted([text_end, turn_end])
    assert stop_token_ids(build_tokenizer(), None, chat=True) == [1]


def test_generation_config_of_a_checkpoint(tmp_path: Path) -> None:
    assert generation_eos(str(tmp_path)) == []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert generation_eos(str(tmp_path)) == [5, 3]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 4}')
    assert generation_eos(str(tmp_path)) == [4]


def test_decode_leaves_out_special_tokens_only(qwen: Any) -> None:
    end = qwen.convert_tokens_to_ids("<|im_end|>")
    ids = [*qwen("a , b <think>")["input_ids"], end]
    assert decode(qwen, np.array(ids)) == "a , b <think>"
    assert decode(build_tokenizer(), [7, 27, 19, 1, 0]) == "4 )"


def test_tokenizer_that_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no tokenizer that loads"):
        load_tokenizer(str(tmp_path))
    build_tokenizer(tmp_path)
    assert load_tokenizer(str(tmp_path))("4")["input_ids"] == [7]
