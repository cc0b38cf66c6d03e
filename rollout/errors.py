"""The one class of error that a user can cause, and the name that was meant by a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave: one sentence that names the key, the value and the remedy; exit code 2."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that was most likely meant by `name`, whatever its case, dashes for underscores; None where none is like it.

    By the Damerau-Levenshtein distance (optimal string alignment), up to a third of the letters; else a name that contains the other.
    """
    wanted = name.lower().replace("-", "_")
    if not wanted:
        return None
    apart = [(_distance(wanted, other.lower().replace("-", "_")), i, other) for i, other in enumerate(known)]
    within = [found for found in apart if found[0] <= max(1, max(len(wanted), len(found[2])) // 3) and found[0] < len(wanted)]
    if not within and len(wanted) > 2:
        within = [f for f in apart if wanted in (low := f[2].lower().replace("-", "_")) or (len(low) > 2 and low in wanted)]
    return min(within)[2] if within else None


def _distance(a: str, b: str) -> int:
    """Letters to change, add, take away or swap with their neighbour between two words."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(row[-1] + 1, last[j] + 1, last[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]
