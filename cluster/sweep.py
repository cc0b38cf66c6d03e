"""`winnow sweep SPEC`: every run of a grid as a Ray job, several at once where there is room, then a table and plots.

Called again with the same spec it goes on where it was: runs that are done are kept, one that was cut off resumes.

    SWEEP/spec.toml      the spec, as it was last given
    SWEEP/runs/NAME/     a run folder for each place of the grid; NAME.log beside it is what the job printed
    SWEEP/warmup/        results of warm-ups, shared by runs whose warm-up is the same
    SWEEP/table.md, runs.csv, sweep.html
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cluster import load
from cluster.check import raise_first
from cluster.report_data import flat, read_run
from cluster.runfolder import CONFIG, write_atomic
from cluster.sinks import METRICS
from cluster.sweep_jobs import Jobs, Room, Schedule, Task, needs
from cluster.sweep_spec import OWN, Planned, Spec, arguments, read_spec
from cluster.sweep_table import Done, comma_separated, markdown, points, table
from rollout.errors import UserError

FAILED, INTERRUPTED = 1, 130
PAGE = "sweep.html"


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 all runs are done, 1 some failed, 130 it was stopped. Raises UserError before anything starts."""
    about = "A grid over any flags, run as Ray jobs; called again, it goes on where it was."
    parser = load.SentenceParser(prog="winnow sweep", description=about)
    parser.add_argument("spec", metavar="SPEC", help="TOML file (recipe, [flags], [axes]), or a built-in one: scaling")
    parser.add_argument("--sweep_dir", type=Path, help="folder of the sweep; default: runs/sweep-NAME")
    parser.add_argument("--address", help="job server of a Ray cluster, like http://HEAD:8265; default: a Ray of its own on this machine")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="check the spec, list the runs, and start nothing")
    args = parser.parse_args(list(argv))
    spec = read_spec(args.spec)
    folder = (args.sweep_dir or Path("runs") / f"sweep-{spec.name}").absolute()
    for planned in spec.runs:
        _same_config(planned, folder)
    _check(spec, args.address)
    if args.dry_run:
        print(*(planned.name for planned in spec.runs), sep="\n")
        return 0
    lock = _open(folder, spec)
    try:
        return _sweep(spec, folder, args.address)
    finally:
        os.close(lock)


def _sweep(spec: Spec, folder: Path, address: str | None) -> int:
    """The runs, then the table."""
    tasks = [_task(spec, planned, folder) for planned in spec.runs]
    say: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731
    say(f"{len(tasks)} runs over {', '.join(spec.axes)} in {folder}")
    failed: Mapping[str, str] = {}
    stopped = False
    if not all(task.done for task in tasks):
        from cluster.sweep_ray import ray_jobs

        with ray_jobs(address) as (jobs, cpus, gpus):
            room = Room(cpus, gpus, spec.at_once or len(tasks))
            failed, stopped = _run(tasks, jobs, room, say)
    write_results(spec, folder, failed, say)
    return INTERRUPTED if stopped else FAILED if failed else 0


def _run(tasks: Sequence[Task], jobs: Jobs, room: Room, say: Callable[[str], None]) -> tuple[Mapping[str, str], bool]:
    """Every run to its end; (why each failed, whether it was stopped). The first SIGINT or SIGTERM stops in order, the second at once."""
    schedule = Schedule(tasks, jobs, room, say)

    def on_signal(number: int, _: object) -> None:
        if schedule.stopping:
            raise KeyboardInterrupt
        schedule.stopping = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        schedule.run()
    except KeyboardInterrupt:
        say("ends at once; what the running jobs did since their last checkpoints is done again when the sweep goes on")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return schedule.failed, schedule.stopping


# -- before ---------------------------------------------------------------------------------------------------------------


def _task(spec: Spec, planned: Planned, folder: Path) -> Task:
    run_dir, warm_dir = folder / "runs" / planned.name, folder / "warmup"
    flags = (*arguments(planned), f"--warmup_dir={warm_dir}")
    cpus, gpus = needs(planned.config)
    warmup = None
    if planned.config.warmup.warmup_steps:
        from cluster.prepare import warmup_key

        warmup = warm_dir / f"warmup-{warmup_key(planned.config)}"
    return Task(planned.name, run_dir, spec.recipe, flags, cpus, gpus, warmup, planned.config.batches)


