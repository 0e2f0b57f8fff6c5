"""Asking all agents at once, and deciding with what has come when the time is up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

A = TypeVar("A")

MOST_ROWS = 4_000_000  # iteration summaries or states kept for one question


@dataclass(slots=True)
class Question(Generic[A]):
    """One request to many agents: complete when all have answered, due at ``deadline_s`` whatever has come."""

    number: int
    awaited: set[int]  # node ranks
    deadline_s: float
    answers: list[A] = field(default_factory=list[A])
    rows: int = 0

    def answer(self, node_rank: int, answer: A, rows: int) -> None:
        """Take one node's answer; a second one, or one beyond the bound, is ignored."""
        if node_rank not in self.awaited:
            return
        self.awaited.discard(node_rank)
        if self.rows + rows <= MOST_ROWS:
            self.rows += rows
            self.answers.append(answer)

    def due(self, now_s: float) -> bool:
        """Decide now."""
        return not self.awaited or now_s >= self.deadline_s
