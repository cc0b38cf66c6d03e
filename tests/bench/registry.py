"""The one list of benchmarks: what each is called, where it lives, and what it may use.

A benchmark is a file here with `def run() -> list[Row]`, which does everything; it runs in a process of its own, whose OpenMP threads
and cores are set before it imports anything. Its rows are named after it (`name`, or `name/what`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """`threads`: OpenMP (and so torch) threads, 0: one per core. It is stopped, and has failed, after `timeout` seconds."""

    name: str
    module: str
    about: str
    threads: int = 0
    timeout: float = 600.0


BENCHMARKS = (
    Benchmark("machine", "tests.bench.machine_rates", "float32 matrix products and memory copies of all cores", timeout=120),
    Benchmark("learner_step", "tests.bench.learner_step", "a learner step against TRL's on the same rollouts", timeout=1500),
    Benchmark("loss_memory", "tests.bench.loss_memory", "memory and time of log-probabilities at a large vocabulary", timeout=600),
    Benchmark("verifiers", "tests.bench.verifiers", "verdicts/s of the pool against as many plain calls", threads=1, timeout=300),
    Benchmark("weights_shm", "tests.bench.weights_shm", "a version of the weights into a running engine", threads=1, timeout=400),
    Benchmark("weights_delta", "tests.bench.weights_delta", "bytes of what a step changed in 16 bits", threads=1, timeout=300),
    Benchmark("service_overhead", "tests.bench.service_overhead", "AsyncLLM through the service", threads=1, timeout=300),
    Benchmark("loop_overhead", "tests.bench.loop_overhead", "the RL phase's time in which nothing works", threads=1, timeout=300),
    Benchmark("async_gain", "tests.bench.async_gain", "max_staleness 1 against 0, and its bound", threads=1, timeout=900),
    Benchmark("start_up", "tests.bench.start_up", "winnow --help, and the first token of a run", threads=1, timeout=600),
    Benchmark("time_to_accuracy", "tests.bench.time_to_accuracy", "from a warmed-up model to 0.90 on sums, against TRL", timeout=1200),
    Benchmark("time_to_accuracy_long", "tests.bench.time_to_accuracy_long", "the same on long uneven answers", timeout=2400),
)


def find(names: list[str]) -> list[Benchmark]:
    """The benchmarks named, in the list's order; all without names. Raises KeyError with the unknown name."""
    known = {b.name for b in BENCHMARKS}
    for name in names:
        if name not in known:
            raise KeyError(name)
    return [b for b in BENCHMARKS if not names or b.name in names]
