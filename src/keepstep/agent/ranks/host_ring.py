"""Reads a ring as the agent needs it, with the records of the NCCL shim apart.

The shim records the same operations as the probe a second time, and its records end when the call returns, not when the
transfer ends. Taken for transfers they would spoil clocks, streams and waits. Those that have the GPU's times are kept
apart for `keepstep.agent.ranks.device_times`. Saved rings and ``keepstep.ring.RingReader`` have all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.agent.ranks.event_buffer import chosen
from keepstep.agent.ranks.last_calls import LastCalls, last_calls
from keepstep.agent.ranks.served_groups import served_groups
from keepstep.core.errors import KeepstepError, RingError
from keepstep.core.events import SET_UP, Flag, Kind, Life
from keepstep.core.own_folders import make_folder
from keepstep.core.summary import GroupInfo
from keepstep.ring import RETIRED, Batch, RingReader

logger = logging.getLogger("keepstep.agent")

_ENQUEUED, _TIMED = int(Flag.ENQUEUED), int(Flag.TIMED)
_COMMUNICATOR, _GROUP = int(Kind.COMMUNICATOR), int(Life.GROUP)


class HostRing(RingReader):
    """A ring without the records of the NCCL shim. ``groups()`` keeps the shim's, because places are group numbers."""

    _calls: tuple[int, LastCalls] | None = None
    # By number, whether a group is a communicator that the shim has seen made.
    _shims: Mapping[int, bool] = {}
    measured: Any = None  # what the shim has measured on the GPU by the latest poll

    def last_calls(self, progress: int) -> LastCalls:
        """The last collectives. ``progress``: a number that changes with every record, so that these are kept by it."""
        if self._calls is None or self._calls[0] != progress:
            self._calls = progress, last_calls(self.snapshot(), self.sites())
        return self._calls[1]

    def poll(self) -> Batch:
        batch, self.measured = self.poll_apart(_ENQUEUED, _TIMED)
        return batch

    def snapshot(self) -> Any:
        return _judged(super().snapshot())

    def in_flight(self) -> Any:
        return _judged(super().in_flight())

    def may_change_communicators(self) -> bool:
        """Whether NCCL is making or ending a communicator now, by the shim, or the shim has seen none made."""
        if not any(self._shims.values()):
            self._shims = _which_are_shims(self.groups())
        if not any(self._shims.values()):
            return True
        kinds: Any = super().in_flight()[["kind", "op"]]
        return bool(((kinds["kind"] == _COMMUNICATOR) & (kinds["op"] != _GROUP)).any())

    def streams(self) -> Any:
        rows: Any = super().streams()
        used: list[int] = rows["group"].tolist()
        shims = self._shims_among(used)
        return chosen(rows, np.array([not shims.get(group, False) for group in used], np.bool_))

    def calls(self) -> int:
        """How many operations the rank has called, as far as is known.

        The probe and the shim each count what they see: the probe misses what C++ calls, the shim what is not NCCL's.
        """
        streams: Any = super().streams()
        shims = self._shims_among(streams["group"].tolist())
        made = [0, 0]
        for group, started in streams[["group", "started"]].tolist():
            if group in shims:
                made[shims[group]] += started
        return max(made)

    def served_groups(self) -> Mapping[int, str]:
        """The name of the process group that each communicator serves, by its number, as far as calls show it."""
        return served_groups(super().snapshot(), self.groups())

    def _shims_among(self, used: Sequence[int]) -> Mapping[int, bool]:
        """Whether each of these groups is a communicator of the shim's, by number; groups are listed for new ones."""
        if any(group not in self._shims for group in used if group >= 0):
            # Of a group that is gone it is not known any more: it is taken for the probe's, and not looked for again.
            self._shims = {**dict.fromkeys(used, False), **_which_are_shims(self.groups())}
        return self._shims


def _which_are_shims(groups: Sequence[GroupInfo]) -> dict[int, bool]:
    """By number; without those that are gone or, where numbers are not given in order, not there yet."""
    return {at: group.is_communicator for at, group in enumerate(groups) if group is not RETIRED}


def process_groups(groups: Sequence[GroupInfo]) -> list[GroupInfo]:
    """The process groups of torch that are there, among those of a ring: neither the NCCL shim's nor ``SET_UP``."""
    return [group for group in groups_there(groups) if not group.is_communicator]


def groups_there(groups: Sequence[GroupInfo]) -> list[GroupInfo]:
    """The process groups of torch that are there, and the communicators that the NCCL shim has seen made."""
    return [group for group in groups if group.name != SET_UP and group is not RETIRED]


def key_of(group: GroupInfo) -> tuple[str, tuple[int, ...]]:
    """The same for groups of which the controller needs to be told only once."""
    partly = group.is_communicator and not group.members  # Each member tells its own place then.
    return f"{group.name} {group.desc}" if partly else group.name, group.members


def save_rings(readers: Mapping[int, HostRing], folder: Path) -> tuple[int, bool]:
    """Save these rings, by rank; return how many were saved, and whether one may be later, as after a full disk."""
    saved, is_late = 0, False
    for rank, reader in readers.items():
        try:
            make_folder(folder)
            reader.save(folder / f"rank-{rank:05d}.ring")
            saved += 1
        except (RingError, OSError) as error:  # noqa: PERF203  the others are saved all the same
            logger.warning("rank %d: its ring could not be saved: %s", rank, error)
            is_late = is_late or not isinstance(error, KeepstepError)
    return saved, is_late


def _judged(rows: Any) -> Any:
    enqueued = (rows["flags"] & _ENQUEUED) != 0
    return chosen(rows, ~enqueued) if enqueued.any() else rows
