"""A process that has reasoning-gym imported and lends a jailed child to each answer: some of its scorers evaluate what they are given.

Started by `verifier.gym`; a line of JSON in, a line of JSON out. The server itself never looks at an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from typing import Any

from verifier import jail

MAX_REPLY = 4096


def main() -> None:
    """Serve until standard input ends."""
    jail.LIBC.prctl(jail.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import reasoning_gym  # noqa: F401  (2 to 3 s, once)

    scratch = tempfile.mkdtemp(prefix=f"winnow-scratch-{os.getpid()}-")
    print(json.dumps({"ready": True}), file=reply, flush=True)
    for line in sys.stdin:
        print(json.dumps(_judge(json.loads(line), scratch)), file=reply, flush=True)
    os.rmdir(scratch)


def _judge(job: dict[str, Any], scratch: str) -> dict[str, Any]:
    """The score of one answer, found by a child that can do nothing else."""
    result_r, result_w = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.close(result_r)
            _child(job, scratch, result_w, parent)
        finally:
            os._exit(0)
    os.close(result_w)
    said, end = b"", time.monotonic() + job["limits"]["time_s"]
    late = False
    while True:
        ready, _, _ = select.select([result_r], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            late = True
            break
        data = os.read(result_r, MAX_REPLY)
        said += data
        if not data or len(said) > MAX_REPLY:
            break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(result_r)
    if late:
        return {"late": True}
    try:
        return dict(json.loads(said))
    except (ValueError, TypeError):
        return {"raised": "no report"}


def _child(job: dict[str, Any], scratch: str, result: int, parent: int) -> None:
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) not in (2, result):
            with contextlib.suppress(OSError):
                os.close(int(fd))
    from reasoning_gym.factory import DATASETS

    readable = [
        sys.prefix,
        sys.base_prefix,
        *(p for p in sys.path if os.path.isdir(p)),
        "/usr/lib",
        "/lib",
        "/lib64",
        "/usr/share/zoneinfo",
    ]
    made = job["task"] in DATASETS
    dataset = None
    if made:
        cls, config = DATASETS[job["task"]]
        dataset = cls(config(size=1, seed=0))
    layers = jail.enter({"parent": parent, "limits": job["limits"], "uid": 0, "scratch": scratch, "landlock": True, "readable": readable})
    if not job["anyway"] and not (layers["landlock"] and layers["seccomp"]):
        os.write(result, json.dumps({"open": True}).encode())
        return
    if dataset is None:
        os.write(result, json.dumps({"unknown": True}).encode())
        return
    try:
        said: dict[str, Any] = {"score": float(dataset.score_answer(job["answer"], job["entry"]))}
    except BaseException as e:
        said = {"raised": type(e).__name__}
    os.write(result, json.dumps(said).encode())


if __name__ == "__main__":
    main()
