"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere.

A display never ends a run: whatever goes wrong while it writes (a closed pipe, a terminal that went away) switches it off.
It installs no signal handler; `close` gives the terminal back, and may be called at any moment and more than once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TextIO

from cluster.metrics import HEADLINE, name

Mode = Literal["auto", "rich", "plain", "none"]
PROGRESS_SECONDS = 10.0
"""Plain lines: least time between two lines of one progress, but for its first and last."""

_SPEED, _SECONDS = name("tokens_per_second"), name("seconds_step")
_EVAL = name("eval.greedy")
_DIGITS = {"resp_len": 1}


class Display:
    """The face of a run. `open` picks the form; every method is safe to call in any order and from any state."""

    def __init__(self, form: _Form) -> None:
        self._form: _Form = form

    @classmethod
    def open(cls, mode: Mode = "auto", title: str = "winnow", stream: TextIO | None = None) -> Self:
        """`auto` is rich on a terminal and plain lines elsewhere; `stream` is standard output unless given."""
        out = sys.stdout if stream is None else stream
        if mode == "auto":
            mode = "rich" if out.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        if mode == "rich":
            try:
                return cls(_Rich(title, out))
            except Exception:
                mode = "plain"
        return cls(_Plain(out) if mode == "plain" else _Form())

    def phase(self, text: str) -> None:
        """What the run does from now on: "starts 4 actors", "warm-up", "training"."""
        self._safely(lambda: self._form.phase(text))

    def progress(self, name: str, done: int, total: int) -> None:
        """How far a phase is; `done = total` ends it."""
        self._safely(lambda: self._form.progress(name, done, total))

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """A finished step, with its metrics by logged name."""
        self._safely(lambda: self._form.step(step, steps, metrics))

    def stages(self, doing: Mapping[str, str]) -> None:
        """What each stage does or waits for at the moment."""
        self._safely(lambda: self._form.stages(doing))

    def note(self, text: str) -> None:
        """One line that stays: a warning, a result."""
        self._safely(lambda: self._form.note(text))

    def close(self) -> None:
        """Give the terminal back; the display says nothing after it."""
        self._safely(lambda: self._form.close())
        self._form = _Form()

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            form, self._form = self._form, _Form()
            try:
                form.close()
            except Exception:
                return


class _Form:
    """The form that says nothing, and the interface of the others."""

    def phase(self, text: str) -> None:
        return

    def progress(self, name: str, done: int, total: int) -> None:
        return

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        return

    def stages(self, doing: Mapping[str, str]) -> None:
        return

    def note(self, text: str) -> None:
        return

    def close(self) -> None:
        return


class _Plain(_Form):
    """One line for each thing that happens, flushed."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._progress: tuple[str, int, float] = ("", -1, 0.0)  # name, done and clock of the last progress line

    def _line(self, text: str) -> None:
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        self._out.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._out.flush()

    def phase(self, text: str) -> None:
        self._line(f"— {text}")

    def progress(self, name: str, done: int, total: int) -> None:
        last, at, when = self._progress
        now = time.monotonic()
        if name == last and (done == at or (done < total and now - when < PROGRESS_SECONDS)):
            return
        self._progress = (name, done, now)
        self._line(f"  {name} {done}/{total}")

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        parts = [f"{key} {number(key, metrics[key])}" for key in HEADLINE if key in metrics]
        parts += [f"{metrics[_SPEED]:,.0f} tokens/s"] if _SPEED in metrics else []
        parts += [f"{metrics[_SECONDS]:.1f} s"] if _SECONDS in metrics else []
        parts += [f"{_EVAL} {metrics[_EVAL]:.3f}"] if _EVAL in metrics else []
        self._line(f"step {step}/{steps}  " + "  ".join(parts))

    def note(self, text: str) -> None:
        self._line(text)


class _Rich(_Form):
    """A panel at the bottom of the terminal, refreshed by rich's own thread; notes and other output scroll above it."""

    def __init__(self, title: str, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        class Quiet(Console):
            """rich ends the program at a closed pipe; a run only falls silent."""

            def on_broken_pipe(self) -> None:
                self.quiet = True

        self._title = title
        self._began = time.monotonic()
        self._text = "starts"
        self._bars: dict[str, tuple[int, int]] = {}
        self._at: tuple[int, int] | None = None
        self._metrics: dict[str, float] = {}
        self._eval: tuple[int, float] | None = None
        self._doing: dict[str, str] = {}
        self._console = Quiet(file=out)
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2, transient=False)
        self._live.start()

    def phase(self, text: str) -> None:
        self._text = text
        self._bars.clear()

    def progress(self, name: str, done: int, total: int) -> None:
        self._bars[name] = (done, total)

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self._at, self._metrics = (step, steps), dict(metrics)
        if _EVAL in metrics:
            self._eval = (step, metrics[_EVAL])

    def stages(self, doing: Mapping[str, str]) -> None:
        self._doing = dict(doing)

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._doing = {}
        self._live.stop()

    def _render(self) -> Any:
        """The panel; a fault in it must not kill rich's thread, which would leave the terminal without a cursor."""
        try:
            return self._panel()
        except Exception as error:
            return f"{self._title}: the display failed ({type(error).__name__})"

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        seconds = int(time.monotonic() - self._began)
        rows: list[Any] = [Text(f"{self._text}    {seconds // 60}:{seconds % 60:02d}", style="bold", no_wrap=True, overflow="ellipsis")]
        bars = dict(self._bars) | ({"step": self._at} if self._at else {})
        if bars:
            grid = Table.grid(padding=(0, 1))
            for label, (done, total) in bars.items():
                grid.add_row(label, f"{done}/{total}", ProgressBar(total=max(total, 1), completed=done, width=30))
            rows.append(grid)
        if self._metrics:
            grid = Table.grid(padding=(0, 2))
            shown = [(key, number(key, self._metrics[key])) for key in HEADLINE if key in self._metrics]
            shown += [("tokens/s", f"{self._metrics[_SPEED]:,.0f}")] if _SPEED in self._metrics else []
            shown += [("s/step", f"{self._metrics[_SECONDS]:.1f}")] if _SECONDS in self._metrics else []
            shown += [(f"{_EVAL} at {self._eval[0]}", f"{self._eval[1]:.3f}")] if self._eval else []
            grid.add_row(*(Text(label, style="dim") for label, _ in shown))
            grid.add_row(*(Text(value, style="bold") for _, value in shown))
            rows.append(grid)
        if self._doing:
            grid = Table.grid(padding=(0, 2))
            for stage, what in self._doing.items():
                grid.add_row(Text(stage, style="dim"), Text(what, no_wrap=True, overflow="ellipsis"))
            rows.append(grid)
        return Panel(Group(*rows), title=self._title, title_align="left", expand=True)


def number(name: str, value: float) -> str:
    """A headline value in the digits that suit it."""
    return f"{value:.{_DIGITS.get(name, 3)}f}"
