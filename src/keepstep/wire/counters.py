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

    def refuse(self, reason: Reason, peer_host: str, now_s: float) -> bool:
        """Count a refusal; True if it should be logged, because it is the first of this host within a minute."""
        self.refused[reason] += 1
        said = self._said
        last_s = said.get(peer_host)
        if last_s is not None and now_s - last_s < _SAY_AGAIN_S:
            return False
        said[peer_host] = now_s
        said.move_to_end(peer_host)
        if len(said) > _REMEMBERED_PEERS:
            said.popitem(last=False)
        return True

    def as_dict(self) -> dict[str, int]:
        """All counts by name; refusals are named ``refused_REASON``."""
        counts = {
            "messages_in": self.messages_in,
            "messages_out": self.messages_out,
            "bytes_in": self.bytes_in,
            "connections": self.connections,
            "dropped": self.dropped,
        }
        counts.update({f"refused_{reason}": count for reason, count in self.refused.items()})
        return counts
