"""What each seed of ``blame`` does: drawn alike by the plan and by the job itself."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.campaign.case import drawn, kind_of

NAME = "blame"


@dataclass(frozen=True)
class Kind:
    """A kind of trouble.

    Attributes:
        incidents: what its incident may be called; a desync is a hang of which it is known why.
        timeout_s: of the collectives.
        ends_after_s: seconds from the trouble until the job is ended from outside, where it has not ended.
    """

    incidents: tuple[str, ...]
    timeout_s: float = 600.0
    ends_after_s: float = 40.0


_STANDS, _EITHER = ("hang", "desync"), ("hang", "desync", "crash")
_TOLD_WITHIN_S = 75.0  # trouble at the set-up is told within 60 s
KINDS = {
    # a rank leaves with exit code 0
    "exit 0 in the data": Kind(_EITHER),
    "exit 0 in the step": Kind(_EITHER),
    "stops alone": Kind(_EITHER),
    "one barrier more": Kind(_EITHER, 40.0, 50.0),
    # those that wait time out first
    "late in the data": Kind(_EITHER, 8.0),
    "late in backward": Kind(_EITHER, 8.0),
    "late for a monitored barrier": Kind(_EITHER),
    "hangs before the timeout": Kind(_EITHER, 25.0),
    # a rank dies of what it says itself
    "uncorrectable ECC": Kind(("crash",)),
    "unhandled cuda error": Kind(("crash",)),
    "invalid usage": Kind(("crash",)),
    "own storage": Kind(("crash",)),
    "own database": Kind(("crash",)),
    "aborts": Kind(("crash",)),
    # set-up
    "never comes to set-up": Kind(_STANDS, ends_after_s=_TOLD_WITHIN_S),
    "never comes to a group": Kind(_STANDS, ends_after_s=_TOLD_WITHIN_S),
    "never comes to the first barrier": Kind(_STANDS, ends_after_s=_TOLD_WITHIN_S),
    # what the program does differs from rank to rank
    "another size": Kind(_EITHER),
    "another type": Kind(_EITHER),
    "another operation": Kind(_EITHER),
    "another order of groups": Kind(_EITHER),
    "one collective more": Kind(_EITHER),
    "one backward less": Kind(_EITHER),
    # two at once
    "two killed": Kind(("crash",)),
}


@dataclass(frozen=True)
class Blame:
    """One seed: ``ranks`` are to blame from ``step`` on."""

    kind: str
    nproc: int
    ranks: tuple[int, ...]
    step: int
    steps: int
    step_s: float

    @property
    def rules(self) -> Kind:
        return KINDS[self.kind]


def draw(seed: int) -> Blame:
    """The seed's own job."""
    chance = drawn(NAME, seed)
    nproc = chance.choice((3, 8))
    kind = kind_of(NAME, seed, KINDS)
    ranks = tuple(sorted(chance.sample(range(nproc), 2 if kind == "two killed" else 1)))
    step = chance.randint(15, 60)
    return Blame(kind, nproc, ranks, step, step + chance.randint(30, 60), chance.choice((0.03, 0.05, 0.08)))
