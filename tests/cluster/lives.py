"""Lives of a run, each a process that can be killed with -9 at a named stage: the program that tests of exact resume drive.

    python -m tests.cluster.lives

reads one life a line (JSON: `flags` of `winnow train`, `kill` = [stage, step] or null, `slow` = [step, seconds] or null, `stuck` = true
for engines, prompts and verifiers that hang, `seed` of the engines' speeds) and answers each with a line: the exit code, negative for a
signal, what it printed, and the order in which groups came back. Each life is a fork of this process, which has imported everything and
started nothing. The run is the real one (loop, buffer, learner, verifier processes, checkpoints) on the deterministic engine, with actors
from `local_ray`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cluster import local_ray

BEFORE = ("generating", "verifying", "filling", "training", "trained")
AFTER = ("publishing", "evaluating", "saving the learner", "saving the books", "putting in place", "saved")
STAGES = (*BEFORE, *AFTER)
"""Before and after a batch is committed."""


def long_if_right(patch: pytest.MonkeyPatch) -> None:
    """Right answers get ten tokens more, so that being slow and being right go together."""
    from rollout.fake import FakeEngine

    answer = FakeEngine._answer

    def longer(self: Any, prompt: Any, *args: Any) -> Any:
        made = answer(self, prompt, *args)
        if made.text.split()[-1] != prompt.answer:
            return made
        tokens, logps = np.tile(made.tokens_T[:1], 10), np.tile(made.logp_T[:1], 10)
        span = replace(made.spans[0], stop=made.spans[0].stop + 10)
        tokens_T, logp_T = np.concatenate([tokens, made.tokens_T]), np.concatenate([logps, made.logp_T])
        return replace(made, tokens_T=tokens_T, logp_T=logp_T, spans=(span,), text=made.text[:1] * 10 + made.text)

    patch.setattr(FakeEngine, "_answer", longer)


def speeds(patch: pytest.MonkeyPatch, seed: int) -> None:
    """An engine takes a time for each token that is drawn for it, and for each group, anew in every life."""
    from rollout.fake import FakeEngine

    dice, generate = random.Random(seed), FakeEngine.generate

    async def slow(self: Any, prompt: Any, sampling: Any) -> Any:
        per_token = self.__dict__.setdefault("seconds_per_token", 10 ** dice.uniform(-5, -3.5))
        answers = await generate(self, prompt, sampling)
        await asyncio.sleep(per_token * max(len(a.tokens_T) for a in answers) * dice.uniform(0.5, 2.0))
        return answers

    patch.setattr(FakeEngine, "generate", slow)


def note_arrivals(patch: pytest.MonkeyPatch) -> None:
    """Print the uid of each group that comes back."""
    from learner.buffer import SamplingBuffer

    scored = SamplingBuffer.scored

    def noted(self: Any, uid: int, *args: Any) -> Any:
        print(f"arrived {uid}")
        return scored(self, uid, *args)

    patch.setattr(SamplingBuffer, "scored", noted)


def slow_micro_batches(patch: pytest.MonkeyPatch, step: int, seconds: float) -> None:
    """In that step each micro-batch takes so long, and SIGTERM comes in the first."""
    from learner.step import Learner

    work = Learner._loss
    sent: list[int] = []

    def slow(self: Any, *args: Any) -> Any:
        if self.counters.batches == step:
            if not sent:
                sent.append(1)
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(seconds)
        return work(self, *args)

    patch.setattr(Learner, "_loss", slow)


class EngineDeadError(Exception):
    """What an engine raises whose core is gone, by its name in vLLM."""


def get_stuck(patch: pytest.MonkeyPatch) -> None:
    """Group 6 is never answered, group 9 kills every engine, group 12 is never judged, and group 60 hangs the first engine that has it."""
    import cluster.generation
    import cluster.loop
    from rollout.fake import FakeEngine
    from verifier.actor import VerifierActor

    patch.setattr(cluster.generation, "DEADLINE_SLACK", 0.5)
    patch.setattr(cluster.loop, "STAGES_EVERY", 0.1)
    generate, score = FakeEngine.generate, VerifierActor.score
    hung: list[int] = []

    async def stuck(self: Any, prompt: Any, sampling: Any) -> Any:
        if prompt.uid == 6:
            await asyncio.Event().wait()
        if prompt.uid == 9:
            raise EngineDeadError
        if prompt.uid == 60 and not hung:
            hung.append(1)
            time.sleep(1000)
        return await generate(self, prompt, sampling)

    async def silent(self: Any, group: Any) -> Any:
        if group.prompt.uid == 12:
            await asyncio.Event().wait()
        return await score(self, group)

    patch.setattr(FakeEngine, "generate", stuck)
    patch.setattr(VerifierActor, "score", silent)


def arm(patch: pytest.MonkeyPatch, stage: str, step: int) -> None:
    """SIGKILL to this process in the middle of a stage, as soon as it is entered with at least `step` batches committed."""
    import cluster.checkpoint
    from cluster.loop import Loop
    from learner.buffer import SamplingBuffer
    from learner.optim import Update
    from learner.step import Learner
    from rollout.fake import FakeEngine
    from verifier.actor import VerifierActor

    loops: list[Loop] = []
    made = Loop.__init__
    patch.setattr(Loop, "__init__", lambda self, *a, **k: (made(self, *a, **k), loops.append(self))[0])

    def now(after: int = 0, _seen: list[int] = []) -> bool:  # noqa: B006
        if not loops or loops[0].step < step:
            return False
        _seen.append(1)
        return len(_seen) > after

    def before(cls: Any, name: str, when: Any = lambda *a: True, after: int = 0, signal_number: int = signal.SIGKILL) -> None:
        work = getattr(cls, name)
        sent: list[int] = []

        def killed(*args: Any, **kwargs: Any) -> Any:
            if not sent and when(*args) and now(after):
                sent.append(1)
                os.kill(os.getpid(), signal_number)
            return work(*args, **kwargs)

        patch.setattr(cls, name, killed)

    def behind(cls: Any, name: str) -> None:
        work = getattr(cls, name)

        def killed(*args: Any, **kwargs: Any) -> Any:
            result = work(*args, **kwargs)
            if now():
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        patch.setattr(cls, name, killed)

    if stage == "generating":  # some groups of the batch are there, others on their way
        before(FakeEngine, "_answer", lambda self, prompt, *rest: prompt.uid >= 0, after=5)
    elif stage == "verifying":
        before(VerifierActor, "score", lambda self, group: group.prompt.uid >= 0, after=2)
    elif stage == "filling":
        before(SamplingBuffer, "scored", after=2)
    elif stage == "stop":  # SIGTERM, and an end in order
        before(SamplingBuffer, "scored", after=2, signal_number=signal.SIGTERM)
    elif stage == "training":  # one of two optimiser steps is taken
        before(Update, "take", after=1)
    elif stage == "trained":
        behind(Learner, "train_batch")
    elif stage == "publishing":  # one engine has the new weights
        before(FakeEngine, "update", after=1)
    elif stage == "evaluating":
        before(FakeEngine, "_answer", lambda self, prompt, *rest: prompt.uid < 0, after=2)
    elif stage == "saving the learner":
        before(Learner, "save")
    elif stage == "saving the books":
        before(cluster.checkpoint, "_checksum", after=1)
    elif stage == "putting in place":
        before(os, "replace", lambda old, new: ".partial" in str(old))
    else:
        assert stage == "saved", stage
        behind(cluster.checkpoint, "finish")


def live(life: dict[str, Any]) -> int:
    """The whole of one life."""
    from cluster.launch import main

    with pytest.MonkeyPatch.context() as patch:
        local_ray.install(patch)
        long_if_right(patch)
        speeds(patch, life["seed"])
        note_arrivals(patch)
        if life["stuck"]:
            get_stuck(patch)
        if life["slow"]:
            slow_micro_batches(patch, *life["slow"])
        if life["kill"]:
            arm(patch, *life["kill"])
        return main(["train", *life["flags"]])


def fork(life: dict[str, Any]) -> dict[str, Any]:
    """Run a life in a process of its own, and say how it ended."""
    with tempfile.TemporaryFile("w+") as out:
        pid = os.fork()
        if not pid:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            code = 1
            try:
                code = live(life)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        lines = out.read().splitlines()
        arrived = [int(line.split()[1]) for line in lines if line.startswith("arrived ")]
        return {"code": code, "text": "\n".join(line for line in lines if not line.startswith("arrived ")), "arrived": arrived}


def main() -> None:
    """Lives until the input ends."""
    import cluster.checkpoint
    import cluster.run  # noqa: F401
    import learner.publish
    import learner.step
    import learner.warmup  # noqa: F401  # with torch, which the run's modules leave to the learner's process

    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
