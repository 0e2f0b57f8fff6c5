"""Runs to be told of, and receivers that write down what they get."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from keepstep.core.incident import Action, Confidence, Culprit, Incident
from keepstep.view.notify.notice import Notice
from keepstep.view.notify.telling import Notices, Rules
from keepstep.view.notify.told_state import Told, told_from_json, told_to_json
from keepstep.view.run_snapshot import RunEnd, RunSnapshot

START_S = 1_700_000_000.0
LOOSE = Rules(at_once=1000, per_hour=1e9, flapping_times=1000)
HOSTILE = "<!channel> <script>alert(1)</script>\x1b[31m\r\nBcc: all@example.com &amp; *bold*"


def culprit(rank: int, confidence: Confidence = "high", node: str = "gpu-1") -> Culprit:
    return Culprit(rank, None, node, "backward", 2.0, confidence, "compute")


def slow(number: int, *ranks: int, **more: Any) -> Incident:
    """An open slowdown that these ranks are blamed for."""
    known: dict[str, Any] = {
        "culprits": tuple(culprit(rank) for rank in ranks),
        "detected_unix_s": START_S + number,
        "iteration_before_s": 0.5,
        "iteration_after_s": 1.0,
        "job_slowdown": 2.0,
        "world_size": 4,
    }
    return replace(Incident(number, "slow", 25, 27, None, 2.0, (), (), (), ()), **{**known, **more})


def crash(number: int, rank: int, **more: Any) -> Incident:
    return slow(number, rank, **{"kind": "crash", "job_slowdown": None, **more})


def over(incident: Incident, status: str = "relieved") -> Incident:
    return replace(incident, status=status, relief_step=40, closed_unix_s=incident.detected_unix_s + 30)  # pyright: ignore[reportArgumentType]


def acted(incident: Incident, name: str = "S3, exchange", begun_unix_s: float = START_S + 100) -> Incident:
    action = Action(name, detail="gpu-1 and gpu-2", begun_unix_s=begun_unix_s)
    return replace(incident, actions=(*incident.actions, action))


def seen(*incidents: Incident, **more: Any) -> RunSnapshot:
    """A run with these incidents."""
    known: dict[str, Any] = {"state": "running", "newest_step": 30, "world_size": 4, "max_restarts": 3}
    return RunSnapshot("train-7b", START_S + 60, incidents=incidents, **{**known, **more})


def ended(exit_code: int, *incidents: Incident, category: str = "training") -> RunSnapshot:
    end = RunEnd(exit_code, category, "rank 3 was killed" if exit_code else "")
    return seen(*incidents, state="ended", end=end)


@dataclass
class Look:
    """Looks at a run again and again, by a clock of its own."""

    rules: Rules = field(default_factory=lambda: LOOSE)
    now_s: float = START_S
    notices: Notices = field(init=False)

    def __post_init__(self) -> None:
        self.notices = Notices(self.rules)

    def at(self, snapshot: RunSnapshot, later_s: float = 1.0) -> list[Notice]:
        self.now_s += later_s
        return self.notices.since(snapshot, self.now_s)

    def what(self, snapshot: RunSnapshot, later_s: float = 1.0) -> list[tuple[str, int]]:
        """What is told, and of which incident (-1: of the run)."""
        return [told(one) for one in self.at(snapshot, later_s)]

    def restart(self) -> None:
        """As when the server is started again: only what was written is known."""
        written: Told = told_from_json(told_to_json(self.notices.told), "told")
        self.notices = Notices(self.rules, written)


def told(notice: Notice) -> tuple[str, int]:
    return notice.what, -1 if notice.incident is None else notice.incident.number
