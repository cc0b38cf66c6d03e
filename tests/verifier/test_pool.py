"""The pool against real processes: deadlines, kills, crashes, batches, orphans. Does not cover single verifiers, Ray, or speed."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rollout.errors import UserError
from verifier import frames
from verifier.config import VerifyConfig
from verifier.pool import Item, VerifierPool

HERE = Path(__file__).parent
OPTIONS = {"function": {"path": "faults.reward"}}


@pytest.fixture(autouse=True)
def _faults_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


def make(timeout=0.5, processes=1, memory_mb=1024, options=OPTIONS, prewarm=("function",)):
    config = VerifyConfig(verify_timeout=timeout, verifier_processes=processes, verify_memory_mb=memory_mb, verifier_options=options)
    return VerifierPool(config, prewarm)


@pytest.fixture(scope="module")
def shared():
    """One pool for the tests that leave it whole."""
    sys.path.insert(0, str(HERE))
    with make() as pool:
        yield pool
    sys.path.remove(str(HERE))


def ask(pool, response, gold=""):
    start = time.monotonic()
    (verdict,) = pool.verify_sync([Item("function", gold, response)])
    return verdict, time.monotonic() - start


def gone(pid, within=5.0):
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("how", ["sleep", "power"])
def test_past_its_deadline_an_answer_scores_0_and_is_not_tried_again(shared, how):
    before = shared.stats.retries
    verdict, seconds = ask(shared, how)
    assert (verdict.status, verdict.reward) == ("timeout", 0.0)
    assert "deadline" in verdict.detail
    assert 0.5 <= seconds < 1.5
    assert shared.stats.retries == before
    assert ask(shared, "one")[0].reward == 1


def test_one_slow_answer_does_not_make_its_batch_late_or_wrong(shared):
    items = [Item("function", str(i), "sleep" if i == 5 else "one") for i in range(40)]
    start = time.monotonic()
    verdicts = shared.verify_sync(items)
    assert [v.status for v in verdicts] == ["timeout" if i == 5 else "value" for i in range(40)]
    assert time.monotonic() - start < 2.5


def test_each_slow_answer_of_a_batch_has_a_deadline_of_its_own(shared):
    start = time.monotonic()
    verdicts = shared.verify_sync([Item("function", str(i), "sleep") for i in range(3)])
    assert all(v.status == "timeout" and 0.5 <= v.seconds < 1.5 for v in verdicts)
    assert 1.5 <= time.monotonic() - start < 4.5


def test_all_children_die_with_the_process(shared, tmp_path):
    verdict, _ = ask(shared, "children", str(tmp_path / "pids"))
    assert verdict.status == "timeout"
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and all(gone(p) for p in pids)


@pytest.mark.parametrize(("how", "reason"), [("crash", "SIGABRT"), ("raise", "KeyError")])
def test_a_fault_of_ours_is_tried_once_more_in_a_fresh_process(shared, tmp_path, how, reason):
    verdict, _ = ask(shared, how, str(tmp_path / "pids"))
    assert (verdict.status, verdict.reward) == ("error", None)
    assert reason in verdict.detail
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == len(set(pids)) == 2


def test_a_second_try_that_works_counts(shared, tmp_path):
    assert ask(shared, "crash_once", str(tmp_path / "pids"))[0].reward == 1
    assert len((tmp_path / "pids").read_text().split()) == 2


def test_exit_and_nan_are_errors(shared):
    assert ask(shared, "exit")[0].status == "error"
    verdict, _ = ask(shared, "nan")
    assert verdict.status == "error" and "nan" in verdict.detail


def test_memory_is_bounded_and_its_exhaustion_is_the_answers_making(shared):
    verdict, seconds = ask(shared, "memory")
    assert (verdict.status, verdict.reward, verdict.detail) == ("timeout", 0.0, "out of memory")
    assert seconds < 1


def test_what_a_verifier_prints_or_reads_disturbs_nothing(shared):
    assert ask(shared, "print")[0].reward == 1
    assert ask(shared, "read")[0].reward == 1


def test_text_of_every_kind_arrives_as_it_is():
    nasty = "\x00\ud800\udfff\n\u2028" + "\U0001f600" * 3 + "x" * 1_000_000
    with make(options={"format": {"shape": "regex", "pattern": "\x00\ud800\udfff\n\u2028.*"}}, prewarm=["format"], timeout=5) as pool:
        assert pool.verify_sync([Item("format", nasty, nasty)])[0].reward == 1
        assert pool.verify_sync([Item("format", "", "x" * (5 << 20))])[0].detail.startswith("longer than")


def test_processes_killed_from_outside_lose_nothing():
    with make(timeout=5, processes=2) as pool:
        pool.wait_ready()
        future = pool.submit([Item("function", str(i), f"pid {i}") for i in range(60)])
        for _ in range(3):
            time.sleep(0.25)
            for pid in pool.pids()[:1]:
                os.kill(pid, signal.SIGKILL)
        verdicts = future.result(30)
        assert [v.status for v in verdicts] == ["value"] * 60
        assert pool.stats.died >= 1 and pool.stats.values == 60
    assert not pool.pids()


def test_all_processes_killed_at_once_come_back():
    with make(timeout=5, processes=2) as pool:
        pool.wait_ready()
        future = pool.submit([Item("function", str(i), f"pid {i}") for i in range(20)])
        time.sleep(0.2)
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
        assert [v.status for v in future.result(30)] == ["value"] * 20
        assert len(pool.pids()) == 3


def test_a_stopped_process_holds_no_answer_for_ever(monkeypatch):
    monkeypatch.setattr("verifier.pool.STALL_LIMIT", 1.0)
    with make(timeout=1) as pool:
        pool.wait_ready()
        future = pool.submit([Item("function", "", "sleep")])
        time.sleep(0.3)
        for pid in pool.pids():  # one in the middle of its item, one before
            os.kill(pid, signal.SIGSTOP)
        assert future.result(5)[0].status == "timeout"
        assert pool.submit([Item("function", "", "one")]).result(10)[0].reward == 1


def test_close_leaves_no_process_and_waiting_callers_hear_of_it():
    pool = make(timeout=30)
    pool.wait_ready()
    pids = pool.pids()
    future = pool.submit([Item("function", "", "sleep")])
    time.sleep(0.2)
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 2
    assert all(not psutil.pid_exists(p) for p in pids)
    for f in (future, pool.submit([Item("function", "", "one")])):
        with pytest.raises(RuntimeError, match="closed"):
            f.result(5)


@pytest.mark.parametrize("busy", ["", "power"])
def test_processes_end_with_a_parent_that_is_killed(busy, tmp_path):
    program = f"""
