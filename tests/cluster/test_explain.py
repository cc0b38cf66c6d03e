"""`winnow explain`: the seeds' numbers, the keys that programs read, the time it takes, and its agreement with the loss's own gradient.

Not covered: how a table looks on a terminal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster import explain
from learner.objective import grpo_loss
from learner.variants import PRESETS

ROOT = Path(__file__).parents[2]
SEEDS = ["--rewards", "1,1,1,1,1,1,1,0", "--lengths", "200,200,200,200,200,200,200,1200"]
LENGTHS = np.array([200] * 7 + [1200])


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert explain.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert explain.main(list(argv)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def test_golden_group(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers 2 and 3 of the seeds."""
    grpo = told(capsys, *SEEDS)
    assert list(grpo) == ["variant", "flags", "advantages", "push_per_token", "push_whole", "max_prob", "steps_1_to_10"]
    assert grpo["variant"] == "grpo"
    assert [round(a, 2) for a in grpo["advantages"]] == [0.38] * 7 + [-2.65]
    assert grpo["max_prob"] == pytest.approx([0.72, 0.24, 0.06, 0.012])
    assert grpo["steps_1_to_10"] == 13
    tokens = LENGTHS.sum()
    np.testing.assert_allclose(grpo["push_per_token"], np.array(grpo["advantages"]) / tokens)
    np.testing.assert_allclose(grpo["push_whole"], np.array(grpo["advantages"]) * LENGTHS / tokens)
    dapo = told(capsys, *SEEDS, "--variant", "dapo")
    assert dapo["steps_1_to_10"] == 10
    assert dapo["max_prob"] == pytest.approx([0.768, 0.256, 0.064, 0.0128])
    assert dapo["flags"]["filter_groups"] is True and dapo["flags"]["kl_coef"] == 0


def test_golden_length_bias(capsys: pytest.CaptureFixture[str]) -> None:
    """Number 1 of the seeds: +0.5 and −0.5, and 6 : 1 per token; even under the others."""
    pair = ["--rewards", "1,0", "--lengths", "200,1200"]
    paper, dr, mean = told(capsys, *pair, "--compare", "grpo-paper,dr_grpo,grpo", "--max_tokens", "1200", "--adv_norm", "std")
    assert paper["push_whole"] == pytest.approx([0.5, -0.5])
    for got, ratio in ((paper, 6.0), (dr, 1.0), (mean, 1.0)):
        assert got["push_per_token"][0] / -got["push_per_token"][1] == pytest.approx(ratio)


