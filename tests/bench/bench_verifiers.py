"""How fast verdicts come: `python -m tests.bench.bench_verifiers [SECONDS]`. Not a test: figures depend on the machine and its load.

Prints, for each kind of item: verdicts/s of one process that calls the verifier directly, of a pool with 1 … W processes, their ratio to W
times the direct figure (wanted: 0.9), and the pool's overhead per verdict. Then what one run of a program costs on each rung of the ladder.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

from verifier import load, sandbox
from verifier.config import VerifyConfig
from verifier.pool import Item, VerifierPool

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


def main(seconds: float) -> None:
    """The whole table."""
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores")
    for name in ("numeric", "gsm8k", "math"):
        items = items_of(name)
        one = direct(items, seconds)
        print(f"{name:8} direct            {one:10.0f} /s")
        for processes in range(1, cores + 1):
            rate, cpu = pooled(items, processes, seconds)
            share = rate / (processes * one)
            print(f"{name:8} pool of {processes}         {rate:10.0f} /s  {share:5.2f} of {processes} direct, parent {cpu * 1e6:.0f} µs")
    for rung in ("bubblewrap", "landlock", "uid"):
        if sandbox.probe(rung).rung:
            times = []
            for _ in range(20):
                start = time.perf_counter()
                sandbox.run(sandbox.Job("print(input())", stdin=b"x"), sandbox.LIMITS, rung)
                times.append(time.perf_counter() - start)
            print(f"program on {rung:12} {sorted(times)[10] * 1000:6.1f} ms median")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 3.0)
