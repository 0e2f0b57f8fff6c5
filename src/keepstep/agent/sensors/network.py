"""What is known of the node's network: its TCP connections, NCCL's transfers, and the ports of its fabric."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keepstep.agent.sensors import nccl_links
from keepstep.agent.sensors.nccl_traffic import NcclTraffic
from keepstep.agent.sensors.path_rates import WINDOW_S, chosen
from keepstep.agent.sensors.ports import PortSensor
from keepstep.agent.sensors.processes import ProcessId
from keepstep.agent.sensors.sockets import MOST_PEERS, SocketSensor
from keepstep.core.errors import RingError
from keepstep.core.port_counters import PortTraffic
from keepstep.core.summary import GroupInfo, LinkState, PeerTraffic
from keepstep.wire.messages import PathRate

logger = logging.getLogger("keepstep.agent")


class NetworkSensors:
    """All that counts what the node's ranks send. ``tables``: paths of NCCL's link tables by rank."""

    def __init__(self, node: str, tables: Mapping[int, str], ports: PortSensor | None = None) -> None:
        self._node, self._tables, self._ports = node, tables, ports
        self.sockets = SocketSensor()
        self._nccl = NcclTraffic(tables)
        self._window_s: float | None = None  # when the window of `lately` began

    def look(
        self,
        now_s: float,
        processes: Mapping[int, ProcessId],
        groups_of: Callable[[int], Sequence[GroupInfo]],
        *,
        now: bool,
    ) -> None:
        """Take samples that are due.

        ``groups_of``: the process groups that a rank is in. ``now``: of the sockets in any case.
        """
        if now or self.sockets.is_due(now_s):
            self.sockets.look(now_s, processes.values())
        self._nccl.look(now_s, groups_of)

    def traffic(self, onset_s: float, most: int = MOST_PEERS) -> tuple[PeerTraffic, ...]:
        """What was sent before and after a moment: the ``most`` busiest paths over TCP, and as many of NCCL's."""
        return (
            *self.sockets.traffic(onset_s, self._node, most),
            *self._nccl.traffic(onset_s, self._node, most),
        )

    def lately(self, now_s: float) -> tuple[PathRate, ...]:
        """What was sent on each path in the last ten seconds, once in as many; between them nothing."""
        if self._window_s is None:
            self._window_s = now_s
        seconds = now_s - self._window_s
        if seconds < WINDOW_S:
            return ()
        self._window_s = now_s
        return chosen(self.sockets.rates.close_window(seconds) + self._nccl.rates.close_window(seconds))

    def ports(self, onset_s: float) -> tuple[PortTraffic, ...]:
        """What each port of the fabric counted before and after a moment."""
        return () if self._ports is None else self._ports.traffic(onset_s, self._node)

    def standing_still(self, rank: int, groups: Sequence[GroupInfo]) -> tuple[LinkState, ...]:
        """The transfers of NCCL between a rank and its peers that stand still."""
        table = self._tables.get(rank)
        if table is None:
            return ()
        try:
            return nccl_links.standing_still(table, rank, groups)
        except RingError as error:
            logger.debug("rank %d: its link table cannot be read: %s", rank, error)
            return ()

    def save(self, folder: Path) -> None:
        """Save the link tables (`nccl_links.save`). Raises OSError."""
        nccl_links.save(self._tables, folder, self._nccl.usual)
