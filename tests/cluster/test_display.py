"""The display: what its plain lines say, that the panel shows it too, and that neither can end a run.

Does not cover: how the panel looks on a real terminal.
"""

from __future__ import annotations

import io
import re

import pytest

from cluster import display
from cluster.display import Display, Mode
from cluster.metrics import name

METRICS = {
    "reward": 0.51234, "informative": 0.75, "resp_len": 14.21, "clipfrac": 0.0, "train/loss": 0.1,
    name("tokens_per_second"): 1841.2, name("seconds_step"): 3.21,
}  # fmt: skip


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Broken(Terminal):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def run_through(shown: Display) -> None:
    shown.phase("warm-up")
    shown.progress("warm-up", 0, 500)
    shown.progress("warm-up", 500, 500)
    shown.phase("training")
    shown.stages({"engines": "12 groups generating", "learner": "waits for groups [3/32]"})
    shown.step(2, 40, METRICS)
    shown.step(3, 40, {**METRICS, name("eval.greedy"): 0.61})
    shown.note("a note [with] brackets")
    shown.close()


def test_plain_lines_one_for_each_thing_that_happens() -> None:
    out = io.StringIO()
    run_through(Display.open("auto", stream=out))
    step = "reward 0.512  informative 0.750  resp_len 14.2  clipfrac 0.000  1,841 tokens/s  3.2 s"
    assert out.getvalue().splitlines() == [
        "— warm-up",
        "  warm-up 0/500",
        "  warm-up 500/500",
        "— training",
        f"step 2/40  {step}",
        f"step 3/40  {step}  eval/greedy 0.610",
        "a note [with] brackets",
    ]


def test_plain_progress_is_thinned_by_time_but_for_first_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    shown = Display.open("plain", stream=out)
    for i in range(0, 101):
        now[0] = i * 0.3
        shown.progress("warm-up", i, 100)
    shown.progress("warm-up", 100, 100)
    assert [int(n) for n in re.findall(r"warm-up (\d+)/100", out.getvalue())] == [0, 34, 68, 100]


def test_plain_lines_survive_a_stream_that_has_only_ascii() -> None:
    raw = io.BytesIO()
    shown = Display.open("plain", stream=io.TextIOWrapper(raw, encoding="ascii"))
    shown.phase("training")
    shown.note("ok")
    assert raw.getvalue() == b"? training\nok\n"


def test_the_panel_shows_headline_stages_and_the_last_evaluation_also_on_later_steps() -> None:
    out = Terminal()
    shown = Display.open("rich", title="winnow sums", stream=out)
    shown.step(3, 40, {**METRICS, name("eval.greedy"): 0.61})
    shown.stages({"engines": "12 groups generating", "learner": "waits for groups [3/32]"})
    shown.step(4, 40, METRICS)
    form = shown._form
    assert isinstance(form, display._Rich)
    with form._console.capture() as capture:
        form._console.print(form._panel())
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capture.get())
    for part in ("winnow sums", "4/40", "0.512", "0.750", "14.2", "1,841", "eval/greedy at 3", "0.610", "waits for groups [3/32]"):
        assert part in text, part
    shown.close()


def test_the_panel_gives_the_terminal_back() -> None:
    out = Terminal()
    run_through(Display.open("auto", stream=out))
    text = out.getvalue()
    assert "a note [with] brackets" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


def test_none_says_nothing() -> None:
    out = Terminal()
    run_through(Display.open("none", stream=out))
    assert out.getvalue() == ""


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_a_broken_stream_switches_the_display_off_and_nothing_else(mode: Mode) -> None:
    run_through(Display.open(mode, stream=Broken()))


@pytest.mark.parametrize("mode", ["plain", "rich", "none"])
def test_after_close_it_is_silent_and_close_may_come_twice(mode: Mode) -> None:
    out = Terminal()
    shown = Display.open(mode, stream=out)
    shown.close()
    before = out.getvalue()
    run_through(shown)
    assert out.getvalue() == before


def test_metrics_that_are_no_numbers_do_not_end_the_run() -> None:
    shown = Display.open("plain", stream=io.StringIO())
    shown.step(1, 2, {"reward": "much"})  # type: ignore[dict-item]
    shown.note("still there")


def test_an_interrupt_passes_through() -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Display.open("plain", stream=Interrupted()).note("x")
