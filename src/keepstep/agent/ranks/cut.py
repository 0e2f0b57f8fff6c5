"""One iteration of one rank with its records, or several alike that were cut together."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.agent.ranks.event_buffer import Rows, chosen
from keepstep.agent.ranks.intervals import Times, Union, clipped


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """An iteration, or several alike; times are in ns on the node's clock.

    Attributes:
        step: the number of the last iteration.
        rows: records that began in it and outside its pauses, and earlier records that were still in flight. A record
            whose end is 0 or after ``end_ns`` was in flight when the iteration ended.
        whole: no record was lost.
        ends_ns: where iterations were cut together, the end of each.
    """

    step: int
    start_ns: int
    end_ns: int
    rows: Rows
    pauses: Union
    evaluation_ns: int = 0
    checkpoint_ns: int = 0
    warm_up: bool = False
    whole: bool = True
    ends_ns: Times | None = None

    @property
    def duration_ns(self) -> int:
        """The duration of all its iterations without pauses, as a step clock in the script would show it."""
        return self.end_ns - self.start_ns - self.pauses.total_ns

    @property
    def steps(self) -> int:
        """How many iterations it holds."""
        return 1 if self.ends_ns is None else len(self.ends_ns)

    @property
    def first_step(self) -> int:
        """The number of its first iteration."""
        return self.step - self.steps + 1

    def singles(self) -> list[Cut]:
        """Its iterations one by one, in order."""
        if self.ends_ns is None:
            return [self]
        found: list[Cut] = []
        starts, ends, start_ns = self.rows["start_ns"], self.rows["end_ns"], self.start_ns
        for step, end_ns in enumerate(self.ends_ns.tolist(), self.first_step):
            inside = (starts < end_ns) & ((starts >= start_ns) | (ends == 0) | (ends > start_ns))
            pauses = Union(*clipped(self.pauses.starts, self.pauses.ends, start_ns, end_ns))
            found.append(
                Cut(step, start_ns, end_ns, chosen(self.rows, inside), pauses, checkpoint_ns=pauses.total_ns)
            )
            start_ns = end_ns
        return found
