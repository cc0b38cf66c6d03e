"""Which result of which attempt counts: the first of an attempt that is awaited; every other only books its tokens."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 4096  # groups whose accepted attempt is remembered, so that a result delivered twice is booked once


class Results:
    """Attempts whose result was booked, and surplus groups whose result may still come."""

    def __init__(self) -> None:
        self._late: dict[int, int] = {}  # surplus groups that still run: uid -> attempt
        self._accepted: OrderedDict[int, int] = OrderedDict()  # uid -> attempt

    def accept(self, uid: int, attempt: int) -> None:
        """The attempt's result is booked."""
        self._accepted[uid] = attempt
        if len(self._accepted) > REMEMBERED:
            self._accepted.popitem(last=False)

    def expect_late(self, uid: int, attempt: int) -> None:
        """The group has ended as surplus, and its result may still come."""
        self._late[uid] = attempt

    def gone(self, uid: int, attempt: int) -> None:
        """That attempt has failed: nothing more comes of it."""
        if self._late.get(uid) == attempt:
            del self._late[uid]

    def unexpected(self, uid: int, attempt: int) -> str:
        """What a result is that no group waits for: `twice` (booked before), `late` (of a surplus group), `lost` (another counts)."""
        if self._accepted.get(uid) == attempt:
            return "twice"
        if self._late.get(uid) != attempt:
            return "lost"
        del self._late[uid]
        self.accept(uid, attempt)
        return "late"
