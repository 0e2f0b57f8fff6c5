"""Counts messages, connections and refusals, and limits how often a refusal is logged."""

from __future__ import annotations

from collections import OrderedDict

from keepstep.wire.violation import REASONS, Reason

_SAY_AGAIN_S = 60.0
_REMEMBERED_PEERS = 1024


class Counters:
    """Counts of one server or client since it was created."""

    __slots__ = ("_said", "bytes_in", "connections", "dropped", "messages_in", "messages_out", "refused")

    def __init__(self) -> None:
        self.refused: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.messages_in = 0
        self.messages_out = 0
        self.bytes_in = 0
        self.connections = 0
        self.dropped = 0  # messages for which a bounded queue had no room
        self._said: OrderedDict[str, float] = OrderedDict()

    def refuse(self, reason: Reason, peer: str, now_s: float) -> bool:
        """Count the refusal of "host:port"; True if it is the first of this host within a minute, to be logged."""
        self.refused[reason] += 1
        said, host = self._said, peer.rpartition(":")[0]
        if host in said and now_s - said[host] < _SAY_AGAIN_S:
            return False
        said[host] = now_s
        said.move_to_end(host)
        if len(said) > _REMEMBERED_PEERS:
            said.popitem(last=False)
        return True

    def as_dict(self) -> dict[str, int]:
        """All counts by name; refusals are named ``refused_REASON``."""
        names = ("messages_in", "messages_out", "bytes_in", "connections", "dropped")
        refused = {f"refused_{reason}": count for reason, count in self.refused.items()}
        return {name: getattr(self, name) for name in names} | refused
