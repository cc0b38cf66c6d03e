"""How fast verdicts come: a pool of one process per core against as many processes that would call the verifier directly.

The limit is W times the verdicts/s of one plain call in a loop, which is also the peer: whatever the pool adds (deadlines, killable
processes, a cache) shows as the rest to 1. Then what one run of a program costs on each rung of the sandbox's ladder.
"""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

from tests.bench.measure import interleave
from tests.bench.rows import Row, compare
from verifier import load, sandbox
from verifier.config import VerifyConfig
from verifier.pool import Item, VerifierPool

SECONDS = 2.0  # of each measurement
CASES = Path(__file__).parent.parent / "verifier" / "cases"


def items_of(name: str) -> list[Item]:
    """Ordinary cases of a verifier; the ones made to hang are left out."""
    if name == "numeric":
        return [Item(name, str(i), f"7+8=15 4+3+1=8 {i}\n") for i in range(200)]
    rows = [json.loads(line) for line in (CASES / f"{name}.jsonl").read_text().splitlines()]
    return [Item(name, r["gold"], r["response"]) for r in rows if "response" in r and r["kind"] != "hang"]


def direct(items: list[Item], seconds: float) -> float:
    """Verdicts/s of this process alone."""
    verifier = load(items[0].verifier)
    for item in items:
        verifier.verify(item.gold, item.response or "", {}, {})
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for item in items:
            verifier.verify(item.gold, item.response or "", {}, {})
        done += len(items)
    return done / (time.perf_counter() - start)


def pooled(items: list[Item], processes: int, seconds: float) -> tuple[float, float]:
    """Verdicts/s of a pool, and CPU seconds of the parent per verdict. Every item is made different, so that the cache answers nothing."""
    with VerifierPool(VerifyConfig(verifier_processes=processes), [items[0].verifier]) as pool:
        pool.wait_ready()
        while len(pool.pids()) < processes + 1 or not all(p.ready for p in pool._processes):
            time.sleep(0.01)
        pool.verify_sync([Item(i.verifier, i.gold, f" {i.response}") for i in items])
        number, done = 0, 0
        start, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        while time.perf_counter() - start < seconds:
            batch = []
            for _ in range(max(1, 4000 // len(items))):
                number += 1
                batch += [Item(i.verifier, i.gold, f"{number}. {i.response}") for i in items]
            pool.verify_sync(batch)
            done += len(batch)
        after = resource.getrusage(resource.RUSAGE_SELF)
        return done / (time.perf_counter() - start), (after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime) / done


def run() -> list[Row]:
    """Three verifiers through the pool, and programs through each rung that works here."""
    cores = len(os.sched_getaffinity(0))
    rows = []
    for name in ("numeric", "gsm8k", "math"):
        items, overhead = items_of(name), list[float]()

        def ours(items: list[Item] = items, overhead: list[float] = overhead) -> float:
            rate, cpu = pooled(items, cores, SECONDS)
            overhead.append(cpu * 1e6)
            return rate

        mine, theirs = interleave(ours, lambda items=items: cores * direct(items, SECONDS), pairs=3, warm=False)  # type: ignore[misc]
        note = f"pool of {cores}; peer and limit: {cores} × one plain call; the parent uses {sorted(overhead)[1]:.0f} µs a verdict"
        rows.append(compare(f"verifiers/{name}", "verdicts/s", mine, theirs, limit=sorted(theirs)[1], note=note))
    for rung in ("bubblewrap", "landlock", "uid"):
        if sandbox.probe(rung).rung:
            times = []
            for _ in range(20):
                start = time.perf_counter()
                sandbox.run(sandbox.Job("print(input())", stdin=b"x"), sandbox.LIMITS, rung)
                times.append((time.perf_counter() - start) * 1000)
            rows.append(compare(f"verifiers/program_{rung}", "ms", times, note="one run of a program that reads and prints a line"))
    return rows
