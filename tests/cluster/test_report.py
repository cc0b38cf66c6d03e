"""`winnow report`: the page, the images, the CSV files, and the page as a browser shows it (where Chromium is installed).

Does not cover how the plots look. The browser test is skipped where there is no `chromium`.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster import report
from cluster.launch import main
from cluster.report_data import read_runs
from cluster.report_figures import figures
from tests.cluster.browser import PLOTS, browse, needs_chromium
from tests.cluster.making_runs import make_run

EVIL = '</script><script>document.body.dataset.evil = "1"</script><b>&amp;'


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("runs")
    one = make_run(base / "first", 12, text=EVIL)
    (one / "advice.jsonl").write_text(json.dumps({"step": 7, "rule": "x", "evidence": "resp_len grew <fast>", "remedy": "--lr"}) + "\n")
    return [one, make_run(base / "second", 80, seed=1, variant="grpo-paper", loss_agg="seq-mean-token-mean")]


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_holds_all_that_it_needs(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "page.html"
    assert main(["report", *map(str, two), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    page = out.read_text()
    assert "plotly.js v" in page and not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", page)
    data = data_of(page)
    assert [run["label"] for run in data["runs"]] == ["first", "second"]
    assert data["runs"][0]["series"]["reward"][0] == pytest.approx(0.3 + 0.4 / 12, abs=1e-5)
    assert data["runs"][1]["steps"][-1] == 80 and len(data["runs"][1]["samples"]) == 160
    assert "reward of the answers" in data["meanings"]["reward"] and "versions behind" in data["meanings"]["staleness/groups/1"]
    assert page.count('id="plot') == len(data["figures"])
    for cell in ("grpo-paper", "0.250", "0.750", "close", "step 7: resp_len grew &lt;fast&gt;; try --lr", "objective.loss_agg"):
        assert cell in page, cell


def test_what_a_model_wrote_cannot_become_part_of_the_page(two: list[Path]) -> None:
    page = report.page(read_runs(two))
    assert EVIL not in page
    assert "".join(data_of(page)["runs"][0]["samples"][0]["answers"][0]["pieces"][:-1]) == EVIL


def test_what_is_put_in_is_not_taken_for_a_place(tmp_path: Path) -> None:
    page = report.page(read_runs([make_run(tmp_path / "x", 2, text="@DATA@@BODY@")]))
    assert "".join(data_of(page)["runs"][0]["samples"][0]["answers"][0]["pieces"][:-1]) == "@DATA@@BODY@"


def test_the_plots_are_those_asked_for_in_their_order(two: list[Path]) -> None:
    made = figures(read_runs(two))
    assert [heading for heading, _, _ in made] == [
        "What to watch", "More curves", "Where every group and every token went", "Who worked and who waited: first",
        "Who worked and who waited: second", "Staleness", "Lengths of answers: first", "Lengths of answers: second",
    ]  # fmt: skip
    watch = json.loads(made[0][2].to_json())
    assert [note["text"] for note in watch["layout"]["annotations"]] == ["reward", "informative", "resp_len [tokens]", "clipfrac"]
    assert {trace["name"] for trace in watch["data"]} == {"first", "second"}
    assert made[3][1].startswith("Of all time: time/wait_generate 50%")


def test_500_steps_fit_into_10_megabytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", 500, text="8+3=11 " * 40)
    page = report.page(read_runs([run]))
    assert len(page.encode()) < 10_000_000
    data = data_of(page)
    steps = sorted({sample["step"] for sample in data["runs"][0]["samples"]})
    assert 20 < len(steps) < 500 and steps[-1] == 500 and len(set(b - a for a, b in zip(steps, steps[1:], strict=False))) == 1


def test_a_run_of_one_step_without_samples_or_books_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "short", 1)
    for name in ("samples.jsonl", "lengths.jsonl", "ledger.jsonl", "config.toml", "summary.json"):
        (run / name).unlink()
    assert main(["report", str(run)]) == 0
    assert data_of((run / "report.html").read_text())["runs"][0]["samples"] == []


# -- files ------------------------------------------------------------------------------------------------------------


def test_csv_has_every_series(two: list[Path], tmp_path: Path) -> None:
    assert main(["report", *map(str, two), "--out", str(tmp_path / "r.html"), "--csv", str(tmp_path / "csv")]) == 0
    with open(tmp_path / "csv" / "first.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(s) for s in range(1, 13)]
    assert float(rows[11]["reward"]) == 0.3 + 0.4 and rows[0]["eval/greedy"] == "" and float(rows[4]["eval/greedy"]) > 0.5
    assert (tmp_path / "csv" / "second.csv").exists()


def test_png_has_the_main_plots(two: list[Path], tmp_path: Path) -> None:
    assert main(["report", *map(str, two), "--out", str(tmp_path / "r.html"), "--png", str(tmp_path / "png")]) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "png").iterdir()}
    assert set(written) == {f"{stem}.png" for stem in ("curves", "more_curves", "ledger", "timeline", "staleness", "lengths")}
    assert [name for name, data in written.items() if not data.startswith(b"\x89PNG") or len(data) < 5_000] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/absent"], "RUN = .*absent is not a folder"),
        (["{run}", "--out", "{tmp}"], "--out .* is a folder: give the path of a file"),
        (["{run}", "--out", "{run}/metrics.jsonl/x.html"], "cannot be written"),
        ([], "RUN"),
    ],
)
def test_errors_are_one_sentence(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["report", *(a.format(run=two[0], tmp=tmp_path) for a in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line)


def test_images_without_matplotlib_are_one_sentence(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(two[0]), "--out", str(tmp_path / "r.html"), "--png", str(tmp_path / "png")]) == 2
    assert "--png needs matplotlib: pip install matplotlib" in capsys.readouterr().err


# -- in a browser -----------------------------------------------------------------------------------------------------

BROWSE = (
    PLOTS
    + """
  const look = () => ({ which: byId("which").textContent, at: byId("at").textContent, prompt: document.querySelector(".prompt").textContent,
    answers: [...document.querySelectorAll(".answer")].map((a) => a.textContent),
    colours: [...document.querySelectorAll(".answer")].map((a) => a.querySelector(".token").style.background),
    tokens: document.querySelectorAll(".token").length });
  const key = (name, shift) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key: name, shiftKey: !!shift, bubbles: true }));
  told.first = look();
  byId("next").click(); told.next = look();
  key("ArrowLeft"); told.left = look();
  key("ArrowLeft", true); told.earlier = look();
  byId("step").value = 0; byId("step").dispatchEvent(new Event("input")); told.start = look();
  byId("run").value = "second"; byId("run").dispatchEvent(new Event("change")); told.other = look();
  byId("metric").value = "train/entropy"; byId("metric").dispatchEvent(new Event("change"));
  told.explored = byId("explored").data.length; told.meaning = byId("meaning").textContent;
  told.evil = document.body.dataset.evil || "";
"""
)


@needs_chromium
def test_in_a_browser_every_plot_is_drawn_and_samples_can_be_browsed(two: list[Path], tmp_path: Path) -> None:
    told = browse(report.page(read_runs(two)), BROWSE, tmp_path)
    assert told["plots"] == [True] * 9 and told["drawn"] == "9" and min(told["lines"]) > 0
    assert (told["first"]["at"], told["first"]["which"], told["next"]["which"]) == ("12", "1 of 2", "2 of 2")
    assert (told["left"]["which"], told["earlier"]["at"]) == ("1 of 2", "11"), "by keys"
    assert told["first"]["answers"][0] == EVIL + "<eos>" and told["evil"] == ""
    assert told["first"]["prompt"] == "78+13="
    up, down = "rgba(42, 143, 78, 0.58)", "rgba(200, 69, 47, 0.58)"
    assert told["first"]["colours"] == [up, down, up, down]
    assert told["start"]["at"] == "1" and told["other"]["at"] == "80"
    assert told["other"]["answers"][:2] == ["8+3=11 91<eos>", "8+3=<eos>"] and told["other"]["tokens"] == 2 * 10 + 2 * 5
    assert told["explored"] == 2 and "entropy of the policy" in told["meaning"]
