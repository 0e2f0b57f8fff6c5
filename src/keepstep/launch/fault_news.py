"""What a run's folder newly tells of bad nodes, to whoever gives a scheduler orders about them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from keepstep.core.errors import RunError
from keepstep.launch.schedulers.node_faults import NodeFault, faults_of
from keepstep.report.ended_run import DrainedNode, members_of
from keepstep.report.incidents import read_incident


class FaultNews:
    """Faults of a job's nodes, each time that its incidents, or the nodes that play ranks, have changed."""

    def __init__(self, folder: Path, nodes: Collection[str], most: int, *, heeds_incidents: bool) -> None:
        """
        Args:
            folder: the run's folder; what an earlier run left there is not news.
            nodes: of the job; no other one has faults here.
            most: how many nodes one incident may blame; of more the network is the likelier cause.
            heeds_incidents: whether incidents are read, or only what operators ask for.
        """
        self._folder, self._nodes, self._most, self._heeds = folder, frozenset(nodes), most, heeds_incidents
        self._earlier = {path: path.stat().st_mtime_ns for path in self._incidents}
        self._read = dict(self._earlier)  # when each incident that has been read was written
        self._members: frozenset[str] = frozenset()
        self._asked: set[DrainedNode] = set(members_of(folder)[1])

    @property
    def _incidents(self) -> list[Path]:
        return sorted(self._folder.glob("incidents/[0-9]*.json"))

    def read(self) -> list[NodeFault]:
        """The faults of all that has changed since the last call."""
        members, drained = members_of(self._folder)
        if members != self._members:  # a slow node counts once a spare has its ranks, whenever that was
            self._members, self._read = members, dict(self._earlier)
        found = [NodeFault(one.node, "told", 0, one.why) for one in drained if one not in self._asked]
        self._asked |= set(drained)
        for path in self._incidents if self._heeds else ():
            with suppress(OSError, RunError):
                changed_ns = path.stat().st_mtime_ns
                if self._read.get(path) != changed_ns:
                    told = [one for one in faults_of(read_incident(path), members) if one.node in self._nodes]
                    found += told if len(told) <= self._most else ()  # mass silence excludes nobody
                    self._read[path] = changed_ns
        return found
