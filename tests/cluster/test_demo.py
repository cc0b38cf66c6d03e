"""The demo's frame: its flags, its control run, and what it prints at the end. The training itself is tests/e2e's."""

from __future__ import annotations

import pytest

from cluster import demo
from rollout.errors import UserError
from rollout.prompts import PromptStream
from rollout.tiny import build_tokenizer

SUMMARY = {
    "accuracy_before": 0.3125, "accuracy_after": 0.9375, "steps": 40, "seconds_setup": 200.0, "seconds_warmup": 90.25, "seconds_rl": 100.0,
    "export": "/runs/a/exports/step-000040",
}  # fmt: skip


def test_flags_go_to_the_recipe() -> None:
    cfg = demo.config(["--seed", "2", "--run_dir", "x", "--steps", "5"])
    assert (cfg.name, cfg.seed, cfg.run_dir, cfg.steps) == ("arithmetic", 2, "x", 5)
    assert [s.verifier for s in cfg.data.sources] == ["numeric"] and cfg.data.eval_sources == []


def test_the_control_draws_its_rewards_and_is_judged_by_the_true_verifier_on_prompts_it_never_saw() -> None:
    plain, control = demo.config(["--seed", "1"]), demo.config(["--random_rewards", "--seed", "1"])
    assert [s.verifier for s in control.data.sources] == ["random"]
    assert [s.verifier for s in control.data.eval_sources] == ["numeric"]
    same = control.model_copy(update={"data": plain.data})
    assert same == plain
    tokenizer = build_tokenizer()
    streams = [PromptStream(c.data, tokenizer=tokenizer, seed=1) for c in (plain, control)]
    asked = [[p.text for p in s.heldout(200)] for s in streams]
    trained = {streams[1].next().text for _ in range(3000)}  # type: ignore[union-attr]
    assert len(set(asked[1])) == 200 and not trained & set(asked[1])
    assert {p.verifier for p in streams[1].heldout(5)} == {"numeric"}


def test_a_wrong_flag_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--sede", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("winnow: unknown flag --sede") and said.count("\n") == 1
    with pytest.raises(UserError):
        demo.config(["--steps", "many"])


def test_the_report_says_where_the_time_went_and_the_accuracies() -> None:
    assert demo.report(SUMMARY, 250.0).splitlines() == [
        "where the time went:",
        "  set-up                      200.0 s",
        "  warm-up                      90.2 s",
        "  RL                          100.0 s",
        "  start, evaluation, export    59.8 s",
        "  all                         450.0 s",
        "held-out greedy accuracy: 0.312 before RL, 0.938 after 40 steps",
        "export: /runs/a/exports/step-000040",
    ]
    assert "not measured before RL" in demo.report({**SUMMARY, "accuracy_before": None}, 250.0)


def test_the_seconds_of_set_up_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (("12.5", 12.5), ("", 0.0), ("soon", 0.0)):
        monkeypatch.setenv("WINNOW_SETUP_SECONDS", text)
        assert demo.setup_seconds() == seconds
    monkeypatch.delenv("WINNOW_SETUP_SECONDS")
    assert demo.setup_seconds() == 0.0
