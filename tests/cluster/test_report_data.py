"""What a report reads and counts: series, lengths, ledger, timeline, samples cut into tokens with their push.

Does not cover how any of it looks, nor tokenizers other than by character and byte.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.report_data import Run, browsable, differing, labels, length_spans, read_run, read_runs, thinned
from cluster.report_plots import groups_by_state, panels, smooth, staleness, timeline, tokens_by_account
from cluster.report_tokens import Pieces
from rollout.errors import UserError
from tests.cluster.making_runs import character_tokenizer, make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(make_run(tmp_path / "one"), "one")


def test_series_are_columns_with_gaps_where_nothing_was_logged(run: Run) -> None:
    assert run.steps == list(range(1, 13))
    assert run.values("buffer.reward") == pytest.approx([0.3 + 0.4 * s / 12 for s in range(1, 13)])
    assert [s for s, v in zip(run.steps, run.values("eval.greedy"), strict=True) if v is not None] == [5, 10]
    assert run.values("train.kl_ref") == [None] * 12
    assert list(run.series)[:4] == ["reward", "informative", "resp_len", "clipfrac"], "in the table's order"
    assert run.star("buffer.staleness.*") == {"0": [24] * 12, "1": [8] * 12}
    assert run.setting("objective.loss_agg") == "token-mean" and run.setting("optim.lr", 3) == 3


def test_a_crash_in_mid_line_costs_that_line_and_null_is_nothing_measured(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", 3)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "reward": null}\n{"step": 5, "rew')
    read = read_run(folder, "one")
    assert read.steps == [1, 2, 3, 4] and read.values("buffer.reward")[3] is None


def cases(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "metrics.jsonl").write_text("")
    damaged = make_run(tmp_path / "damaged", 3)
    text = (damaged / "metrics.jsonl").read_text()
    (damaged / "metrics.jsonl").write_text("what?\n" + text)
    config = make_run(tmp_path / "config", 3)
    (config / "config.toml").write_text("= 3")
    return {
        "no folder": (tmp_path / "absent", "absent is not a folder"),
        "no metrics": (tmp_path / "empty", "empty has no metrics.jsonl"),
        "no step": (tmp_path / "nothing", "empty metrics.jsonl"),
        "damaged": (damaged, "metrics.jsonl is damaged at line 1"),
        "config": (config, "config.toml is no TOML"),
    }


@pytest.mark.parametrize("case", ["no folder", "no metrics", "no step", "damaged", "config"])
def test_what_is_no_run_is_one_sentence(tmp_path: Path, case: str) -> None:
    folder, said = cases(tmp_path)[case]
    with pytest.raises(UserError, match=said) as caught:
        read_run(folder, "x")
    assert "\n" not in str(caught.value)


def test_labels_tell_runs_apart() -> None:
    assert labels([Path("/a/x"), Path("/a/y/")]) == ["x", "y"]
    assert labels([Path("/a/x"), Path("/b/x"), Path("/b/y")]) == ["a/x", "b/x", "b/y"]
    assert labels([Path("/a/x"), Path("/a/x")]) == ["x (1)", "x (2)"]


def test_settings_in_which_runs_differ(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a", 2), make_run(tmp_path / "b", 2, variant="grpo-paper", loss_agg="seq-mean-token-mean")])
    assert differing(runs) == [
        ("variant", ['"dapo"', '"grpo-paper"']),
        ("objective.loss_agg", ['"token-mean"', '"seq-mean-token-mean"']),
    ]


def test_evaluations_come_from_their_file_with_the_one_before_training(run: Run, tmp_path: Path) -> None:
    assert run.points("eval.greedy")[0] == list(range(1, 13)), "without the file, as the steps logged them"
    rows = [{"step": 0, "greedy": 0.25}, {"step": 10, "greedy": 0.5}, {"step": 10, "greedy": 0.625, "avg_at_k": None}]
    (run.folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_run(run.folder, "one")
    assert read.points("eval.greedy") == ([0, 10], [0.25, 0.625]) and read.points("eval.avg_at_k") == ([0, 10], [None, None])
    assert panels([read], ("eval.greedy",))[0].lines == [("one", [0, 10], [0.25, 0.625])]


# -- plots ------------------------------------------------------------------------------------------------------------


def test_panels_have_a_line_per_run_and_only_what_was_logged(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a", 2), make_run(tmp_path / "b", 5)])
    made = panels(runs, ("buffer.reward", "train.kl_ref", "eval.greedy"))
    assert [p.title for p in made] == ["reward", "eval/greedy"]
    assert [(label, steps) for label, steps, _ in made[0].lines] == [("a", [1, 2]), ("b", [1, 2, 3, 4, 5])]
    assert panels(runs, ("buffer.resp_len",))[0].title == "resp_len [tokens]"


def test_running_means_leave_gaps_where_they_are() -> None:
    assert smooth([1.0, None, 3.0, 5.0], 2) == [1.0, None, 2.0, 4.0]


def test_the_books_add_up_to_what_was_dispatched_and_received(run: Run) -> None:
    assert run.books is not None and not run.books.problems
    assert groups_by_state(run.books.last) == {"trained": 12, "uninformative(all_right)": 12}
    assert tokens_by_account(run.books.last) == {"trained": 300, "masked(overlong)": 60, "uninformative": 120}
    assert sum(tokens_by_account(run.books.last).values()) == run.books.last.received


def test_the_timeline_lays_steps_end_to_end(run: Run) -> None:
    made = timeline(run)
    assert made.total == pytest.approx(24.0)
    assert made.stretches["seconds_train"][1] == pytest.approx((3.0, 0.6, 2)), "after the wait of the second step"
    assert made.share("seconds_generate_wait") == pytest.approx(0.5)
    assert [step for _, _, step in made.stretches["seconds_eval"]] == [5, 10]
    assert made.idle[3] == pytest.approx(0.25) and made.idle[4] == pytest.approx(0.5 / 1.7), "evaluation left out"
    assert "seconds_checkpoint" not in made.stretches and made.share("seconds_checkpoint") == 0.0


def test_staleness_is_summed_over_the_steps(run: Run) -> None:
    assert staleness(run) == {0: 288, 1: 96}


def test_lengths_of_the_first_and_last_part(run: Run) -> None:
    first, last = length_spans(run)
    assert (first.first_step, first.last_step, last.first_step, last.last_step) == (1, 2, 11, 12)
    assert (first.right, first.other) == ({18: 6}, {3: 10}) and (last.right, last.other) == ({18: 6}, {3: 2})


def test_lengths_of_a_run_that_logged_none_come_from_its_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", 1)
    (folder / "lengths.jsonl").unlink()
    (only,) = length_spans(read_run(folder, "a"))
    assert (only.right, only.other) == ({10: 4}, {5: 4})


def test_bins_of_two_budgets_meet_in_the_wider(run: Run) -> None:
    rows = [{"step": 1, "width": 1, "right": {"3": 1, "4": 1}, "other": {}}, {"step": 2, "width": 4, "right": {"1": 5}, "other": {}}]
    (first, last) = length_spans(Run(**{**vars(run), "lengths": rows}), share=0.5)
    assert (first.right, last.right) == ({3: 1, 4: 1}, {4: 5})
    (both, _) = length_spans(Run(**{**vars(run), "lengths": rows}), share=1.0)
    assert (both.width, both.right) == (4, {0: 1, 4: 6})


# -- samples ----------------------------------------------------------------------------------------------------------


def test_answers_are_cut_into_tokens_with_the_push_on_each(run: Run) -> None:
    shown = browsable(run, 10**9)
    assert [(s["step"], s["uid"]) for s in shown[:3]] == [(1, 0), (1, 1), (2, 2)] and len(shown) == 24
    right, wrong = shown[0]["answers"][:2]
    assert right["pieces"] == ["8", "+", "3", "=", "1", "1", " ", "9", "1", "<eos>"]
    assert (right["push"], wrong["push"]) == (1 / 128, -1 / 128)


def old(run: Run, loss_agg: str) -> Run:
    """The run as if it had logged no weights."""
    samples = [{**s, "answers": [{k: v for k, v in a.items() if k not in ("weight", "ids")} for a in s["answers"]]} for s in run.samples]
    return Run(**{**vars(run), "samples": samples, "config": {"objective": {"loss_agg": loss_agg}, "rollout": {"max_tokens": 20}}})


@pytest.mark.parametrize(
    ("mode", "right", "wrong"),
    [("token-mean", 1 / 30, -1 / 30), ("seq-mean-token-mean", 1 / 40, -1 / 20), ("seq-mean-token-sum-norm", 1 / 80, -1 / 80)],
)
def test_without_logged_weights_the_group_is_taken_for_the_batch(run: Run, mode: str, right: float, wrong: float) -> None:
    shown = browsable(old(run, mode), 10**9)[0]["answers"]
    assert [a["push"] for a in shown] == pytest.approx([right, wrong, right, wrong])
    assert shown[0]["pieces"] == ["8+3=11 91"]


def test_samples_are_thinned_evenly_to_the_budget(run: Run) -> None:
    assert thinned([1, 2, 3, 4, 5], [10] * 5, 30) == [1, 3, 5]
    assert thinned([1, 2, 3, 4], [10] * 4, 25) == [2, 4]
    assert thinned([1, 2, 3], [10] * 3, 5) == [3] and thinned([], [], 5) == []
    size = len(json.dumps(browsable(run, 6_000)))
    assert size < 6_000 and browsable(run, 6_000)[-1]["step"] == 12


# -- tokens -----------------------------------------------------------------------------------------------------------


def byte_tokenizer() -> Tokenizer:
    """A token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def words_tokenizer() -> Tokenizer:
    """Words that are decoded with a space between, so that a word alone is not what it adds."""
    return Tokenizer(models.WordLevel({"so": 0, "it": 1, "is": 2}, unk_token="?"))


