"""The agent of one node without its connection: it polls the rings of its ranks and answers the controller."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from keepstep.agent.notices import Notices
from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.host_ring import HostRing, groups_there, key_of, process_groups, save_rings
from keepstep.agent.ranks.states import (
    know_device,
    loop_left,
    main_site,
    operations_in_flight,
    python_stack,
    rank_state,
)
from keepstep.agent.ranks.step_log import StepLog
from keepstep.agent.ranks.track import RankTrack
from keepstep.agent.ranks.watched_ring import (
    WatchedRing,
    asking_devices,
    calls_made,
    having_devices,
    launching,
    suspects,
)
from keepstep.agent.sensors.activity import ActivitySensor
from keepstep.agent.sensors.flight_recorder import Answer, RecorderSensor
from keepstep.agent.sensors.gpus import Gpus
from keepstep.agent.sensors.host import HostSensors
from keepstep.agent.sensors.network import NetworkSensors
from keepstep.agent.sensors.ports import PortSensor
from keepstep.agent.sensors.processes import GONE, ProcessId, alive, identify
from keepstep.agent.sensors.ras import RasSensor
from keepstep.agent.services.orders import Holding, Microbatches, RankPages
from keepstep.core.errors import RingError
from keepstep.core.summary import STOPPED, ClockSample, GroupInfo, HostCause, IterationSummary, RankState
from keepstep.ring import RingHeader
from keepstep.wire.messages import (
    Found,
    Groups,
    Heartbeat,
    Message,
    Profile,
    ProfileRequest,
    RankBeat,
    StateRequest,
    States,
)
from keepstep.wire.packed import pack

logger = logging.getLogger("keepstep.agent")

_REOPEN_NS = 2_000_000_000
_SILENT_NS = 1_000_000_000
_BUSIEST = 16  # network paths that are sent with the states
_CLOSE_LOOK_S = 0.2  # age of the last sample of the sockets above which a request for states takes a new one
_MOST_TOGETHER = 1024  # most iterations that are taken together, however short
_EARLY_STEPS, _EARLY_EVERY = 30, 2  # The first steps of an incarnation, and how many a heartbeat is sent for.
_TIMES_S = 30.0  # how long the GPU's times of calls are measured after the controller has asked for a profile
# A hang in the start-up is told so often: others may come to wait for it later.
_STARTING_NS = 30_000_000_000
# Time without progress after which a rank's process is looked at, then again at twice this.
_STILL_NS = 100_000_000
_SAVE_AGAIN_NS = 10_000_000_000


class NodeAgent:
    """Watches the ranks of one node. ``poll`` is called 20 times a second, ``heartbeat`` once a second.

    ``send`` takes the messages for the controller.
    """

    def __init__(
        self,
        rings: Mapping[int, str],
        node: str,
        node_rank: int,
        run_dir: Path,
        send: Callable[[Message], None],
        orders: Mapping[int, str] | None = None,
        links: Mapping[int, str] | None = None,
        gpus: Gpus | None = None,
        workers: Mapping[int, int] | None = None,
        ports: PortSensor | None = None,
    ) -> None:
        """``workers``: process ids by rank, as far as they are known before the ranks open their rings."""
        self._node, self._node_rank, self._run_dir, self._send = node, node_rank, run_dir, send
        self._rings = [
            WatchedRing(rank, path, RankTrack(rank, node, rings)) for rank, path in sorted(rings.items())
        ]
        for ring in self._rings:
            ring.process = identify(workers[ring.rank]) if workers and ring.rank in workers else None
        self._local = frozenset(rings)
        self._log = StepLog(run_dir / "nodes" / str(node_rank) / "iterations.jsonl", self._local)
        # Iterations that are not logged yet, with their start in Unix time, and how many were taken together.
        self._ended: list[tuple[IterationSummary, float, int]] = []
        self._sensors = HostSensors()
        self._gpus = gpus
        self.network = NetworkSensors(node, links or {}, ports)
        self._activity = ActivitySensor()
        self._recorder, self._ras = RecorderSensor(run_dir), RasSensor()
        self._notices = Notices(node, run_dir)
        self._save_again_ns = 0  # when rings are saved that could not be; 0: none
        self._sequence = 0
        self._told: dict[tuple[str, tuple[int, ...]], int] = {}  # groups that were sent, and by which rank
        self._tracks = {ring.rank: ring for ring in self._rings}
        self.pages = RankPages(orders or {})
        self.is_left_alone: Callable[[int], bool] = lambda rank: False  # ranks that no standstill is told of
        self._holding = Holding(self.pages, node_rank, self._steps_at_end_of)
        self.microbatches = Microbatches(self.pages, node_rank)
        self._all_overdue = False
        self._together = 1
        self._early_told = 0
        # Largest share of its ring that a rank wrote between the last two polls; above 1 records were lost.
        self.filled = 0.0

    def poll(self, now_ns: int) -> bool:
        """Read every ring; True if any had new records."""
        busy, self.filled = False, 0.0
        for ring in self._rings:
            try:
                busy = self._poll_ring(ring, now_ns) or busy
            except (RingError, OSError) as error:  # noqa: PERF203  it is tried again later
                self._complain(ring, str(error), now_ns)
        self._log_steps()
        for message in self._holding.poll():
            self._send(message)
        self._activity.look(now_ns * 1e-9, suspects(self._rings, now_ns))
        self._look_at_devices(now_ns)
        if self._rings and all(ring.track.waiting for ring in self._rings):
            last_ns = max(ring.track.last_progress_ns for ring in self._rings)
            # A sample taken now separates the traffic before the standstill from the traffic during it.
            if self.network.sockets.looked_s * 1e9 < last_ns:
                self._look_at_sockets(now_ns)
        return busy

    def take_together(self) -> bool:
        """Take twice as many short iterations together, as the agent costs too much. Whether some are short enough."""
        self._together = min(2 * self._together, _MOST_TOGETHER)
        for ring in self._rings:
            ring.track.cutter.together = self._together
        return any(ring.track.together > 1 for ring in self._rings)

    def hold(self, message: Message) -> None:
        """Carry out a message of the controller about holds."""
        self.poll(time.monotonic_ns())
        for answer in self._holding.receive(message):
            self._send(answer)

    def _look_at_devices(self, now_ns: int) -> None:
        """Ask ranks that stand still for longer than usual what their devices have to finish."""
        asking = asking_devices(self._rings)
        for rank, (counts, dump) in self._recorder.look(now_ns * 1e-9, asking).items():
            ring = self._tracks[rank]
            if ring.reader is not None and ring.counts == counts:
                know_device(ring.track, ring.track.progress, dump, ring.reader.streams(), now_ns)

    def _processes(self) -> dict[int, ProcessId]:
        return {ring.rank: ring.process for ring in self._rings if ring.process is not None}

    def pids(self) -> dict[int, int]:
        """The process ids of the ranks that have been seen, by rank."""
        return {rank: process.pid for rank, process in self._processes().items()}

    def _causes(self) -> tuple[HostCause, ...]:
        return self._sensors.causes() + (self._gpus.causes(self.pids()) if self._gpus is not None else ())

    def _look_at_sockets(self, now_ns: int, *, now: bool = True) -> None:
        self.network.look(now_ns * 1e-9, self._processes(), self._groups_of, now=now)

    def _groups_of(self, rank: int) -> list[GroupInfo]:
        return process_groups(self._tracks[rank].track.groups) if rank in self._tracks else []

    def _steps_at_end_of(self, rank: int, step: int) -> int | None:
        ring = self._tracks.get(rank)
        return ring.track.cutter.steps_at_end_of(step) if ring is not None and not ring.ended else None

    def base(self, rank: int) -> tuple[int, int, int] | None:
        """The last iteration of a rank, its optimizer steps until then, and those of one; None: that is not known."""
        ring = self._tracks.get(rank)
        return ring.base() if ring is not None and not ring.ended else None

    def has_news(self) -> bool:
        """Whether a heartbeat is due at once.

        It is when all ranks here began or stopped to wait longer than usual, and every other one of the first steps.
        """
        all_overdue = all(ring.track.watch.hang.overdue_s > 0 for ring in self._rings)
        changed, self._all_overdue = all_overdue != self._all_overdue, all_overdue
        return changed or self._early_steps()

    def _early_steps(self) -> bool:
        """Whether all ranks here have made another few of the first steps, in which peers are compared."""
        made = min((ring.track.steps for ring in self._rings), default=0) // _EARLY_EVERY
        news = self._early_told < made <= _EARLY_STEPS // _EARLY_EVERY
        self._early_told = made
        return news

    def heartbeat(self, now_ns: int) -> Heartbeat:
        """The next heartbeat. This also takes samples of processes and sockets, and flushes the log."""
        notices = self._notices.look(now_ns, self._rings, self._log)
        beats = tuple(self._beat(ring, now_ns) for ring in self._rings)
        self._sensors.look(now_ns * 1e-9, self._processes())
        self._look_at_sockets(now_ns, now=False)
        if self._recorder.is_time_due(now_ns * 1e-9):
            self._recorder.time(now_ns * 1e-9, calls_made(self._rings))
        clock = tuple(sample for ring in self._rings for sample in ring.track.clock.drain())
        if 0 < self._save_again_ns <= now_ns:
            self.save_rings()
        if (splits := self.microbatches.look()) is not None:
            self._send(splits)
        self._sequence += 1
        dropped = sum(ring.track.lost + (ring.header.dropped if ring.header else 0) for ring in self._rings)
        now_s, causes = now_ns * 1e-9, self._causes()
        return Heartbeat(self._node_rank, self._sequence, now_s, beats, clock, causes, dropped, notices)

    def again(self) -> list[Message]:
        """The messages that a new controller must hear after Hello: groups, and findings that still hold."""
        self.microbatches.again()
        self._told.clear()
        for ring in self._rings:
            ring.groups = 0
        groups = [message for ring in self._rings for message in self._new_groups(ring)]
        return groups + self.standing()

    def standing(self) -> list[Message]:
        """The findings that still hold."""
        return [Found(one) for ring in self._rings for one in ring.track.standing.values()]

    def forget_standstills(self) -> None:
        """Begin anew with how long ranks stand still."""
        for ring in self._rings:
            ring.forget_standstill()

    def profile(self, request: ProfileRequest) -> Profile:
        """The answer to a request: iterations, oldest first, and network traffic around the onset."""
        self._holding.take_times(_TIMES_S)
        for message in (message for ring in self._rings for message in self._new_groups(ring)):
            self._send(message)
        first, last, onset = request.first_step, request.last_step, request.onset_step
        wanted = frozenset(request.blocks_of)
        found = [one for ring in self._rings for one in ring.track.iterations(first, last, onset)]
        found.sort(key=lambda one: (one.step, one.rank))
        clock = self._recent_clock()
        asked = [ring.track for ring in self._rings if ring.rank in wanted]
        blocks = [block for track in asked for block in track.blocks(first, last)]
        onset_s = min((one.start_s for one in found if one.step == onset), default=None)
        return Profile(
            request.request,
            self._node_rank,
            () if request.packed else tuple(found),
            () if request.packed else clock,
            self._causes(),
            self.network.traffic(onset_s) if onset_s is not None else (),
            tuple(blocks),
            pack(found) if request.packed else None,
            self.network.ports(onset_s) if onset_s is not None else (),
        )

    async def states(self, request: StateRequest) -> States:
        """The answer to a request: the present state of every rank; stacks, if wanted, of those that do not wait."""
        asked = {
            ring.rank: ring.process.pid
            for ring in self._rings
            if request.stacks and ring.process is not None and not ring.ended and not ring.track.waiting
        }
        stacks = dict(zip(asked, await asyncio.gather(*map(python_stack, asked.values())), strict=True))
        now_s = time.monotonic()
        _, dumps = await asyncio.gather(
            self._ras.launched(now_s, launching(self._rings) if request.launched else {}),
            self._recorder.answers(now_s, having_devices(self._rings) if request.devices else {}),
        )
        now_ns = time.monotonic_ns()
        self.poll(now_ns)
        dumps = self._recorder.with_last(now_ns * 1e-9, dumps, having_devices(self._rings))
        states = [
            self._state(ring, now_ns, stacks.get(ring.rank, ""), dumps.get(ring.rank)) for ring in self._rings
        ]
        sites = {ring.rank: ring.main_site for ring in self._rings}
        known = [state for state in states if state is not None]
        loops = await asyncio.gather(*(loop_left(state.stack, sites[state.rank]) for state in known))
        known = tuple(replace(state, left_loop=loop) for state, loop in zip(known, loops, strict=True))
        clock = self._recent_clock()
        onset_s = max((state.last_progress_s for state in known if state.alive), default=0.0)
        if now_ns * 1e-9 - self.network.sockets.looked_s > _CLOSE_LOOK_S:
            self._look_at_sockets(now_ns)
        traffic, ports = self.network.traffic(onset_s, _BUSIEST), self.network.ports(onset_s)
        return States(request.request, self._node_rank, known, clock, traffic, ports)

    def _recent_clock(self) -> tuple[ClockSample, ...]:
        return tuple(sample for ring in self._rings for sample in ring.track.clock.recent())

    def addresses(self) -> tuple[set[str], set[str]]:
        """The ranks' own addresses, and the addresses to which they have connections, in the last sample."""
        return self.network.sockets.addresses()

    def save_rings(self) -> int:
        """Save readable rings to ``RUN/rings`` and link tables to ``RUN/links``; return the number of rings."""
        self._save_again_ns = 0
        written = [ring for ring in self._rings if ring.header is not None and ring.header.pid]
        readers = {ring.rank: ring.reader for ring in written if ring.reader is not None}
        saved, is_late = save_rings(readers, self._run_dir / "rings")
        if is_late:
            self._save_again_ns = time.monotonic_ns() + _SAVE_AGAIN_NS
        try:
            self.network.save(self._run_dir / "links")
        except OSError as error:
            logger.warning("link tables could not be saved: %s", error)
        return saved

    def close(self) -> None:
        """Release held ranks, and write the rest of the log."""
        self._holding.release()
        self.pages.close()
        for ring in self._rings:
            self._note_iterations(ring, ring.track.rest())
        self._log_steps()
        self._log.close()

    def _note_iterations(self, ring: WatchedRing, found: Iterable[tuple[IterationSummary, int]]) -> None:
        if (header := ring.header) is not None:
            self._ended.extend((one, header.unix_s(one.start_s), count) for one, count in found)

    def _poll_ring(self, ring: WatchedRing, now_ns: int) -> bool:
        if ring.reader is None:
            if now_ns < ring.next_try_ns:
                return False
            ring.reader = HostRing(ring.path)
        header = ring.reader.header
        if not header.pid:
            self._look(ring, None, now_ns)
            return False
        before = ring.header
        if before is None or (header.pid, header.incarnation) != (before.pid, before.incarnation):
            self._attach(ring, header)
        elif header.records:
            self.filled = max(self.filled, (header.written - before.written) / header.records)
        ring.header = header
        ring.track.cutter.first_step = header.first_step
        batch = ring.reader.poll()
        track = ring.track
        records = batch.started, batch.finished, batch.lost
        taken = track.take(*records, now_ns, ring.reader.groups, ring.reader.measured)
        if len(track.groups) > ring.groups:
            for message in self._new_groups(ring):
                self._send(message)
        self._note_iterations(ring, taken.iterations)
        for finding in taken.findings:
            self._send(Found(finding))
        if now_ns - track.last_progress_ns > _STILL_NS and now_ns >= ring.next_look_ns:
            ring.next_look_ns = now_ns + 2 * _STILL_NS
            ring.look_at_process(now_ns)
            track.know_groups(ring.reader.groups())
        self._look(ring, ring.reader.in_flight, now_ns)
        return len(batch.started) + len(batch.finished) > 0

    def _look(self, ring: WatchedRing, in_flight: Callable[[], Rows] | None, now_ns: int) -> None:
        """Check whether a rank makes progress; ``in_flight`` None: its process has not opened the ring yet."""
        has_no_process = in_flight is None and ring.process is None
        if ring.ended or has_no_process or self._notices.is_unwatched(ring.rank):
            return
        stillness = self._activity.stillness(ring.rank)
        since_s = stillness.since_s if stillness is not None and stillness.how == "still" else math.inf
        found = ring.track.look(
            now_ns,
            in_flight,
            stopped_ns=now_ns - ring.stopped_since_ns if ring.stopped_since_ns else 0,
            held=self._holding.held(ring.rank, now_ns) or self.is_left_alone(ring.rank),
            still_ns=max(now_ns - int(since_s * 1e9), 0) if since_s < math.inf else 0,
        )
        if found is None and now_ns >= ring.next_telling_ns > 0:
            found = ring.track.standing.get("hang")
        if found is None:
            return
        ring.next_telling_ns = now_ns + _STARTING_NS if found.kind == "hang" and found.step < 1 else 0
        ring.ended = ring.process is None or not alive(ring.process)
        if not ring.ended:  # the launcher, not the agent, reports dead processes
            logger.info("rank %d: %s", ring.rank, found)
            self._send(Found(found))

    def _attach(self, ring: WatchedRing, header: RingHeader) -> None:
        """Start afresh for a process that has claimed the ring."""
        if (hung := ring.track.standing.get("hang")) is not None:
            self._send(Found(replace(hung, kind="resumed", time_s=time.monotonic())))
        if ring.header is not None:
            ring.reader = HostRing(ring.path)
            self._note_iterations(ring, ring.track.rest())
            self._log_steps()
            self._log.flush()
        now_s = time.monotonic()
        self._log.claimed(ring.rank, header.realtime_ns * 1e-9, header.unix_s(now_s), header.incarnation)
        pauses = ring.track.watch.hang.pauses  # a new process of the same script will pause as long
        ring.track = RankTrack(ring.rank, self._node, self._local, header.records)
        ring.track.watch.hang.pauses.update(pauses)
        ring.track.watch.incarnation = header.incarnation
        ring.track.cutter.together = self._together
        ring.process = identify(header.pid)
        self._told = {key: rank for key, rank in self._told.items() if rank != ring.rank}
        ring.forget_groups()
        ring.ended, ring.complaint = False, ""
        logger.info("rank %d: process %d, incarnation %d", ring.rank, header.pid, header.incarnation)
        if header.rank != ring.rank:
            logger.warning("rank %d: its ring is written by rank %d", ring.rank, header.rank)

    def _log_steps(self) -> None:
        """Log the new iterations in order of steps, because the log keeps only few steps open at a time."""
        for iteration, start_unix_s, together in sorted(self._ended, key=lambda one: one[0].step):
            self._log.add(iteration, start_unix_s, together)
        self._ended.clear()

    def _complain(self, ring: WatchedRing, complaint: str, now_ns: int) -> None:
        ring.reader, ring.next_try_ns = None, now_ns + _REOPEN_NS
        if complaint != ring.complaint:
            ring.complaint = complaint
            logger.warning("rank %d is not watched: %s", ring.rank, complaint)

    def _new_groups(self, ring: WatchedRing) -> list[Message]:
        """A message with groups of the rank that no other rank of this node has reported, if there are any."""
        fresh = tuple(
            group
            for group in groups_there(ring.take_unsent_groups())
            if self._told.setdefault(key_of(group), ring.rank) == ring.rank
        )
        return [Groups(ring.rank, fresh)] if fresh else []

    def _beat(self, ring: WatchedRing, now_ns: int) -> RankBeat:
        track = ring.track
        state = ring.look_at_process(now_ns)
        gone = ring.header is not None and state in GONE
        ring.ended = gone or (ring.header is not None and ring.header.closed)
        phase, _ = track.phase()
        idle_ns = now_ns - track.last_progress_ns if track.last_progress_ns else 0
        first = None
        if idle_ns > _SILENT_NS and ring.reader is not None and not gone:
            flying = operations_in_flight(ring.reader.in_flight(), track.groups)
            first = flying[0] if flying else None
        latest = track.latest
        return RankBeat(
            ring.rank,
            track.cutter.step,
            phase,
            track.progress,
            latest.duration_s if latest else 0.0,
            latest.self_s if latest else 0.0,
            max(idle_ns, 0) * 1e-9,
            not gone,
            first,
            track.watch.hang.overdue_s if not gone else 0.0,
            not self._notices.is_unwatched(ring.rank),
        )

    def _state(self, ring: WatchedRing, now_ns: int, stack: str, dump: Answer) -> RankState | None:
        """The present state of a rank; None if its ring cannot be read, or is not written."""
        if ring.reader is None or self._notices.is_unwatched(ring.rank):
            return None
        state = ring.process_state()
        process = ring.process.pid if ring.process is not None else 0
        if ring.header is None and ring.process is None:  # nothing is known of it yet
            state = "?"
        try:
            in_flight = ring.reader.in_flight()
            self._poll_ring(ring, now_ns)  # an operation that fails right now is in flight, or has failed
            reader = ring.reader
            calls = reader.last_calls(ring.track.progress)
            ring.main_site = main_site(reader.sites(), calls)
            found = rank_state(
                ring.track,
                in_flight,
                reader.streams(),
                state,
                now_ns,
                stack,
                reader.sites(),
                self.network.sockets.unread_bytes(process),
                process,
                self.network.standing_still(ring.rank, self._groups_of(ring.rank))
                if state not in (*STOPPED, *GONE)
                else (),
                self._activity.stillness(ring.rank),
                incarnation=ring.header.incarnation if ring.header is not None else -1,
                calls=calls,
                dump=dump,
                launched=self._ras.of(ring.rank, ring.counts),
                communicators_settled=not reader.may_change_communicators(),
            )
            if ring.track.progress or ring.process is None:
                return found
            begun_s = ring.process.started_s  # nothing was recorded since
            return replace(found, last_progress_s=begun_s, phase_since_s=begun_s)
        except (RingError, OSError) as error:
            self._complain(ring, str(error), now_ns)
            return None
