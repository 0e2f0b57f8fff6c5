"""What the agent keeps of one rank: its ring, the process that writes it, and what was made of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from keepstep.agent.ranks.host_ring import HostRing
from keepstep.agent.ranks.track import RankTrack
from keepstep.agent.sensors.activity import Suspect
from keepstep.agent.sensors.processes import ProcessId, state_of
from keepstep.agent.sensors.unseen_nccl import NcclRecords
from keepstep.core.summary import STOPPED, GroupInfo
from keepstep.ring import RingHeader

_SUSPECT_NS = 2_000_000_000  # time without progress after which a process is suspected
_STEADY_STEPS = 4  # steps after which a rank calls as often as it always will


@dataclass(slots=True)
class WatchedRing:
    """The ring of one rank, and the process that writes it."""

    rank: int
    path: str
    track: RankTrack
    reader: HostRing | None = None
    header: RingHeader | None = None
    process: ProcessId | None = None
    complaint: str = ""
    next_try_ns: int = 0
    ended: bool = False  # its process is gone or has closed the ring
    stopped_since_ns: int = 0  # since when its process has been seen stopped; 0: it was not at the last look
    next_look_ns: int = 0
    next_telling_ns: int = 0  # when to tell again that it hangs in its start-up; 0: not
    main_site: str = ""  # the line of code of most of its last operations
    groups: int = 0  # how many of its groups have been sent or need not be
    # The process group that each communicator serves, by the communicator's number.
    served: Mapping[int, str] = field(default_factory=dict[int, str])

    @property
    def counts(self) -> int:
        """Changes with every call that begins, whoever records it, and with every end that the probe records."""
        return self.track.progress + (self.header.written if self.header is not None else 0)

    def base(self) -> tuple[int, int, int] | None:
        """Its last iteration, the optimizer steps until then, and those of one iteration; None: that is not known."""
        cutter = self.track.cutter
        until, before = cutter.steps_at_end_of(cutter.step), cutter.steps_at_end_of(cutter.step - 1)
        if until is None or before is None:
            return None
        return cutter.step, until, max(until - before, 1)

    def forget_standstill(self) -> None:
        """Begin anew with how long it stands still."""
        self.next_telling_ns = 0
        self.track.forget_standstill()

    def forget_groups(self) -> None:
        """Another process writes its ring."""
        self.groups, self.served = 0, {}

    def take_unsent_groups(self) -> list[GroupInfo]:
        """Its groups that have not been sent, or of which it is known now which process groups they serve.

        They count as sent from now on.
        """
        groups = self.track.groups
        open_places = [at for at, one in enumerate(groups) if one.is_communicator and at not in self.served]
        sent, self.groups = range(self.groups), len(groups)
        if open_places and self.reader is not None:
            self.served = {**self.reader.served_groups(), **self.served}
        fresh = [
            at for at in range(len(groups)) if at not in sent or (at in open_places and at in self.served)
        ]
        served = self.served
        return [replace(groups[at], serves=served[at]) if at in served else groups[at] for at in fresh]

    def process_state(self) -> str:
        """The letter of ``/proc`` for the state of its process; "" while that is not known."""
        return state_of(self.process) if self.process is not None else ""

    def look_at_process(self, now_ns: int) -> str:
        """The same; also notes since when the process is stopped."""
        state = self.process_state()
        self.stopped_since_ns = (self.stopped_since_ns or now_ns) if state in STOPPED else 0
        return state


def suspects(rings: Iterable[WatchedRing], now_ns: int) -> dict[int, Suspect]:
    """The ranks' processes that make no progress, though they do not wait for others."""
    return {
        ring.rank: Suspect(
            ring.process, tuple(dict.fromkeys((ring.process.pid, ring.track.thread))), ring.track.progress
        )
        for ring in rings
        if ring.process is not None
        and not ring.ended
        and now_ns - ring.track.last_progress_ns > _SUSPECT_NS
        and (not ring.track.waiting or ring.stopped_since_ns)
    }


def having_devices(rings: Iterable[WatchedRing]) -> dict[int, tuple[int, int]]:
    """The living processes that have groups of a device, and their counts, by rank."""
    return {
        ring.rank: (ring.process.pid, ring.counts)
        for ring in rings
        if ring.process is not None and not ring.ended and ring.track.has_device
    }


def asking_devices(rings: Iterable[WatchedRing]) -> dict[int, tuple[int, int]]:
    """The same of those that stand still for longer than usual and may wait for a device."""
    return {
        ring.rank: (ring.process.pid, ring.counts)
        for ring in rings
        if ring.process is not None and not ring.ended and ring.track.asks_device
    }


def calls_made(rings: Iterable[WatchedRing]) -> dict[int, tuple[int, int]]:
    """How many operations were called, and how many groups there are, by process, of ranks that train on a device."""
    return {
        ring.process.pid: (ring.reader.calls(), len(ring.track.groups))
        for ring in rings
        if ring.process is not None and ring.reader is not None and not ring.ended
        if ring.track.has_device and ring.track.steps >= _STEADY_STEPS
    }


def training_on_nccl(rings: Iterable[WatchedRing]) -> dict[int, ProcessId]:
    """The living processes, by rank, that have groups of torch's on NCCL."""
    return {
        ring.rank: ring.process
        for ring in rings
        if ring.process is not None and not ring.ended and ring.track.has_device
        if any(_is_on_nccl(group) for group in ring.track.groups)
    }


def launching(rings: Sequence[WatchedRing]) -> dict[int, tuple[int, int]]:
    """The processes on NCCL, and their counts, by rank; empty while one of them may make or end a communicator."""
    on_nccl = training_on_nccl(rings)
    own = [ring for ring in rings if ring.rank in on_nccl]
    if any(ring.reader is None or ring.reader.may_change_communicators() for ring in own):
        return {}
    return {ring.rank: (on_nccl[ring.rank].pid, ring.counts) for ring in own}


def nccl_records(ring: WatchedRing) -> NcclRecords:
    """What its ring has of NCCL."""
    if ring.reader is None:
        return NcclRecords(calls=False, seen=True)
    groups = ring.track.groups
    calls: Counter[int] = Counter()
    for place, started in ring.reader.streams()[["group", "started"]].tolist():
        calls[place] += started
    used = [groups[place] for place, count in calls.items() if count > 1 and 0 <= place < len(groups)]
    seen = any(group.is_communicator for group in ring.reader.groups())
    return NcclRecords(any(map(_is_on_nccl, used)), seen, ring.reader.sites())


def _is_on_nccl(group: GroupInfo) -> bool:
    return not group.is_communicator and ":nccl" in group.backend
