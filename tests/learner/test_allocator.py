"""The learner's heap on a CPU: freed memory is kept for the next batch, and what holds nothing goes back now and then.

In a process of its own, since an allocator's settings last. Does not cover: C libraries other than glibc, where neither has an effect,
and how much memory a long run takes (`make soak`).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from learner.allocator import ENVIRONMENT

PROGRAM = """
import ctypes, psutil
from learner.allocator import EVERY, give_back_unused, keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
resident = lambda: psutil.Process().memory_info().rss / 2**20
assert keep_freed_memory()
blocks = []
for _ in range(64):  # MiB, with something small between them that stays, as a heap with holes has
    blocks.append(libc.malloc(2**20))
    ctypes.memset(blocks[-1], 1, 2**20)
    libc.malloc(100)
full = resident()
for block in blocks:
    libc.free(block)
print(full - resident())
assert not give_back_unused(EVERY - 1) and full - resident() < 8
assert give_back_unused(EVERY)
print(full - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_freed_memory_stays_until_it_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kept, given = map(float, done.stdout.split())
    assert kept < 8 and given > 48, "of 64 MiB"


THREAD = """
import ctypes, resource, threading
from learner.allocator import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
assert keep_freed_memory()

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(5 * 2**20) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 5 * 2**20)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def work():
    step()
    print(step())

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_what_a_thread_freed_stays_as_well() -> None:
    """Pages that a second step of 200 MiB on another thread has to touch anew, as the actor is started and otherwise."""
    faults = []
    for variables in (ENVIRONMENT, {}):
        done = subprocess.run([sys.executable, "-c", THREAD], capture_output=True, text=True, timeout=60, env={**os.environ, **variables})
        assert done.returncode == 0, done.stderr
        faults.append(int(done.stdout))
    assert faults[0] < 100 and faults[1] > 5_000, faults
