"""Ray's actors as objects of this process, so that a whole run fits into one process that starts at once and can be killed at any line.

An async actor has a thread with an event loop of its own, any other as many threads as it may have calls. Results are futures, and errors
are Ray's own classes. There is no serialisation, no placement and no other machine: those are for the tests with the real Ray.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import ray


class Ref:
    """An object, or what a call will give."""

    def __init__(self, value: Any = None, future: Future[Any] | None = None) -> None:
        self.future: Future[Any] = Future() if future is None else future
        if future is None:
            self.future.set_result(value)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(asyncio.wrap_future(self.future)).__await__()


class Actor:
    """The handle and the actor in one."""

    def __init__(self, cls: type, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._dead = False
        self._waiting: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._run: Callable[..., Future[Any]]
        if any(inspect.iscoroutinefunction(f) for _, f in inspect.getmembers(cls, inspect.isfunction)):
            events = asyncio.new_event_loop()
            threading.Thread(target=events.run_forever, daemon=True).start()
            self._run = lambda f, args: asyncio.run_coroutine_threadsafe(_asynchronously(f, args), events)
        else:
            threads = ThreadPoolExecutor(options.get("max_concurrency", 1))
            self._run = lambda f, args: threads.submit(lambda: f(*(a.future.result() if isinstance(a, Ref) else a for a in args)))
        self._made = Ref(future=self._run(lambda: cls(*args, **kwargs), ()))

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def _call(self, name: str, number: int, args: tuple[Any, ...]) -> Any:
        if name == "__ray_terminate__":
            return Ref()
        outs: list[Future[Any]] = [Future() for _ in range(number)]
        with self._lock:
            if self._dead:
                for out in outs:
                    out.set_exception(ray.exceptions.RayActorError())
            self._waiting |= set(outs) if not self._dead else set()
        if not self._dead:
            work = self._run(lambda made, *args: getattr(made, name)(*args), (self._made, *args))
            work.add_done_callback(lambda done: self._deliver(done, name, outs))
        refs = [Ref(future=out) for out in outs]
        return refs[0] if number == 1 else refs

    def _deliver(self, done: Future[Any], name: str, outs: list[Future[Any]]) -> None:
        with self._lock:
            if self._dead or done.cancelled():
                return
            self._waiting -= set(outs)
        error = done.exception()
        if error is not None:
            error = ray.exceptions.RayTaskError(name, "".join(map(str, error.args)), error).as_instanceof_cause()
        values = [None] * len(outs) if error is not None else [done.result()] if len(outs) == 1 else done.result()
        for out, value in zip(outs, values, strict=True):
            out.set_exception(error) if error is not None else out.set_result(value)

    def _kill(self) -> None:
        with self._lock:
            self._dead, waiting = True, self._waiting
            self._waiting = set()
        for out in waiting:
            out.set_exception(ray.exceptions.RayActorError())


async def _asynchronously(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = function(*[await a if isinstance(a, Ref) else a for a in args])
    return await result if inspect.isawaitable(result) else result


class Method:
    """`handle.name`: called by `remote`, or by `options(num_returns=2).remote`."""

    def __init__(self, actor: Actor, name: str, number: int = 1) -> None:
        self.actor, self.name, self.number = actor, name, number

    def options(self, num_returns: int = 1) -> Method:
        """With so many results."""
        return Method(self.actor, self.name, num_returns)

    def remote(self, *args: Any) -> Any:
        """The call."""
        return self.actor._call(self.name, self.number, args)


class Remote:
    """`ray.remote(cls)`."""

    def __init__(self, cls: type, options: dict[str, Any] | None = None) -> None:
        self.cls, self._options = cls, options or {}

    def options(self, **options: Any) -> Remote:
        """Resources mean nothing here."""
        return Remote(self.cls, options)

    def remote(self, *args: Any, **kwargs: Any) -> Actor:
        """The actor."""
        return Actor(self.cls, self._options, args, kwargs)


class Places:
    """There is room."""

    def options(self, kind: str, index: int, bundle: dict[str, float], env: dict[str, str]) -> dict[str, Any]:
        """Nothing to say to an actor."""
        return {}

    def node(self, kind: str, index: int) -> str:
        """Every actor has a place."""
        return "this one"


def install(patch: pytest.MonkeyPatch) -> None:
    """In place of Ray, until the patch is undone."""
    from cluster import live, placement
    from rollout.actor import Rollout

    def get(refs: Any) -> Any:
        return [r.future.result() for r in refs] if isinstance(refs, list) else refs.future.result()

    for name, value in {"remote": Remote, "get": get, "put": Ref, "kill": lambda actor: actor._kill()}.items():
        patch.setattr(ray, name, value)
    patch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    patch.setattr(Rollout, "pids", lambda self: [])  # an engine's processes are killed at the end, and this is ours
    patch.setattr(live.Live, "set", lambda self, metrics: None)
    nothing = dict.fromkeys(("begin", "join"), lambda cfg: None)
    for name, value in {**nothing, "reserve": lambda cfg, **rest: Places(), "leave": lambda: None}.items():
        patch.setattr(placement, name, value)
