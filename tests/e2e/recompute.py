"""Greedy accuracy of an exported checkpoint on two-digit sums, by a program that knows only transformers.

    python tests/e2e/recompute.py EXPORT [--sums 500] [--seed 1000003] [--max_new_tokens 24]

Prompts are the raw text `47+38=`; an answer is right when the last integer in it is the sum. Nothing of winnow is imported,
so that a fault in its prompts, tokens, verifier or export cannot hide in both places. Does not cover: sampled answers.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path


def sums(count: int, seed: int) -> list[tuple[str, int]]:
    """`count` different two-digit sums and their values."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [(f"{a}+{b}=", a + b) for a, b in random.Random(seed).sample(pairs, count)]


def last_integer(text: str) -> int | None:
    """The last run of digits in a text."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def answers(export: Path, prompts: Sequence[str], max_new_tokens: int, batch: int = 128) -> list[str]:
    """Greedy answers in float32 on the CPU. Prompts of equal length are batched, so that none is padded."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    ids = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
    out = [""] * len(prompts)
    for length in sorted({len(i) for i in ids}):
        same = [n for n, i in enumerate(ids) if len(i) == length]
        for start in range(0, len(same), batch):
            part = same[start : start + batch]
            inputs = torch.tensor([ids[n] for n in part])
            with torch.no_grad():
                full = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=max_new_tokens)
            for n, row in zip(part, full, strict=True):
                out[n] = tokenizer.decode(row[length:], skip_special_tokens=True)
    return out


def accuracy(export: Path, count: int = 500, seed: int = 1_000_003, max_new_tokens: int = 24) -> float:
    """Share of `count` sums, drawn by `seed`, that the model in `export` answers rightly."""
    asked = sums(count, seed)
    given = answers(export, [prompt for prompt, _ in asked], max_new_tokens)
    return sum(last_integer(text) == value for text, (_, value) in zip(given, asked, strict=True)) / count


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("--sums", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1_000_003)
    parser.add_argument("--max_new_tokens", type=int, default=24)
    args = parser.parse_args(argv)
    value = accuracy(args.export, args.sums, args.seed, args.max_new_tokens)
    print(json.dumps({"accuracy": value, "sums": args.sums, "seed": args.seed, "export": str(args.export)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