def test_bytes_of_one_character_are_one_piece() -> None:
    made = byte_tokenizer()
    assert Pieces(made).cut("aü9", made.encode("aü9").ids) == ["a", "ü", "9"]


def test_a_decoder_that_looks_back_gives_the_space_to_the_token_that_follows() -> None:
    assert Pieces(words_tokenizer()).cut("so it is so", [0, 1, 2, 0]) == ["so", " it", " is", " so"]


@pytest.mark.parametrize(
    ("text", "ids", "pieces"),
    [
        ("12", [49, 50, 0], ["1", "2", "<eos>"]),
        ("12345", [49, 50], ["1", "2", "345"]),  # only the first ids were kept
        ("1", [49, 50, 51], ["1"]),  # the text was cut
        ("99", [49, 50], ["99"]),  # the ids of another text
        ("12", [], ["12"]),
        ("", [0], ["<eos>"]),
        ("", [], []),
    ],
)
def test_pieces_are_the_text_whatever_is_missing(text: str, ids: list[int], pieces: list[str]) -> None:
    assert Pieces(character_tokenizer()).cut(text, ids) == pieces


def test_without_a_tokenizer_that_can_be_read_a_text_is_one_piece(tmp_path: Path) -> None:
    assert Pieces.of(tmp_path).cut("12", [49, 50]) == ["12"]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    assert Pieces.of(tmp_path).cut("12", [49, 50]) == ["12"]


