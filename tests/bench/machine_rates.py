"""What the machine gives: every limit in the other rows is one of these rates, measured again where it is used."""

from __future__ import annotations

from tests.bench.measure import machine
from tests.bench.rows import Row, compare


def run() -> list[Row]:
    """Three measurements of each, whose spread says how quiet the machine is."""
    rates = [machine() for _ in range(3)]
    return [
        compare("machine/gemm", "GFLOP/s", [r.gemm / 1e9 for r in rates], note=f"float32, {rates[0].threads} threads"),
        compare("machine/memcpy", "GB/s", [r.memcpy / 1e9 for r in rates]),
    ]
