"""The register of a job's incidents: their numbers, when each began or ended, and the one place to publish them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from keepstep.control.cluster import Cluster
from keepstep.control.effects import Effect, Say, Send, Tell, WriteIncident
from keepstep.control.incidents.hang_evidence import END_HUNG, Patience, blamed_by, hang_outlook
from keepstep.control.incidents.talk import Saying, Talk
from keepstep.control.membership.reforming import Reforming
from keepstep.control.running.thresholds import LiveSettings
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Incident
from keepstep.core.summary import RankState
from keepstep.wire.messages import SaveRings

_NO_STEP = 1 << 62
_MOST_RECENT = 64
_SAVE_ALL_RANKS = 1024  # in larger jobs only the rings of blamed nodes are saved
_OUTLOOK = {  # what a slowdown's verdict says comes next, by --mitigate
    "auto": "none yet: a remedy is applied once one pays",
    "advise": "none: a remedy that pays is only advised (--mitigate advise)",
    "off": "none (--mitigate off)",
}


class Register:
    """The incidents of one job."""

    def __init__(
        self,
        settings: LiveSettings,
        cluster: Cluster,
        reforming: Reforming,
        effects: list[Effect],
        unix_s: Callable[[float], float],
    ) -> None:
        self.newest_number = 0  # the highest incident number given out in this run
        self.now_s = 0.0  # the time of the last tick
        self.recent: dict[int, Incident] = {}  # the last incidents by number, each as it was published last
        self.version = 0  # how many changes of incidents there were
        self._versions: dict[int, int] = {}  # by incident number: when it changed last
        self._settings, self._cluster, self._reforming = settings, cluster, reforming
        self._talk = Talk()
        self._effects, self._unix_s = effects, unix_s
        self._changes: deque[int] = deque(maxlen=64)  # steps at which a slowdown began or ended
        self.ended: dict[
            int, tuple[int, int | None]
        ] = {}  # incident and step in which a hung rank was ended last

    @property
    def patience(self) -> Patience:
        """How long processes that hang are left alone now."""
        return Patience(self._settings.now.hang_patience_s, self._settings.now.stopped_patience_s)

    def restore(self, incident: Incident) -> None:
        """Take over an incident that an earlier controller of this run published."""
        self.newest_number = max(self.newest_number, incident.number)
        self._note(incident)
        if incident.kind == "slow" and incident.status == "open":
            self._talk.knows(incident)
        if incident.onset_step is not None:
            self._changes.append(incident.onset_step)

    def next_number(self) -> int:
        """A number for a new incident that no incident of this run has had."""
        self.newest_number += 1
        return self.newest_number

    def previous_change(self, step: int) -> int:
        """The last step before ``step`` at which another incident began or ended; -1 when there is none."""
        return max((change for change in self._changes if change < step), default=-1)

    def next_change(self, step: int) -> int:
        """The first step after ``step`` at which another incident began or ended; beyond all steps if there is none."""
        return min((change for change in self._changes if change > step), default=_NO_STEP)

    def stamped(self, action: Action) -> Action:
        """The action with the present step and time as its beginning."""
        step = self._cluster.newest_step
        return replace(action, step=step if step >= 0 else None, begun_unix_s=self._unix_s(self.now_s))

    def publish(
        self,
        incident: Incident,
        say: Saying,
        standing: Callable[[int], Finding | None] | None = None,
        states: Mapping[int, RankState] | None = None,
    ) -> None:
        """Write the incident, with what will be done next about an open one, and, if wanted, print it.

        A hang's next action depends on ``standing`` (the finding of a rank that is still stuck) and on the last known
        ``states`` of ranks.
        """
        waits = incident.status == "open" and not incident.actions
        what, in_s = self._outlook(incident, standing, states or {}) if waits else ("", None)
        at_unix_s = None if in_s is None else self._unix_s(self.now_s + in_s)
        incident = replace(incident, next_action=what, next_unix_s=at_unix_s)
        self._note(incident)
        self._effects.append(WriteIncident(incident))
        if told := self._talk.tells(incident, say, self.now_s):
            if told == "verdict":
                self.tell_untold()
            self._effects.append(Say(incident, told))
            if told == "verdict":
                self._save_rings(incident)
        if incident.onset_step is not None and incident.kind == "slow":
            change = incident.onset_step if incident.relief_step is None else incident.relief_step
            if change not in self._changes:
                self._changes.append(change)

    def changed_since(self, version: int) -> list[tuple[int, Incident]]:
        """The recent incidents that have changed since this version, the first change first, with their versions."""
        changed = [(at, number) for number, at in self._versions.items() if at > version]
        return [(at, self.recent[number]) for at, number in sorted(changed)]

    def is_overdue(self, incident: Incident) -> bool:
        """Whether nothing was printed of an open slowdown, and it has lasted."""
        return self._talk.is_overdue(incident, self.now_s)

    def tell_untold(self) -> None:
        """Print how many slowdowns were not told, if there were any."""
        if untold := self._talk.take_untold():
            count = f"{untold} slowdowns" if untold > 1 else "1 slowdown"
            self._effects.append(Tell(f"{count} of a moment not told: keepstep report has all"))

    def _outlook(
        self,
        incident: Incident,
        standing: Callable[[int], Finding | None] | None,
        states: Mapping[int, RankState],
    ) -> tuple[str, float | None]:
        """What will be done about an open incident if nothing changes, and in how many seconds."""
        settings = self._settings.now
        if incident.kind == "slow":
            return _OUTLOOK[settings.mitigate], None
        if incident.kind in ("crash", "corrupt") or standing is None:
            return "", None
        if not settings.restart_hangs:
            why = "--on-hang report" if settings.max_restarts else "--max-restarts ends them"
            return f"none: hangs are reported, not ended ({why})", None
        if self._reforming.restarts >= settings.max_restarts:
            return "none: no restart is left", None
        blamed, why_not = blamed_by(incident, standing, self._cluster.known_ranks, self.ended)
        return hang_outlook(blamed, states, self.patience) if blamed else (f"none: {why_not}", None)

    def _note(self, incident: Incident) -> None:
        self.version += 1
        self.recent[incident.number], self._versions[incident.number] = incident, self.version
        if len(self.recent) > _MOST_RECENT:
            oldest = min(self.recent)
            del self.recent[oldest], self._versions[oldest]
        if any(action.name == END_HUNG for action in incident.actions):
            for culprit in incident.culprits:
                if culprit.rank is not None:
                    self.ended[culprit.rank] = incident.number, incident.onset_step

    def _save_rings(self, incident: Incident) -> None:
        agents = self._cluster.agents()
        if self._cluster.known_ranks > _SAVE_ALL_RANKS:
            named = {culprit.node for culprit in incident.culprits}
            named |= {node for one in incident.culprits if one.link for node in one.link.nodes}
            agents = {rank: peer for rank, peer in agents.items() if self._cluster.nodes[rank].name in named}
        if agents:
            self._effects.append(Send(tuple(agents.values()), SaveRings(incident.number)))