import sys; sys.path[:0] = [{str(HERE.parent.parent)!r}, {str(HERE)!r}]
from verifier import frames
from verifier.config import VerifyConfig
from verifier.pool import Item, VerifierPool
import time
pool = VerifierPool(VerifyConfig(verifier_options={OPTIONS!r}, verify_timeout=60), ["function"])
pool.wait_ready()
if {busy!r}: pool.submit([Item("function", "", {busy!r})])
time.sleep(0.3)
print(*pool.pids(), flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(gone(p) for p in pids)


def test_a_process_that_cannot_come_up_is_said_and_not_waited_for(monkeypatch):
    monkeypatch.setattr("verifier.process._BOOT", "raise SystemExit('no such luck')")
    with make() as pool:
        with pytest.raises(RuntimeError, match="no verifier process comes up: no such luck"):
            pool.wait_ready(20)
        verdict = pool.submit([Item("function", "", "one")]).result(40)[0]
        assert verdict.status == "error" and "no such luck" in verdict.detail


def test_unknown_names_and_options_are_the_users_mistake():
    with pytest.raises(UserError, match="'fucntion'.*'function'"):
        make(prewarm=["fucntion"])
    with pytest.raises(UserError, match="verifier_options"):
        make(options={"function": {"path": object()}})
    with make() as pool, pytest.raises(UserError, match="nothing_of_the_kind"):
        pool.submit([Item("nothing_of_the_kind", "", "")])


def test_equal_answers_are_judged_once():
    with make(options={}, prewarm=["numeric"]) as pool:
        verdicts = pool.verify_sync([Item("numeric", "5", "5")] * 10 + [Item("numeric", "5", "6")])
        assert [v.reward for v in verdicts] == [1] * 10 + [0]
        assert pool.stats.cached == 9
        assert pool.verify_sync([Item("numeric", "5", "5"), Item("numeric", "6", "5")])[0].reward == 1
        assert pool.stats.cached == 10


def test_a_gold_answer_on_trial():
    with make(options={}, prewarm=["numeric"]) as pool:
        verdicts = pool.verify_sync([Item("numeric", "85", None), Item("numeric", "many", None), Item("random", "x", None)])
    assert [v.status for v in verdicts] == ["value", "error", "value"]
    assert verdicts[0].reward == verdicts[2].reward == 1


def test_many_callers_of_one_event_loop():
    async def caller(pool, i):
        return [v.reward for v in await pool.verify([Item("numeric", str(i), str(i)), Item("numeric", str(i), "x")])]

    async def main(pool):
        return await asyncio.gather(*(caller(pool, i) for i in range(200)))

    with make(options={}, prewarm=["numeric"], processes=2) as pool:
        assert asyncio.run(main(pool)) == [[1, 0]] * 200


def test_progress_is_never_seen_half_written():
    page = frames.Progress(mmap.mmap(-1, frames.PAGE))
    page.set(frames.IDLE, 1000.0)
    stop = threading.Event()

    def write():
        i = 0
        while not stop.is_set():
            i += 1
            page.set(i % 7, 1000.0 + i)
            page.set(frames.IDLE, 1000.0 + i)

    writer = threading.Thread(target=write)
    writer.start()
    seen = [page.get() for _ in range(20_000)]
    stop.set()
    writer.join()
    assert all(-1 <= state < 7 and since >= 1000.0 for state, since in seen)


def test_the_sandbox_is_named_at_the_start():
    with make(options={}, prewarm=["code"]) as pool:
        pool.wait_ready()
        assert "sandbox" in pool.notes[0]
