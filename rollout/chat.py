"""Text to tokens and back: chat template, stop ids, decoding. Token in, token out.

Shape legend: P prompt tokens, T tokens of one answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.config import DataConfig
from rollout.errors import UserError

Message = dict[str, str]
TINY_MODEL_TYPE = "qwen3"  # the architecture of `model = tiny`


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder or hub name. Raises UserError where there is none."""
    if _is_tokenizer_json_alone(Path(model)):
        from transformers import PreTrainedTokenizerFast as Kind
    else:
        from transformers import AutoTokenizer as Kind

    try:
        tokenizer = Kind.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"model.model = {model!r} has no tokenizer that loads: give a checkpoint folder or a hub name that can be reached ({reason})"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # without files transformers makes one that knows no text
        raise UserError(f"model.model = {model!r} has no tokenizer files: copy tokenizer.json and tokenizer_config.json into it")
    return tokenizer


def _is_tokenizer_json_alone(folder: Path) -> bool:
    """Whether a folder has its tokenizer in `tokenizer.json` and nowhere else, as a tiny model's has.

    Then transformers' registry of tokenizer classes, which takes seconds to import torch, is not needed.
    """
    kind, config = (_json(folder / name) for name in ("tokenizer_config.json", "config.json"))
    own = kind.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in kind
    return own and config.get("model_type") == TINY_MODEL_TYPE and (folder / "tokenizer.json").is_file()


def _json(path: Path) -> dict[str, Any]:
    """A file's object; an empty one where it is missing or damaged, of which whoever needs it will tell."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def require_template(tokenizer: Any, config: DataConfig, model: str | None = None) -> None:
    """Raises UserError when chat prompts are wanted and the tokenizer, that of `model`, has no chat template."""
    if config.prompt_format == "chat" and not getattr(tokenizer, "chat_template", None):
        name = model or getattr(tokenizer, "name_or_path", "")
        whose = f"that of model.model = {name!r}" if name else "this model's"
        raise UserError(
            f"data.prompt_format = 'chat' needs a tokenizer with a chat template, and {whose} has none: set data.prompt_format = 'raw' "
            "or take an instruct model"
        )


def messages_of(prompt: str | Sequence[Message], system_prompt: str | None) -> list[Message]:
    """The conversation for the template; `system_prompt` comes first and takes the place of the row's own system message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if system_prompt is None:
        return messages
    if messages and messages[0]["role"] == "system":
        messages = messages[1:]
    return [{"role": "system", "content": system_prompt}, *messages]


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Message], config: DataConfig) -> tuple[np.ndarray, str]:
    """Prompt tokens (`tokens_P`, int32) and the text that the model sees.

    Raw prompts get the special tokens that the tokenizer puts in front (a BOS), never an EOS behind; chat prompts only what
    their template writes. Raises UserError for messages in raw format, a template that fails, or an empty prompt.
    """
    if config.prompt_format == "raw":
        if not isinstance(prompt, str):
            raise UserError(
                "prompt_format = 'raw' needs prompts that are text, and this set's are lists of chat messages: set "
                "prompt_format = 'chat', or prompt_field = '<column>.0.content' to take one message's text"
            )
        text, ids = prompt, list(tokenizer(prompt)["input_ids"])
        eos = tokenizer.eos_token_id
        if ids and ids[-1] == eos and not text.endswith(str(tokenizer.eos_token)):
            ids = ids[:-1]
    else:
        require_template(tokenizer, config)
        text = _render(tokenizer, messages_of(prompt, config.system_prompt), config.template)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise UserError(f"the prompt {text!r} is empty once tokenised: remove the row, or name another prompt_field")
    return np.array(ids, dtype=np.int32), text


def _render(tokenizer: Any, messages: list[Message], template: dict[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template))
    except Exception as error:  # templates raise what they like: jinja errors, or errors written into them
        reason = " ".join(str(error).split())[:200]
        roles = ", ".join(m["role"] for m in messages)
        raise UserError(
            f"the chat template refuses messages with the roles {roles} and template = {template!r}: change system_prompt or "
            f"template ({reason})"
        ) from error


def generation_eos(model: str) -> list[int]:
    """End-of-sequence ids of the checkpoint's generation config; empty where it has none."""
    if Path(model).is_dir():
        return _ids(_json(Path(model, "generation_config.json")).get("eos_token_id"))
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except (OSError, ValueError):
        return []
    return _ids(found)


def stop_token_ids(tokenizer: Any, generation_config_eos: int | Iterable[int] | None = None, chat: bool = False) -> list[int]:
    """All ids that end an answer, sorted: the tokenizer's EOS, the generation config's, and for chat the end of a turn.

    Chat checkpoints end turns with one token and documents with another (Qwen3: `<|im_end|>`, `<|endoftext|>`); both count.
    Raises UserError when there is none at all: no answer could then end by itself.
    """
    ids = set(_ids(tokenizer.eos_token_id)) | set(_ids(generation_config_eos))
    if chat and getattr(tokenizer, "chat_template", None):
        ids |= set(_turn_end(tokenizer))
    if not ids:
        raise UserError(
            "the tokenizer has no eos_token and the generation config no eos_token_id, so no answer could end: set eos_token "
            "in the checkpoint"
        )
    return sorted(ids)


def _ids(found: int | Iterable[int] | None) -> list[int]:
    if found is None:
        return []
    return [found] if isinstance(found, int) else [int(i) for i in found]


def _turn_end(tokenizer: Any) -> list[int]:
    """The special token that the template writes right after an assistant's words, if it writes one."""
    mark = "qzx"
    try:
        text = str(
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}], tokenize=False)
        )
    except Exception:  # a template that refuses this conversation tells us nothing
        return []
    tail = text[text.rfind(mark) + len(mark) :].lstrip() if mark in text else ""
    found = [token for token in tokenizer.all_special_tokens if token and tail.startswith(token)]
    return [int(tokenizer.convert_tokens_to_ids(max(found, key=len)))] if found else []


def decode(tokenizer: Any, tokens_T: Iterable[int]) -> str:
    """The text of an answer's tokens as verifiers read it: no special tokens, no cleaning of spaces."""
    return str(tokenizer.decode([int(t) for t in tokens_T], skip_special_tokens=True, clean_up_tokenization_spaces=False))
