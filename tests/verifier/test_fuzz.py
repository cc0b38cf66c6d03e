"""Hostile responses through the pool: no hang, no error, no leak. Does not cover whether verdicts are right, or untrusted programs.

`WINNOW_FUZZ=20000` sets how many responses there are (default 400); 4 per core are in flight.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from verifier.config import VerifyConfig
from verifier.pool import Item, VerifierPool

COUNT = int(os.environ.get("WINNOW_FUZZ", "400"))
BATCH = 40
DEADLINE = 2.0
CASES = [
    (c["verifier"], c["gold"], c["response"] if "response" in c else "".join(t * n for t, n in c["response_rep"]))
    for name in ("math", "gsm8k")
    for c in map(json.loads, (Path(__file__).parent / "cases" / f"{name}.jsonl").read_text().splitlines())
]
ATOMS = [
    *"0123456789+-*/^_()[]{}\\,.=<>|xynei!%$&:;' \n\x00\ud800\udfff\u2212\u221a\u00b2\u00bd\uff15\u0663\u202e",
    *(
        "\\" + name
        for name in ("frac", "sqrt", "boxed{", "text{", "pm", "cup", "infty", "begin{pmatrix}", "end{pmatrix}", "\\", "sin", "log_")
    ),
    *("\\" + name for name in ("sum_{k=1}^{n}", "int_0^1", "left(", "right)")),
    *("\\" + name for name in ("{", "}", "binom", "overline{3}", "cdot", "mathbb{R}", "setminus")),
    *("####", "</think>", "<think>", "Answer:", "^\\circ", "10^", "999999999", " or ", " and "),
]


def nested(n: int, kind: int) -> str:
    pairs = [
        ("(", ")"),
        ("{", "}"),
        ("\\sqrt{", "}"),
        ("\\frac{1}{1+", "}"),
        ("[", "]"),
        ("\\sin(", ")"),
        ("|", "|"),
        ("\\left(", "\\right)"),
        ("-", ""),
    ]
    a, b = pairs[kind % len(pairs)]
    return a * n + "x" + b * n


def tower(n: int, base: int, kind: int) -> str:
    return "^{".join([str(base)] * (n + 1)) + "}" * n if kind else "(" * n + str(base) + "!)" * n


def mutated(rng: random.Random) -> str:
    text = rng.choice(CASES)[2]
    for _ in range(rng.randrange(1, 6)):
        i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        j = min(j, i + rng.choice((1, 10, 1000)))
        piece = rng.choice((text[i:j] * rng.randrange(4), rng.choice(ATOMS), "", text[i:j][::-1], rng.choice(CASES)[2][:80]))
        text = text[:i] + piece + text[j:]
    return text


def boxed(text: str) -> str:
    return f"So \\boxed{{{text}}}."


SEEDED = st.integers(0, 2**40).map(lambda seed: mutated(random.Random(seed)))
FORMULAS = st.lists(st.sampled_from(ATOMS), max_size=60).map("".join)
REPEATED = ["1", "(", "\\boxed{", "x^", "1,", "\\frac{", "answer is ", "#### ", "```\n", "1 234 ", "a", "$", "\\text{", "- ", "\u00b2"]
INSIDE = ["1+", "x", "1,", "x+", "(1,", "\\{", "2^", "\\pm 1,", "1<", "a=1,", "\\sqrt 2+", "1:", "cm ", "\\frac12"]
LARGE = st.builds(
    lambda a, n, end: a * (n // len(a)) + end,
    st.sampled_from(REPEATED),
    st.integers(10**3, 10**6),
    st.sampled_from(["", "\\boxed{5}", "x"]),
)
LONG = st.builds(lambda a, n: boxed(a * (n // len(a)) + "1"), st.sampled_from(INSIDE + ATOMS), st.integers(10, 4096))
HOSTILE = st.one_of(
    SEEDED,
    FORMULAS.map(boxed),
    FORMULAS,
    st.text(max_size=200).map(boxed),
    st.builds(nested, st.integers(1, 400), st.integers(0, 8)).map(boxed),
    st.builds(tower, st.integers(1, 8), st.integers(2, 10**6), st.integers(0, 1)).map(boxed),
    st.integers(1, 10**9).map(lambda n: boxed(f"{n}!")),
    st.integers(1, 3000).map(lambda n: boxed("0." + "7" * n)),
    st.builds(lambda a, b: boxed(f"({a}+x)^{{{b}}}-1"), st.sampled_from(["x", "\\sqrt{2}", "y+z"]), st.integers(2, 10**7)),
    LARGE,
    LONG,
)
GOLDS = st.one_of(
    st.sampled_from(CASES).map(lambda c: c[1]), st.sampled_from(["5", "x+1", "(1,2)", "\\frac{1}{2}", "(x+y+z)^{60}", "\\sqrt{2}", "[0,1)"])
)
ITEMS = st.builds(
    lambda name, gold, response: Item(name, "42" if name != "math" else gold, response),
    st.sampled_from(["math"] * 6 + ["gsm8k", "numeric"]),
    GOLDS,
    HOSTILE,
)


def test_hostile_responses(capsys):
    processes = 4 * (os.cpu_count() or 1) if COUNT > 1000 else 2
    config = VerifyConfig(verify_timeout=DEADLINE, verifier_processes=processes, verify_memory_mb=1024)
    worst, slowest, statuses, memory = 0.0, None, {"value": 0, "timeout": 0}, []
    late_ones: list[str] = []

    with VerifierPool(config, ["math", "gsm8k", "numeric"]) as pool:
        pool.wait_ready()

        @given(st.lists(ITEMS, min_size=BATCH, max_size=BATCH, unique_by=lambda i: (i.gold, i.response)))
        @settings(
            max_examples=max(1, COUNT // BATCH),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def judge(items):
            nonlocal worst, slowest
            start = time.monotonic()
            verdicts = pool.verify_sync(items)
            took = time.monotonic() - start
            late = sum(v.status == "timeout" for v in verdicts)
            late_ones.extend(f"{i.gold[:40]!r} {i.response[:120]!r}" for i, v in zip(items, verdicts, strict=True) if v.status == "timeout")
            for item, v in zip(items, verdicts, strict=True):
                assert v.status in statuses and v.reward in (0, 1), (item, v)
                assert v.seconds < DEADLINE + 1, (item, v)
                assert v.status == "timeout" or v.seconds < DEADLINE + 0.5
                statuses[v.status] += 1
                if v.seconds > worst:
                    worst, slowest = v.seconds, item
            assert took < 10 + DEADLINE + (late // processes + 1) * (DEADLINE + 1)
            memory.append(sum(psutil.Process(p).memory_info().rss for p in pool.pids() if psutil.pid_exists(p)) >> 20)

        judge()
        pids = pool.pids()
        stats = pool.stats
    assert stats.errors == 0 and stats.died == 0
    assert not any(psutil.pid_exists(p) for p in pids)
    assert max(memory) < 250 * (processes + 1)  # MiB: verifiers are small, whatever came in
    with capsys.disabled():
        print(*late_ones, sep="\n")
        print(f"\n{statuses} worst {worst:.2f} s ({str(slowest)[:120]}), memory of the pool at most {max(memory)} MiB, {stats}")
