"""What each seed of ``hang-true`` does: drawn alike by the plan and by the job itself."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.campaign.case import drawn, kind_of

NAME = "hang-true"
PATIENCE_S = 20.0  # of ``--hang-patience``
STOPPED_PATIENCE_S = 60.0  # of ``--stopped-patience``, which is not given
SPINNING = 10.0  # times the patience
# Each kind, and the patience that holds for it.
KINDS = {
    "lock": PATIENCE_S,
    "gil": PATIENCE_S,
    "loader": PATIENCE_S,
    "stopped": STOPPED_PATIENCE_S,
    "spinning": SPINNING * PATIENCE_S,
    "set-up": PATIENCE_S,
    "backward": PATIENCE_S,
    "data": PATIENCE_S,
}


@dataclass(frozen=True)
class Stuck:
    """One seed: ``rank`` gets stuck at ``step`` of the first incarnation."""

    kind: str
    nproc: int
    rank: int
    step: int
    steps: int

    @property
    def patience_s(self) -> float:
        """Seconds from then until its process may be ended."""
        return KINDS[self.kind]


def draw(seed: int) -> Stuck:
    """The seed's own job."""
    chance = drawn(NAME, seed)
    nproc = chance.choice((3, 3, 8))
    rank, step = chance.randrange(nproc), chance.randint(15, 50)
    return Stuck(kind_of(NAME, seed, KINDS), nproc, rank, step, step + chance.randint(10, 30))
