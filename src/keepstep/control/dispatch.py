"""Handlers of messages that concern one part of the controller alone.

All other messages concern several parts in a certain order, and are handled by methods of the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from keepstep.control.backup_orders import Backups
from keepstep.control.cases import Cases
from keepstep.control.cluster import Cluster
from keepstep.control.membership.peers import Peer
from keepstep.wire.messages import (
    Groups,
    Held,
    Inventory,
    Measured,
    Reachable,
    Recovered,
    Splits,
    Validate,
)

_MOST_ENDPOINTS = 4  # addresses kept for probes of one node


class Parts(Protocol):
    """The parts of the controller that these handlers need."""

    cluster: Cluster
    cases: Cases
    backups: Backups


Handler: TypeAlias = Callable[[Any, Peer, Any, float], None]


def _groups(parts: Parts, sender: Peer, message: Groups, now_s: float) -> None:
    parts.cluster.learn_groups(message.groups)


def _reachable(parts: Parts, sender: Peer, message: Reachable, now_s: float) -> None:
    if sender.node is not None:
        sender.node.endpoints = message.endpoints[:_MOST_ENDPOINTS]


def _tested(parts: Parts, sender: Peer, message: Held | Measured, now_s: float) -> None:
    if sender.node is not None:
        parts.cases.desk.validations.told(sender.node, message, now_s)


def _validate(parts: Parts, sender: Peer, message: Validate, now_s: float) -> None:
    parts.cases.desk.validations.asked(sender.number, message, now_s)


def _splits(parts: Parts, sender: Peer, message: Splits, now_s: float) -> None:
    if sender.node is not None:
        parts.cases.mitigation.shares.told(sender.node, message)


def _inventory(parts: Parts, sender: Peer, message: Inventory, now_s: float) -> None:
    if sender.node is not None and message.node_rank == sender.node.rank:
        parts.backups.heard(sender.node, message)


def _recovered(parts: Parts, sender: Peer, message: Recovered, now_s: float) -> None:
    parts.cases.recovered(message.recovery, now_s)


FOR_ONE_PART: Mapping[type, Handler] = {
    Groups: _groups,
    Reachable: _reachable,
    Held: _tested,
    Measured: _tested,
    Validate: _validate,
    Splits: _splits,
    Inventory: _inventory,
    Recovered: _recovered,
}