@pytest.mark.parametrize("flags", [["--variant", "cispo"], ["--variant", "sapo"], ["--variant", "rloo"], ["--variant", "gspo"]])
def test_no_cap_no_numbers(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    got = told(capsys, *SEEDS, *flags)
    assert got["max_prob"] is None and got["steps_1_to_10"] is None


VARIANTS = [name for name, flags in PRESETS.items() if flags.get("baseline") != "critic"]


def test_push_is_the_gradient_of_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """−d loss / d new at ratio 1, by autograd, for every variant and aggregation."""
    lengths = torch.tensor([2, 3, 5, 1])
    group = ["--rewards", "1,0,0.5,1", "--lengths", "2,3,5,1", "--max_tokens", "8"]
    cases = [(v, "") for v in VARIANTS] + [("grpo", a) for a in ("prompt-mean", "token-sum")]
    for variant, loss_agg in cases:
        got = told(capsys, *group, "--variant", variant, *(["--loss_agg", loss_agg] if loss_agg else []))
        flags = got["flags"]
        names = ("policy_loss", "clip", "clip_high", "dual_clip", "ratio_level", "tau_pos", "tau_neg", "loss_agg")
        mask = torch.arange(5)[None] < lengths[:, None]
        new = torch.full((4, 5), -1.0, dtype=torch.float64, requires_grad=True)
        adv = torch.tensor(got["advantages"], dtype=torch.float64)
        out = grpo_loss(new, new.detach(), adv, mask, prompt=[0] * 4, max_len=8, **{n: flags[n] for n in names})
        out.loss.backward()
        assert new.grad is not None
        expected = torch.tensor(got["push_per_token"], dtype=torch.float64)[:, None] * mask
        torch.testing.assert_close(-new.grad, expected, rtol=1e-10, atol=1e-14)


def test_overlong_treatments(capsys: pytest.CaptureFixture[str]) -> None:
    """An answer of the budget's length is cut off: out of the loss under mask, one point less under penalty."""
    group = ["--rewards", "1,1,0", "--lengths", "4,10,5", "--max_tokens", "10", "--adv_norm", "none"]
    scored = told(capsys, *group)
    masked = told(capsys, *group, "--overlong", "mask")
    assert masked["advantages"] == scored["advantages"]
    assert masked["push_per_token"][1] == 0.0
    assert masked["push_per_token"][0] == pytest.approx(1 / 3 / 9)
    penalised = told(capsys, *group, "--overlong", "penalty", "--overlong_cache", "4")
    assert penalised["advantages"] == pytest.approx([1 - 1 / 3, -1 / 3, -1 / 3])


def test_group_without_spread_is_pushed_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    got = told(capsys, "--rewards", "0.1,0.1,0.1", "--lengths", "3,4,5", "--variant", "dapo")
    assert got["advantages"] == got["push_whole"] == [0.0, 0.0, 0.0]


def test_people_get_the_same_numbers_and_the_resolved_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([*SEEDS, "--variant", "dapo"]) == 0
    text = capsys.readouterr().out
    for word in ("+0.378", "-2.646", "0.768", "0.0128", "10", "filter_groups", "token-mean", "no clip binds"):
        assert word in text
    assert explain.main([*SEEDS, "--compare", "grpo,dr_grpo,dapo,gspo"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("grpo  dr_grpo", "+0.125", "no cap", "seq-mean-token-sum-norm"))


def test_several_steps_per_batch_make_the_clip_bind(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([*SEEDS, "--minibatches", "2"]) == 0
    assert "no clip binds" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([*SEEDS, "--variant", "dappo"], "nearest is dapo"),
        ([*SEEDS, "--policy_loss", "reinforce", "--clip", "0.1"], "clip = 0.1 has no effect"),
        ([*SEEDS, "--clip", "many"], "clip"),
        ([*SEEDS, "--clipp", "0.1"], "--clip"),
        ([*SEEDS, "--lr", "0.1"], "--lr does not change"),
        ([*SEEDS, "--variant", "dapo", "--compare", "grpo"], "give one of them"),
        ([*SEEDS, "--max_tokens", "100"], "below the longest answer"),
        ([*SEEDS, "--max_tokens", "x"], "whole number"),
        ([*SEEDS, "--variant", "dapo", "--overlong_cache", "10"], "--max_tokens"),
        (["--rewards", "1,0", "--lengths", "1,2,3"], "2 answers and --lengths 3"),
        (["--rewards", "1,x", "--lengths", "1,2"], "not a list of numbers"),
        (["--rewards", "1,nan", "--lengths", "1,2"], "not finite"),
        (["--rewards", "1,0", "--lengths", "1,-2"], "whole numbers from 0"),
        (["--rewards", "1,0"], "--lengths"),
        (["--rewards", "1", "--lengths", "5"], "group_size = 1"),
    ],
)
def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert words in refused(capsys, *argv)


def test_answers_quickly_without_ray_torch_or_a_model() -> None:
    """CPU seconds, not wall seconds: tests share their cores."""
    code = (
        "import sys, resource; from cluster.launch import main; code = main(sys.argv[1:]);"
        "u = resource.getrusage(resource.RUSAGE_SELF); bad = {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules);"
        "print(code, sorted(bad), u.ru_utime + u.ru_stime < 3.0, file=sys.stderr)"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", *SEEDS, "--compare", "grpo,dr_grpo,dapo,gspo"],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == "0 [] True\n"
    assert time.monotonic() - start < 60
