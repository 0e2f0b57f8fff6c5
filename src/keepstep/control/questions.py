"""Asking all agents at once, and deciding with what has come when the time is up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MOST_ROWS = 4_000_000  # iteration summaries or states kept for one question


@dataclass(slots=True)
class Question:
    """One request to many agents: complete when all that are waited for have answered, due at ``deadline_s`` anyway."""

    number: int
    kind: type  # of the answers
    unanswered: set[int]  # node ranks
    deadline_s: float
    mute: frozenset[int] = frozenset()  # those of them that are not waited for
    answers: list[Any] = field(default_factory=list[Any])
    rows: int = 0

    def answer(self, node_rank: int, answer: Any, rows: int) -> bool:
        """Take one node's answer; a second one, or one beyond the bound, is ignored."""
        if type(answer) is not self.kind or node_rank not in self.unanswered:
            return False
        self.unanswered.discard(node_rank)
        if self.rows + rows > MOST_ROWS:
            return False
        self.rows += rows
        self.answers.append(answer)
        return True

    def due(self, now_s: float) -> bool:
        """Decide now."""
        return self.unanswered <= self.mute or now_s >= self.deadline_s
