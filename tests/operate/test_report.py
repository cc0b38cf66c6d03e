"""The report of two real runs with different variants in headless Chromium; and that the first, the demo's recipe, was advised nothing.

Does not cover how the plots look: docs/images has pictures.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import report
from cluster.report_data import read_runs
from tests.cluster.browser import PLOTS, browse, needs_chromium
from tests.operate.conftest import ROOT, head_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The demo as it is, and half of it with another variant and one batch behind, from the same warm-up."""
    folder = tmp_path_factory.mktemp("runs")
    shared = ["--warmup_dir", str(folder / "warmup"), "--wandb", "off", "--display", "plain"]
    made = []
    for label, flags in {"demo": [], "gspo": ["--variant", "gspo", "--steps", "20", "--max_staleness", "1"]}.items():
        made.append(folder / label)
        command = [sys.executable, "-m", "cluster.demo", *shared, *flags, "--run_dir", str(made[-1])]
        env = {k: v for k, v in head_environment(folder).items() if not k.startswith("RAY_")}
        done = subprocess.run(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
        assert done.returncode == 0, done.stdout
    return made


BROWSE = (
    PLOTS
    + """
  const look = () => byId("at").textContent + " " + byId("which").textContent + " " + document.querySelectorAll(".token").length;
  const key = (name, shift) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key: name, shiftKey: !!shift, bubbles: true }));
  const seen = new Set();
  for (let run = 0; run < byId("run").options.length; run++) {
    byId("run").selectedIndex = run; byId("run").dispatchEvent(new Event("change"));
    for (let i = 0; i < 5; i++) { seen.add(byId("run").value + " " + look()); byId("next").click(); key("ArrowLeft", true); }
  }
  told.seen = seen.size;
  told.coloured = [...document.querySelectorAll(".token")].filter((t) => /rgba/.test(t.style.background)).length;
  told.tokens = document.querySelectorAll(".token").length;
  told.headings = [...document.querySelectorAll("h2")].map((h) => h.textContent);
"""
)


def test_a_demo_learns_and_is_advised_nothing(runs: list[Path]) -> None:
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2
    assert (runs[0] / "advice.jsonl").read_text() == ""


@needs_chromium
def test_the_report_of_two_runs_in_a_browser(runs: list[Path], tmp_path: Path) -> None:
    page = report.page(read_runs(runs))
    assert len(page.encode()) < 10_000_000
    told = browse(page, BROWSE, tmp_path)
    assert told["plots"] and all(told["plots"]) and min(told["lines"]) > 0 and told["drawn"] == str(len(told["plots"]))
    assert told["seen"] == 10 and told["coloured"] == told["tokens"] > 0
    for heading in ("What to watch", "Where every group and every token went", "Who worked and who waited: demo", "Staleness",
                    "Lengths of answers: gspo", "Any metric", "Samples", "Settings that differ"):  # fmt: skip
        assert heading in told["headings"]
    assert re.search(r"<td>variant</td><td>&quot;dapo&quot;</td><td>&quot;gspo&quot;</td>", page)
