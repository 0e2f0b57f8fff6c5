"""Writes process groups into the ring when they are created: name, members as global ranks, and backends."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from keepstep.capture.aborts import Aborts
from keepstep.capture.internals import backends_of, record_calls, registered_members, timeout_of
from keepstep.capture.recorder import NO_GROUP, Recorder
from keepstep.core.events import HOST_BACKENDS, TIMEOUT_NOTE


class CapturedGroup:
    """One process group of this process."""

    __slots__ = ("_reference", "host_devices", "host_only", "ident", "members")

    def __init__(
        self, ident: int, members: tuple[int, ...], backends: dict[str, str], reference: Any
    ) -> None:
        self.ident = ident
        self.members = members
        self.host_devices = frozenset(d for d, name in backends.items() if name in HOST_BACKENDS)
        self.host_only = len(backends) > 0 and len(self.host_devices) == len(backends)
        self._reference = reference

    def global_rank(self, group_rank: int) -> int:
        """The global rank of a member, or the group rank itself if the members are not known."""
        return self.members[group_rank] if 0 <= group_rank < len(self.members) else group_rank


class Groups:
    """Looks up groups by identity without keeping them alive."""

    def __init__(self, recorder: Recorder, aborts: Aborts) -> None:
        self._recorder, self._aborts = recorder, aborts
        self.known: dict[int, CapturedGroup] = {}  # by ``id()`` of the group
        self._made: Counter[str] = Counter()
        self._hooks: list[Any] = []  # keep the flight recorder recording
        self._answers = False  # whether the agent can ask what torch's flight recorder holds

    def capture(self, group: Any, ranks: list[int] | None) -> CapturedGroup:
        """Write a group to the ring, unless it is there already.

        ``ranks``: global ranks in group order; empty for the group of all ranks; None to look them up in torch.
        """
        key = id(group)
        found = self.known.get(key)
        if found is not None:
            return found
        members = registered_members(group) if ranks is None else tuple(ranks) or tuple(range(group.size()))
        backends = backends_of(group)
        writer = self._recorder.writer
        ident = NO_GROUP
        if writer is not None:
            name = self._unique(str(group.group_name))
            backend = ",".join(f"{device}:{name}" for device, name in sorted(backends.items()))
            ident = writer.group(name, members, backend, str(group.group_desc))
            if (timeout_s := timeout_of(group)) > 0:
                writer.site(f"{TIMEOUT_NOTE}{timeout_s:g}")
            if not HOST_BACKENDS.issuperset(backends.values()):
                self._answer_agent(group)
        known = self.known
        reference = weakref.ref(group, lambda _: self._gone(key))
        known[key] = made = CapturedGroup(ident, members, backends, reference)
        return made

    def _answer_agent(self, group: Any) -> None:
        """Let the agent ask what torch's flight recorder holds of a group of a device."""
        try:
            if (hook := record_calls(group)) is not None:
                self._hooks.append(hook)
            if not self._answers:
                self._answers = True
                from keepstep.capture.device_answers import answer_agent

                answer_agent(self._aborts)
        except (AttributeError, OSError, KeyError, RuntimeError, TypeError) as error:
            self._recorder.stumbled(error)

    def _gone(self, key: int) -> None:
        """Let another group have the place of one that is no more: a job may make more than the ring has places."""
        gone, writer = self.known.pop(key, None), self._recorder.writer
        if gone is not None and writer is not None:
            writer.retire(gone.ident)

    def forget(self) -> None:
        """Forget all groups: they have been destroyed, and the next ones go into another ring."""
        self.known.clear()
        self._made.clear()

    def _unique(self, name: str) -> str:
        # torch reuses the names of destroyed groups. All members of a group count the reuses alike.
        self._made[name] += 1
        return name if self._made[name] == 1 else f"{name}#{self._made[name]}"