def _check(spec: Spec, address: str | None) -> None:
    """What `winnow check` finds, or with an address `winnow submit`; once for runs that it cannot tell apart."""
    from cluster.submit import check as check_for_a_cluster

    seen = set()
    for planned in spec.runs:
        cfg = planned.config
        looked_at = cfg.model_dump_json(include={"data", "model", "verify", "rollout", "critic", "eval"})
        if looked_at in seen:
            continue
        seen.add(looked_at)
        try:
            raise_first(cfg) if address is None else check_for_a_cluster(cfg)
        except UserError as error:
            raise UserError(f"run {planned.name}: {error}") from None


def _same_config(planned: Planned, folder: Path) -> None:
    """Raises UserError when the folder has this run with other settings: a table must not mix the two."""
    path = folder / "runs" / planned.name / CONFIG
    if not path.is_file():
        return
    try:
        there = dict(flat(tomllib.loads(path.read_text(encoding="utf-8"))))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is no TOML ({error}): remove that run's folder, and it is made again") from None
    wanted = dict(flat(tomllib.loads(load.to_toml(planned.config))))
    for key in dict.fromkeys([*wanted, *there]):
        if key not in OWN and there.get(key) != wanted.get(key):
            raise UserError(
                f"{path.parent} was made with {key} = {there.get(key)} and the spec now says {wanted.get(key)}: "
                "give another --sweep_dir, or remove that folder"
            )


def _open(folder: Path, spec: Spec) -> int:
    """Make the folder and hold it, so that one sweep at a time is at work in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "sweep.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"sweep_dir = {str(folder)!r} cannot be written ({error.strerror}): give another path with --sweep_dir") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(f"sweep_dir = {str(folder)!r} is held by another live sweep: stop that one, or give another path") from None
    write_atomic(folder / "spec.toml", spec.text)
    return lock


# -- after ----------------------------------------------------------------------------------------------------------------


def write_results(spec: Spec, folder: Path, failed: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Table, CSV and page of all runs that have taken a step; the page's path is the last line."""
    done = [_done(planned, folder, failed) for planned in spec.runs]
    write_atomic(folder / "runs.csv", comma_separated(done, spec.axes))
    found = points(done, spec.axes)
    for name, why in failed.items():
        print(f"winnow: run {name} failed: {why}; its output is in {folder / 'runs' / name}.log", file=sys.stderr)
    if not found:
        say("no run has taken a step, so there is nothing to compare")
        return
    head, rows = table(found)
    write_atomic(folder / "table.md", markdown(head, rows))
    from cluster.sweep_figures import absent

    write_atomic(folder / PAGE, page(spec, done))
    say("")
    say(markdown(head, rows))
    for said in absent(found):
        say(said)
    say(str(folder / PAGE))


def _done(planned: Planned, folder: Path, failed: Mapping[str, str]) -> Done:
    run_dir = folder / "runs" / planned.name
    begun = (run_dir / METRICS).is_file() and (run_dir / METRICS).stat().st_size > 0
    run = read_run(run_dir, planned.name) if begun else None
    state = "failed" if planned.name in failed else "done" if run is not None and run.summary else "not done"
    return Done(planned, run, state)


def page(spec: Spec, done: Sequence[Done]) -> str:
    """The page: the table, the sweep's plots, and of the runs what a report has."""
    from cluster import report
    from cluster.report_figures import figures as curves
    from cluster.sweep_figures import absent, figures

    found = points(done, spec.axes)
    runs = [one.run for one in done if one.run is not None]
    head, rows = table(found)
    lines = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in [("th", head), *(("td", row) for row in rows)]]
    left = [one.plan.name for one in done if one.state != "done"]
    notes = [*absent(found), *([f"not trained to the end: {'; '.join(left)}"] if left else [])]
    said = "".join(f'<p class="caption">{escape(note)}</p>' for note in notes)
    heading = escape(f"{len(runs)} runs over {', '.join(spec.axes)}")
    lead = f'<section><h2>{heading}</h2><div class="figures">{report.html_table(lines)}</div>{said}</section>'
    kept: list[tuple[str, str, Any]] = [f for f in curves(runs) if not f[0].startswith(("Who worked", "Lengths"))]
    return report.render(f"winnow sweep: {spec.name}", [lead], [*figures(found), *kept], runs)
