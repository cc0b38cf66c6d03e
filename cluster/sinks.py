"""Where logged numbers and samples go: `metrics.jsonl`, `samples.jsonl` and wandb. The only file that imports wandb.

The JSONL files are the record of a run: written as lines in the step's own thread, and an error in writing them is raised.
wandb is a copy for the eye: it is fed from a thread of its own, so that neither its start nor a slow network holds up a
step, and whatever goes wrong with it is one line of warning. What a slow finish could not send lies in the run folder.
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
from verifier.records import ScoredGroup

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
WANDB_ID = "wandb_id"
WANDB_START_SECONDS = 20.0
"""How long wandb may take to start before the run goes on without it."""

Note = Callable[[str], None]


class Sinks:
    """All sinks of a run as one: `open` at the start, `log` once a step, `close` at the end."""

    def __init__(self, metrics: JsonlSink, samples: JsonlSink, wandb: WandbSink | None) -> None:
        self._metrics, self._samples, self._wandb = metrics, samples, wandb

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
        and there is no key.
        """
        mode = wandb_mode(log.wandb)
        metrics = JsonlSink(run_dir / METRICS, resume_step)
        samples = JsonlSink(run_dir / SAMPLES, resume_step)
        copy = None if mode == "disabled" else WandbSink(run_dir, log.wandb_project, name or run_dir.name, config, mode, note)
        return cls(metrics, samples, copy)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers by their logged names (`cluster.metrics.logged`)."""
        self._metrics.write({"step": step, **metrics})
        if self._wandb is not None:
            self._wandb.log(step, metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some groups of a step (`sample_row`), one line each."""
        for row in rows:
            self._samples.write({"step": step, **row})

    def close(self, seconds: float = 5.0) -> None:
        """Close the files, and give wandb at most so many seconds to finish; no process of it remains."""
        self._metrics.close()
        self._samples.close()
        if self._wandb is not None:
            self._wandb.close(seconds)
            self._wandb = None


def sample_row(scored: ScoredGroup, advantages_G: Sequence[float] | None = None, outcome: str = "trained") -> dict[str, Any]:
    """A scored group as a line of `samples.jsonl`: prompt, answers, verdicts, advantages, and what became of it."""
    group = scored.group
    answers = [
        {
            "text": completion.text,
            "tokens": len(completion.tokens_T),
            "finish": completion.finish,
            "reward": verdict.reward,
            "status": verdict.status,
            "detail": verdict.detail,
            "rewards": dict(verdict.rewards),
            "advantage": None if advantages_G is None else float(advantages_G[i]),
        }
        for i, (completion, verdict) in enumerate(zip(group.completions, scored.verdicts, strict=True))
    ]
    prompt = group.prompt
    return {
        "uid": group.uid,
        "source": prompt.source,
        "row": prompt.row,
        "outcome": outcome,
        "versions": list(group.versions),
        "prompt": prompt.text,
        "gold": prompt.answer,
        "answers": answers,
    }


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
