"""Ends what an engine's owner leaves behind: `python -I rollout/reaper.py PID MARK FOLDER`, a process of its own session.

vLLM's core outlives an actor that is killed, and while it starts it does not look after its parent either. This process waits
for the owner's end, however it comes, then kills every process whose environment carries the mark and removes the folder, in which a
core that was killed leaves its sockets. It imports next to nothing, so that it is there before the engine is.
"""

import os
import select
import signal
import subprocess
import sys
import time

ROUNDS, PAUSE = 20, 0.25  # a process that is being forked meanwhile is met in a later round


def start(owner: int, mark: str, folder: str) -> "subprocess.Popen[bytes]":
    """Watch `owner`; `mark` is `NAME=value` as it stands in the environment of the processes to kill, `folder` what to remove."""
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(owner), mark, folder]
    environment = {k: v for k, v in os.environ.items() if f"{k}={v}" != mark}
    return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)


def marked(mark: bytes) -> list[int]:
    """Processes whose environment carries the mark, this one apart."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue
    return found


def main(owner: int, mark: bytes, folder: str) -> None:
    """Wait for the owner, then kill and remove."""
    try:
        handle = os.pidfd_open(owner)
        select.select([handle], [], [])
    except ProcessLookupError:
        pass
    import shutil  # not before it is needed

    for _ in range(ROUNDS):
        for pid in marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(PAUSE)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3])
