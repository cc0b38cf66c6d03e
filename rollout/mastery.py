"""What past groups say of prompts: those that stay solved are retired, and those that are too easy or too hard come less often."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from rollout.config import DataConfig

DECAY = 0.5  # weight that a prompt's earlier groups keep at each new one, so that its pass rate follows the policy


@dataclass
class Mastery:
    """One source's rows, by index, as far as groups of theirs have been trained or dropped."""

    streak: dict[int, int] = field(default_factory=dict)  # groups in a row with every answer right
    rate: dict[int, tuple[float, float]] = field(default_factory=dict)  # right answers and all answers, earlier groups decayed

    def note(self, row: int, right: int, answers: int, config: DataConfig) -> bool:
        """One more group of that row; True when it has been solved `retire_after` times in a row."""
        if config.curriculum:
            before = self.rate.get(row, (0.0, 0.0))
            self.rate[row] = (DECAY * before[0] + right, DECAY * before[1] + answers)
        if not config.retire_after:
            return False
        self.streak[row] = self.streak.get(row, 0) + 1 if right == answers else 0
        if not self.streak[row]:
            del self.streak[row]
        return self.streak.get(row, 0) >= config.retire_after

    def chance(self, row: int, config: DataConfig) -> float:
        """Probability that the row is drawn when its turn comes in an epoch.

        4 p (1 - p), the variance of one answer's reward against its largest, with p = (right + ½) / (answers + 1); never below
        `curriculum_floor`, so that a prompt that was too hard is asked again. A row without a group is always drawn.
        """
        if not config.curriculum or row not in self.rate:
            return 1.0
        right, answers = self.rate[row]
        p = (right + 0.5) / (answers + 1.0)
        return max(config.curriculum_floor, 4.0 * p * (1.0 - p))

    def drawn(self, row: int, key: str, config: DataConfig) -> bool:
        """Whether its turn is taken; `key` names seed, source and epoch, so that a resume decides the same."""
        chance = self.chance(row, config)
        if chance >= 1.0:
            return True
        digest = hashlib.blake2b(f"{key}/{row}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < chance * 2.0**64

    def forget(self, row: int) -> None:
        """The row is retired."""
        self.streak.pop(row, None)
        self.rate.pop(row, None)

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"streak": sorted(self.streak.items()), "rate": [[row, *rate] for row, rate in sorted(self.rate.items())]}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Mastery:
        """The inverse of `state`."""
        return cls({row: n for row, n in state["streak"]}, {row: (right, answers) for row, right, answers in state["rate"]})
