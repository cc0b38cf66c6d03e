"""Messages between the pool and its processes: four bytes of length, then JSON. Never pickle: the other end is not trusted that far."""

from __future__ import annotations

import json
import mmap
import struct
from typing import Any

MAX_REPLY = 1 << 22  # bytes; a longer reply is a fault, its sender is killed
MAX_DETAIL = 300  # characters of a verdict's reason

_LENGTH = struct.Struct(">I")

PAGE = 4096
IDLE, LOADING = -1, -2


class Progress:
    """What a process is doing, in memory that it shares with the pool, so that a deadline costs no message.

    The process writes the item of its batch (or IDLE, LOADING) and since when by the monotonic clock; the pool writes the item it must not
    start. Every store is one aligned word: `struct.pack_into` would clear the place first, and the pool would see item 0 since time 0.
    """

    def __init__(self, page: mmap.mmap) -> None:
        """`page`: PAGE bytes that both sides map."""
        self._page = page
        self._words = memoryview(page).cast("q")
        self._times = memoryview(page).cast("d")

    def set(self, state: int, since: float) -> None:
        """The process's side. The time comes first: between the two stores an item can only look younger."""
        self._times[1] = since
        self._words[0] = state

    def get(self) -> tuple[int, float]:
        """The pool's side: item or state, and since when."""
        while True:
            state = self._words[0]
            since = self._times[1]
            if state == self._words[0]:
                return state, since

    @property
    def limit(self) -> int:
        """The first item that must not be started."""
        return self._words[8]

    @limit.setter
    def limit(self, index: int) -> None:
        self._words[8] = index

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._times.release()
        self._page.close()


def pack(message: Any) -> bytes:
    """One message as bytes. Lone surrogates and NULs survive, because JSON escapes them."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _LENGTH.pack(len(body)) + body


class Reader:
    """Puts messages together from whatever the pipe gives."""

    def __init__(self, limit: int = MAX_REPLY) -> None:
        """`limit`: bytes of the longest message."""
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete now. Raises ValueError on one that is too long or is not JSON."""
        self._buffer += data
        messages = []
        at = 0
        while len(self._buffer) - at >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > self._limit:
                raise ValueError(f"a message of {length} bytes")
            if len(self._buffer) - at - 4 < length:
                break
            messages.append(json.loads(self._buffer[at + 4 : at + 4 + length]))
            at += 4 + length
        if at:
            del self._buffer[:at]
        return messages
