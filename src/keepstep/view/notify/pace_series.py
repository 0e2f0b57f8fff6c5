"""How fast a run is, as series by step for experiment trackers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepstep.view.incident_words import lost_share
from keepstep.view.run_snapshot import RunSnapshot

_TRAINS = ("running", "warming up", "created", "")


@dataclass(frozen=True, slots=True)
class PacePoint:
    """How the run stood at a step."""

    step: int
    unix_s: float
    iteration_s: float | None  # median of the ranks' last iterations; None where nothing is known
    own_s: float | None  # median of the time in which a rank waited for nobody
    lost_share: float  # share of the time that is being lost: 0 all is well, 1 the job does not train
    open_incidents: int
    loss_now_steps: (
        int | None
    )  # steps that would be lost with the worst placed node; None without checkpoints

    @property
    def series(self) -> dict[str, float]:
        """What is known of it, by the names of the series."""
        named = {
            "iteration_s": self.iteration_s,
            "own_s": self.own_s,
            "lost_share": self.lost_share,
            "open_incidents": self.open_incidents,
            "loss_now_steps": self.loss_now_steps,
        }
        return {name: float(value) for name, value in named.items() if value is not None}


class Pace:
    """Gives a point for each snapshot with another step, or with another share lost."""

    def __init__(self) -> None:
        self._last: tuple[int, float, int] | None = None

    def point(self, snapshot: RunSnapshot) -> PacePoint | None:
        """The point to add to the series; None where nothing has changed, or nothing is known."""
        if snapshot.newest_step < 0 or snapshot.end is not None:
            return None
        open_ones = snapshot.open_incidents
        lost = lost_share(open_ones) if snapshot.state in _TRAINS else 1.0
        known = (snapshot.newest_step, round(lost, 3), len(open_ones))
        if known == self._last:
            return None
        self._last = known
        ranks = snapshot.ranks
        return PacePoint(
            step=snapshot.newest_step,
            unix_s=snapshot.unix_s,
            iteration_s=None if ranks is None else _median(ranks.iteration_s),
            own_s=None if ranks is None else _median(ranks.self_s),
            lost_share=lost,
            open_incidents=len(open_ones),
            loss_now_steps=snapshot.loss_now_steps,
        )


def _median(values: npt.NDArray[np.float32]) -> float | None:
    """The median of what is above 0; None where nothing is."""
    found = values[values > 0]
    return float(np.median(found)) if len(found) else None
