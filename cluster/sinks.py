"""Where logged numbers and samples go: JSONL files, TensorBoard and wandb. The only file that imports wandb.

The JSONL files are the record of a run: written as lines in the step's own thread, and an error in writing them is raised.
TensorBoard and wandb are copies for the eye, and whatever goes wrong with one is a line of warning. wandb is fed from a thread
of its own, so that neither its start nor a slow network holds up a step. What a slow finish could not send lies in the run folder.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TextIO

from cluster.config import LogConfig
from cluster.runfolder import plain, write_atomic
from rollout.errors import UserError

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
LENGTHS = "lengths.jsonl"
ADVICE = "advice.jsonl"
TENSORBOARD = "tensorboard"
WANDB_ID = "wandb_id"
WANDB_START_SECONDS = 20.0
"""How long wandb may take to start before the run goes on without it."""

Note = Callable[[str], None]


class Sinks:
    """All sinks of a run as one: `open` at the start, `log` once a step, `close` at the end."""

    def __init__(self, files: Mapping[str, JsonlSink], tensorboard: TensorboardSink | None, wandb: WandbSink | None) -> None:
        self._files, self._tensorboard, self._wandb = files, tensorboard, wandb

    @classmethod
    def open(
        cls,
        run_dir: Path,
        log: LogConfig,
        config: Mapping[str, Any],
        resume_step: int | None = None,
        *,
        name: str | None = None,
        note: Note = print,
    ) -> Self:
        """Open every sink that `log` asks for.

        `config` is the resolved tree as a dict, for wandb. `resume_step` is the last step whose lines stay (None: a fresh
        run, whose files start empty). `note` takes lines of warning. Raises UserError when wandb is asked to be online
        and there is no key, and when TensorBoard is asked for and is not installed.
        """
        mode = wandb_mode(log.wandb)
        board = TensorboardSink(run_dir / TENSORBOARD, resume_step, note) if log.tensorboard else None
        files = {file: JsonlSink(run_dir / file, resume_step) for file in (METRICS, SAMPLES, LENGTHS, ADVICE)}
        copy = None if mode == "disabled" else WandbSink(run_dir, log.wandb_project, name or run_dir.name, config, mode, note)
        return cls(files, board, copy)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers by their logged names (`cluster.metrics.logged`)."""
        self.write(METRICS, step, metrics)
        for copy in (self._tensorboard, self._wandb):
            if copy is not None:
                copy.log(step, metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some groups of a step (`cluster.samples.sample_row`), one line each."""
        for row in rows:
            self.write(SAMPLES, step, row)

    def write(self, file: str, step: int, row: Mapping[str, Any]) -> None:
        """One line of one of the files."""
        self._files[file].write({"step": step, **row})

    def close(self, seconds: float = 5.0) -> None:
        """Close the files, and give wandb at most so many seconds to finish; no process of it remains."""
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close(seconds)
            self._wandb = None


class JsonlSink:
    """A file of one JSON object a line, flushed at every line. `resume_step` as in `Sinks.open`."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        if resume_step is not None and path.exists():
            cut(path, resume_step)
        self._file: TextIO = open(path, "w" if resume_step is None else "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. NaN and infinities, which JSON has not, become null."""
        self._file.write(json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def cut(path: Path, step: int) -> None:
    """Drop the lines of steps beyond `step`, and a last line that a crash left half-written. Raises UserError for other damage."""
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    kept = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            at = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):  # no newline follows: the write was cut short
                continue
            raise UserError(f"{path} is damaged at line {number}: mend or remove that line, then resume") from None
        if at <= step:
            kept.append(line)
    write_atomic(path, "".join(f"{line}\n" for line in kept))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of such a file; none where there is no file. A last line that is cut short is left out.

    Raises UserError for other damage.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise UserError(f"{path} is damaged at line {number}: mend or remove that line") from None
    return rows


# -- TensorBoard ----------------------------------------------------------------------------------------------------


class TensorboardSink:
    """Event files under `folder`, one scalar per logged name. Resumed as in `Sinks.open`: later steps are marked as undone."""

    def __init__(self, folder: Path, resume_step: int | None, note: Note) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise UserError("log.tensorboard = true needs TensorBoard: pip install tensorboard, or set it to false") from None
        self._note, self._event = note, Event
        self._writer: Any = EventFileWriter(str(folder))
        if resume_step is not None:  # TensorBoard drops what it has read of the step in this mark and beyond
            mark = Event(wall_time=time.time(), step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._writer.add_event(mark)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers. After an error nothing more is written."""
        if self._writer is None:
            return
        event = self._event(wall_time=time.time(), step=step)
        for key, value in metrics.items():
            if value is not None:
                event.summary.value.add(tag=key, simple_value=float(value))
        try:
            self._writer.add_event(event)
            self._writer.flush()
        except Exception as error:
            self._writer = None
            self._note(f"TensorBoard is off from here on: {type(error).__name__}: {error}".splitlines()[0])

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
            self._writer = None


# -- wandb ----------------------------------------------------------------------------------------------------------

WandbMode = Literal["online", "offline", "disabled"]


def wandb_mode(asked: str) -> WandbMode:
    """The mode to run wandb in. `auto` heeds WANDB_MODE, then whether there is a key. Raises UserError for online without one."""
    if asked == "off":
        return "disabled"
    if asked == "auto":
        said = os.environ.get("WANDB_MODE", "")
        if said in ("disabled", "offline", "dryrun"):
            return "disabled" if said == "disabled" else "offline"
        return "online" if _has_key() else "offline"
    if asked == "online" and not _has_key():
        raise UserError("log.wandb = 'online' finds no key: set WANDB_API_KEY or run wandb login, or set log.wandb to offline")
    return "online" if asked == "online" else "offline"


def _has_key() -> bool:
    """Whether wandb would find a key without asking for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbSink:
    """wandb in a daemon thread: `log` puts, the thread starts wandb and feeds it; nothing here raises or waits but `close`."""

    def __init__(self, run_dir: Path, project: str, name: str, config: Mapping[str, Any], mode: WandbMode, note: Note) -> None:
        self._note = note
        self._todo: queue.SimpleQueue[dict[str, float] | None] = queue.SimpleQueue()
        self._started, self._off = threading.Event(), threading.Event()
        self._earlier = _children()
        self._born = time.monotonic()
        self._thread = threading.Thread(
            target=self._work, args=(run_dir, project, name, dict(config), mode), name="wandb-feed", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one step; once wandb has failed or has taken too long to start, nothing."""
        if not self._started.is_set() and time.monotonic() - self._born > WANDB_START_SECONDS:
            self._give_up(f"it had not started after {WANDB_START_SECONDS:.0f} s")
        if not self._off.is_set():
            self._todo.put({**metrics, "step": step})

    def close(self, seconds: float) -> None:
        """Finish within `seconds`, else leave the rest in the run folder; wandb's own process is gone either way."""
        self._todo.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._give_up(f"it did not finish within {seconds:g} s; `wandb sync` sends what lies in the run folder")
        self._reap()

    def _work(self, run_dir: Path, project: str, name: str, config: dict[str, Any], mode: WandbMode) -> None:
        try:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no reports to its makers, which offline means too
            import wandb

            run = wandb.init(
                project=project, name=name, id=_run_id(run_dir), resume="allow", dir=str(run_dir), mode=mode, config=plain(config),
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, save_code=False, x_disable_meta=True,
                    x_disable_stats=True, x_save_requirements=False, init_timeout=WANDB_START_SECONDS,
                ),
            )  # fmt: skip
            # Steps are an axis of their own: wandb's counter refuses to go back, as a resumed run does.
            run.define_metric("*", step_metric="step")
            self._started.set()
            while (row := self._todo.get()) is not None:
                if not self._off.is_set():
                    run.log({k: v for k, v in row.items() if v is not None})
            run.finish()
            wandb.teardown()
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            self._started.set()

    def _give_up(self, why: str) -> None:
        if not self._off.is_set():
            self._off.set()
            self._note(f"wandb is off from here on: {why}")

    def _reap(self) -> None:
        """End wandb's service process if it outlived its `teardown`."""
        import psutil

        for pid in _children() - self._earlier:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                process.kill()
                process.wait(2)


def _children() -> set[int]:
    """Process ids of wandb's services among this process's children."""
    import psutil

    found = set()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "wandb" in process.name():
                found.add(process.pid)
    return found


def _run_id(run_dir: Path) -> str:
    """The id of this run in wandb: made once, kept in the run folder, so that a resumed run is the same run."""
    path = run_dir / WANDB_ID
    if not path.exists():
        write_atomic(path, uuid.uuid4().hex[:12] + "\n")
    return path.read_text().strip()
