"""Messages between the pool and its processes: four bytes of length, then JSON. Never pickle: the other end is not trusted that far."""

from __future__ import annotations

import json
import struct
from typing import Any

MAX_REPLY = 1 << 22  # bytes; a longer reply is a fault, its sender is killed
MAX_DETAIL = 300  # characters of a verdict's reason

_LENGTH = struct.Struct(">I")

# A process writes here, in memory it shares with the pool, what it is doing: the item of its batch (or one of the states below), since when
# by the monotonic clock, and the pool answers with the item it must not start. So a deadline costs no message.
PROGRESS = struct.Struct("<qd")
LIMIT = struct.Struct("<q")
LIMIT_AT = 64
PAGE = 4096
IDLE, LOADING = -1, -2


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
