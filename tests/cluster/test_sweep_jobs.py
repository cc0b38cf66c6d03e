"""The schedule of a sweep over a job server that does as it is told: what starts when, what is kept, resumed, adopted and stopped.

Does not cover Ray's job server, which tests/operate/test_sweep.py starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cluster.load import resolve
from cluster.sweep_jobs import Room, Schedule, State, Task, last_row, last_words, needs


@dataclass
class FakeJobs:
    """Every job takes `looks` looks and writes its summary; those in `broken` fail. `started` are (run, at once then)."""

    looks: int = 3
    broken: tuple[str, ...] = ()
    alive: list[Path] = field(default_factory=list)
    left: dict[Path, int] = field(default_factory=dict)
    started: list[tuple[str, int]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    ended: set[Path] = field(default_factory=set)

    def running(self) -> Sequence[Path]:
        self.left.update(dict.fromkeys(self.alive, self.looks))
        return self.alive

    def submit(self, run_dir: Path, recipe: str, flags: Sequence[str]) -> None:
        self.started.append((run_dir.name, len(self.left) + 1))
        self.left[run_dir] = self.looks

    def state(self, run_dir: Path) -> State:
        if self.left[run_dir] == 1 and (warm := WARM.get(run_dir.name)):
            warm.mkdir(parents=True, exist_ok=True)
            (warm / "config.json").touch()
        self.left[run_dir] -= 1
        if self.left[run_dir] > 0 and run_dir.name not in self.stopped:
            return "running"
        del self.left[run_dir]
        self.ended.add(run_dir)
        if run_dir.name in self.stopped:
            return "failed"
        if run_dir.name in self.broken:
            return "failed"
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "summary.json").write_text("{}")
        return "succeeded"

    def stop(self, run_dir: Path) -> None:
        self.stopped.append(run_dir.name)

    def log(self, run_dir: Path) -> str:
        return "step 1/2\nwinnow: it broke: mend it\nbye\n" if run_dir.name in self.broken else "step 2/2"


WARM: dict[str, Path] = {}


def task(folder: Path, name: str, cpus: float = 1.0, gpus: float = 0.0, warmup: Path | None = None) -> Task:
    return Task(name, folder / name, "arithmetic", (), cpus, gpus, warmup, 2)


def run(tasks: Sequence[Task], jobs: FakeJobs, room: Room) -> tuple[Schedule, list[str]]:
    said: list[str] = []
    schedule = Schedule(tasks, jobs, room, said.append, clock=lambda: 0.0, sleep=lambda seconds: None)
    schedule.run()
    return schedule, said


def test_as_many_at_once_as_there_is_room_for_in_order(tmp_path: Path) -> None:
    jobs = FakeJobs()
    tasks = [task(tmp_path, "a"), task(tmp_path, "b"), task(tmp_path, "c", cpus=2.0), task(tmp_path, "d")]
    schedule, said = run(tasks, jobs, Room(2, 0, 9))
    assert jobs.started == [("a", 1), ("b", 2), ("c", 1), ("d", 1)]
    assert schedule.failed == {} and all(t.done for t in tasks)
    assert said[0] == "a: starts (run 1 of 4)" and said[-1] == "d: done after 0 s"


def test_a_run_larger_than_the_machine_goes_alone_and_gpus_count(tmp_path: Path) -> None:
    jobs = FakeJobs()
    run([task(tmp_path, "a"), task(tmp_path, "b", cpus=7), task(tmp_path, "c"), task(tmp_path, "d", gpus=4)], jobs, Room(2, 2, 9))
    assert [at_once for _, at_once in jobs.started] == [1, 1, 1, 1]


def test_no_more_at_once_than_asked_for(tmp_path: Path) -> None:
    jobs = FakeJobs()
    run([task(tmp_path, name) for name in "abcd"], jobs, Room(64, 8, 2))
    assert max(at_once for _, at_once in jobs.started) == 2


def test_what_is_done_is_kept_and_what_was_begun_resumes(tmp_path: Path) -> None:
    done, begun, fresh = (task(tmp_path, name) for name in ("done", "begun", "fresh"))
    done.run_dir.mkdir()
    (done.run_dir / "summary.json").write_text("{}")
    begun.run_dir.mkdir()
    (begun.run_dir / "config.toml").touch()
    fresh.run_dir.mkdir()
    (fresh.run_dir / "run.lock").touch()
    jobs = FakeJobs()
    _, said = run([done, begun, fresh], jobs, Room(1, 0, 9))
    assert [name for name, _ in jobs.started] == ["begun", "fresh"]
    assert said[0] == "1 of 3 runs are done already"
    assert "begun: goes on (run 2 of 3)" in said and "fresh: starts (run 3 of 3)" in said


def test_a_job_of_an_earlier_life_is_followed_and_not_started_again(tmp_path: Path) -> None:
    first, second = task(tmp_path, "first"), task(tmp_path, "second")
    jobs = FakeJobs(alive=[first.run_dir])
    _, said = run([first, second], jobs, Room(1, 0, 9))
    assert [name for name, _ in jobs.started] == ["second"] and said[0] == "first: runs already"


def test_runs_with_one_warm_up_wait_for_the_first_to_make_it(tmp_path: Path) -> None:
    warm = tmp_path / "warm"
    WARM.clear()
    WARM["a"] = warm
    tasks = [task(tmp_path, "a", warmup=warm), task(tmp_path, "b", warmup=warm), task(tmp_path, "c", warmup=tmp_path / "other")]
    jobs = FakeJobs()
    run(tasks, jobs, Room(64, 0, 9))
    assert [name for name, _ in jobs.started] == ["a", "c", "b"]


def test_a_run_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    jobs = FakeJobs(broken=("a",))
    schedule, said = run([task(tmp_path, "a"), task(tmp_path, "b")], jobs, Room(1, 0, 9))
    assert schedule.failed == {"a": "winnow: it broke: mend it"}
    assert "a: failed: winnow: it broke: mend it" in said and [name for name, _ in jobs.started] == ["a", "b"]


def test_a_stop_asks_the_running_jobs_to_stop_and_starts_nothing_more(tmp_path: Path) -> None:
    tasks = [task(tmp_path, name) for name in "abc"]
    jobs = FakeJobs(looks=1000)
    said: list[str] = []
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        schedule.stopping = looks >= 5

    schedule = Schedule(tasks, jobs, Room(2, 0, 9), said.append, sleep=sleep)
    schedule.run()
    assert jobs.stopped == ["a", "b"] and [name for name, _ in jobs.started] == ["a", "b"]
    assert schedule.failed == {} and said[-2:] == ["a: stopped at step 0", "b: stopped at step 0"]


def test_actors_on_cpus_count_with_their_threads() -> None:
    small = resolve("arithmetic", {})
    assert needs(small) == pytest.approx((2.1, 0.0))
    large = resolve("arithmetic", {"rollout.engines": 3, "rollout.engine_gpus": 2, "model.learner_ranks": 4, "model.learner_gpus": 1})
    assert needs(large) == pytest.approx((3 * 0.25 + 4 * 0.25 + 0.1, 10.0))


def test_the_newest_step_is_read_past_a_line_that_is_being_written(tmp_path: Path) -> None:
    assert last_row(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 7, "reward": 0.5}) + '\n{"step": 8, "rew')
    assert last_row(tmp_path)["step"] == 7


def test_last_words_are_the_runs_own_sentence() -> None:
    assert last_words("winnow: a\nthe run ends: b\n\nmore") == "the run ends: b"
    assert last_words("x\ny\n") == "y" and last_words("") == "it printed nothing"
    assert not replace(task(Path("/nowhere"), "a")).begun
