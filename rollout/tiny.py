"""A model that starts from nothing: character-level tokenizer, a small Qwen3's settings, and the texts of its warm-up.

The warm-up teaches two habits of answering a sum: guessing at once, right about a third of the time, and working it out
digit by digit. Reinforcement learning then finds that working it out pays.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.errors import UserError
from rollout.prompts import PromptStream

PAD, EOS, UNK = 0, 1, 2
SPECIALS = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = string.digits + "+-*/=().,:?!'\" \n" + string.ascii_lowercase + string.ascii_uppercase + "<>#"
MODEL_LENGTH = 512


def build_tokenizer(folder: str | Path | None = None, chat_template: str | None = None) -> Any:
    """A `PreTrainedTokenizerFast` with one id per character, saved into `folder` if one is given.

    Ids 0, 1, 2 are padding, end of answer and unknown; no special token is added on either side.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        model_max_length=MODEL_LENGTH, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = chat_template
    if folder is not None:
        tokenizer.save_pretrained(str(folder))
    return tokenizer


def tiny_model_config(tokenizer: Any, hidden: int = 128, layers: int = 4) -> dict[str, Any]:
    """Arguments of a `Qwen3Config` for the tiny model. Raises UserError unless `hidden` is a multiple of 32 (its head size)."""
    if hidden % 32:
        raise UserError(
            f"tiny_hidden = {hidden} must be a multiple of 32, the size of one head: take "
            + " or ".join(str(size) for size in (hidden // 32 * 32, hidden // 32 * 32 + 32) if size)
        )
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "head_dim": 32,
        "max_position_embeddings": MODEL_LENGTH,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def terms_of(prompt: str) -> list[int]:
    """The signed terms of a sum such as `47+38=` or `3+4-5=`. Raises UserError for any other text."""
    if not re.fullmatch(r"\d+([+-]\d+)+=", prompt):
        raise UserError(
            f"the arithmetic warm-up knows sums like 47+38=, not the prompt {prompt!r}: set the source to task addition or chain_sum"
        )
    return [int(t) for t in re.findall(r"[+-]?\d+", prompt)]


def worked_sum(prompt: str) -> str:
    """A sum worked out digit by digit from the right, then its value: `7+8=15 4+3+1=8 85` for `47+38=`.

    With several terms each further one is added in the same way to the value so far; one that is taken away is written whole.
    """
    first, *rest = terms_of(prompt)
    total, words = first, []
    for term in rest:
        if term < 0 or total < 0:
            words.append(f"{total}{term:+d}={total + term}")
        else:
            words += _columns(total, term)
        total += term
        words.append(str(total))
    return " ".join(words)


def _columns(a: int, b: int) -> list[str]:
    """Addition of two numbers by columns, the carry as a third summand."""
    words, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        words.append(f"{x}+{y}+{carry}={x + y + carry}" if carry else f"{x}+{y}={x + y}")
        carry = (x + y + carry) // 10
    return words


SLIP_SHARE = 0.7  # of the wrong guesses


def wrong_guess(answer: int, rng: random.Random) -> int:
    """A number near the answer that is not it: mostly one too many, else one digit off or somewhere close by.

    The habitual slip is more frequent than the right guess, so the likeliest guess is wrong: a model that has learned the
    guesser's habit well does not answer rightly by it under greedy decoding.
    """
    if rng.random() < SLIP_SHARE:
        return answer + 1
    size = 10 ** rng.randrange(max(1, len(str(abs(answer)))))
    offset = rng.choice([-1, 1]) * (size if rng.random() < 0.5 else rng.randint(1, 9) * size)
    guess = answer + offset
    return guess if guess >= 0 or answer < 0 else answer - offset


def warmup_completion(prompt: str, answer: str, rng: random.Random, guess_share: float = 0.7, right_share: float = 1 / 3) -> str:
    """The text to imitate after `prompt`, without the end token: a bare guess or the sum worked out.

    `guess_share` of the examples are guesses, and `right_share` of those are right.
    """
    if rng.random() >= guess_share:
        return worked_sum(prompt)
    terms_of(prompt)
    return answer if rng.random() < right_share else str(wrong_guess(int(answer), rng))


def warmup_batches(
    stream: PromptStream, seed: int, batch_size: int, guess_share: float = 0.7, right_share: float = 1 / 3
) -> Iterator[list[tuple[str, str]]]:
    """Endless batches of (prompt, completion), the same for the same stream and seed; held-out questions never occur.

    `stream` is used up as it goes: give the warm-up one of its own.
    """
    rng = random.Random(f"warmup/{seed}")
    while True:
        batch = []
        for _ in range(batch_size):
            prompt = stream.next()
            assert prompt is not None, "a stream without retired rows does not end"
            batch.append((prompt.text, warmup_completion(prompt.text, prompt.answer, rng, guess_share, right_share)))
        yield batch
