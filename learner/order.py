"""Groups in dispatch order: the places that the admission rule counts, and the batches cut from the front.

A uid is its own place in the order, since uids only rise. A group is in `flight`, `kept`, or in one of `cuts`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from learner.buffer_records import summary_from_json, summary_to_json
from verifier.records import GroupSummary


@dataclass
class Slot:
    """What the buffer knows of a group that is not closed; its state is the ledger's."""

    uid: int
    ordinal: int  # groups dispatched before it in the whole run
    attempt: int = 0  # the current or last one; the first is 1
    failures: int = 0
    version: int = 0  # that the engine had acknowledged at dispatch
    kind: str = ""  # of a kept group without signal (filter_groups off): all_right, all_wrong or equal
    engine: int | None = None
    verifier: int | None = None  # of a group that is verified
    since: float = 0.0  # clock, of its present state
    summary: GroupSummary | None = None  # of a kept group
    payload: Any = None

    def staleness(self, index: int) -> int:
        """If it trains as batch `index`; a group without a single token, or not yet kept, has the version it was sent under."""
        return index - (self.version if self.summary is None or not self.summary.tokens else self.summary.version_min)

    def to_json(self) -> list[Any]:
        """Without engine, payload and times."""
        summary = None if self.summary is None else summary_to_json(self.summary)
        return [self.uid, self.ordinal, self.attempt, self.failures, self.version, self.kind, summary]


@dataclass
class OpenCut:
    """A cut batch that is not committed, and what is needed to undo it."""

    index: int
    uids: list[int]
    fillers: int
    unkept: int  # the refill counter before the cut
    origin: int  # the order's, before the cut
    last: int  # uid up to which groups count into this batch's statistics
    since: float = 0.0
    handed: bool = True  # False after a resume: it is to be given out again

    def to_json(self) -> list[Any]:
        """Without times."""
        return [self.index, self.uids, self.fillers, self.unkept, self.origin, self.last]


@dataclass
class DispatchOrder:
    """Sorted uids by where they are; `size` is B, `origin` the ordinal of the first group after the last batch."""

    size: int
    groups: dict[int, Slot] = field(default_factory=dict)
    flight: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    cuts: list[OpenCut] = field(default_factory=list)
    origin: int = 0

    def place(self, uid: int | None = None) -> int:
        """Groups kept or in flight before this one (None: before a new one). An uncommitted batch takes B places, also a short one:
        what follows it trains with the next batch at the earliest.
        """
        before = (len(u) if uid is None else bisect_left(u, uid) for u in (self.kept, self.flight))
        return len(self.cuts) * self.size + sum(before)

    def add(self, slot: Slot) -> None:
        """A new group, last in order."""
        self.groups[slot.uid] = slot
        self.flight.append(slot.uid)

    def keep(self, uid: int) -> None:
        """From flight to kept."""
        self.flight.remove(uid)
        insort(self.kept, uid)

    def back(self, uid: int) -> Slot:
        """From kept to flight, without its data."""
        slot = self.groups[uid]
        slot.summary, slot.payload, slot.kind = None, None, ""
        self.kept.remove(uid)
        insort(self.flight, uid)
        return slot

    def remove(self, uid: int) -> Slot:
        """Out of the order, from flight or kept."""
        (self.kept if uid in self.kept else self.flight).remove(uid)
        return self.groups.pop(uid)

    def full(self) -> bool:
        """True when B groups are kept and no group dispatched before the last of them is unresolved."""
        return len(self.kept) >= self.size and (not self.flight or self.kept[self.size - 1] < self.flight[0])

    def take(self, index: int, fillers: int, unkept: int, last: int, now: float) -> OpenCut:
        """The first B kept groups, or all when they are fewer, become a cut batch."""
        cut = OpenCut(index, self.kept[: self.size], fillers, unkept, self.origin, last, now)
        del self.kept[: self.size]
        self.cuts.append(cut)
        self.origin = self.groups[cut.uids[-1]].ordinal + 1
        return cut

    def commit(self) -> None:
        """The oldest cut batch has trained."""
        for uid in self.cuts.pop(0).uids:
            del self.groups[uid]

    def undo_cuts(self, first: int) -> int:
        """The cut batches from `first` on are kept groups again; returns what their cuts had taken from the refill counter."""
        undone, self.cuts = self.cuts[first:], self.cuts[:first]
        self.kept = sorted(self.kept + [uid for cut in undone for uid in cut.uids])
        self.origin = undone[0].origin
        return sum(cut.unkept for cut in undone)

    def too_late(self, batches: int, max_staleness: int) -> list[int]:
        """Groups that could train only beyond the bound; none, unless batch_size or the bound were lowered between two lives of a run.

        With k = 0 what stands behind the next batch may be overprovision and still move up, so only its version counts.
        """
        first, place, late = batches + len(self.cuts), 0, []
        for uid in sorted(self.kept + self.flight):
            slot, index = self.groups[uid], first + (place // self.size if max_staleness else 0)
            if (index - batches if slot.summary is None else slot.staleness(index)) > max_staleness:
                late.append(uid)
            else:
                place += 1
        return late

    def refills_only(self) -> bool:
        """True when each of the first B groups after the last batch is resolved: what is in flight replaces dropped ones."""
        return bool(self.flight) and self.groups[self.flight[0]].ordinal - self.origin >= self.size

    @classmethod
    def from_json(cls, size: int, origin: int, groups: Iterable[list[Any]], cuts: Iterable[list[Any]], now: float) -> DispatchOrder:
        """The order as it was; kept groups still lack their payloads, and groups in flight their engines."""
        new = cls(size, origin=origin)
        for uid, ordinal, attempt, failures, version, kind, summary in groups:
            slot = new.groups[uid] = Slot(uid, ordinal, attempt, failures, version, kind, since=now)
            slot.summary = None if summary is None else summary_from_json(summary)
        for index, uids, fillers, unkept, before, last in cuts:
            new.cuts.append(OpenCut(index, list(uids), fillers, unkept, before, last, now, handed=False))
        cut = {uid for c in new.cuts for uid in c.uids}
        new.flight = sorted(uid for uid, slot in new.groups.items() if slot.summary is None)
        new.kept = sorted(uid for uid, slot in new.groups.items() if slot.summary is not None and uid not in cut)
        return new
