"""The operator as a program: it mirrors the cluster, asks the jobs, decides with `job_plan`, and carries that out."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import msgspec
from lightkube import AsyncClient
from lightkube import operators as op

from keepstep.core.log_lines import one_line
from keepstep.core.within import within
from keepstep.kubernetes import node_remedies, watched
from keepstep.kubernetes.actions import Action, Make, Note, Object, Report, SetTaints, Unmark
from keepstep.kubernetes.cluster_api import (
    CONFLICT,
    FAILURES,
    JOBS,
    LEASES,
    NODES,
    NOT_THERE,
    PODS,
    SERVICES,
    Api,
    code_of,
    told_by,
)
from keepstep.kubernetes.job_interview import Interview
from keepstep.kubernetes.job_plan import Seen, reconcile
from keepstep.kubernetes.lease_election import LEASE_S, Election
from keepstep.kubernetes.mirror import Mirror
from keepstep.kubernetes.objects import ENDS, JOB, WATCH, Meta, Node, Pod, Remedy, TrainingJob
from keepstep.kubernetes.rounds import Rounds
from keepstep.kubernetes.since import Since
from keepstep.launch.schedulers.node_faults import DrainBudget

LEASE = "keepstep-operator"
_LOOK_S = 2.0
"""How often all is looked at without any change, as things happen by time alone."""
_LEAST_S = 0.2
"""Least time between two looks."""
_REPORT_S = 2.0
"""Time between two statuses of one job that nothing depends on."""
_ASK_LOOK_S = 0.1
_LEASE_LOOK_S = 1.0
_SAY_S = 30.0
"""For so long a job of another maker has not been heard before an Event says so."""
_MOST_PLACES = 1000
_REPEAT_S = 60.0
"""How often the same warning is printed."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
_AT_ONCE = 16
_END_S = 2.0
_MOST_REMEMBERED = 10_000
_HINT = "is the CRD installed? kubectl apply -k deploy/kubernetes/operator"

JobKey: TypeAlias = tuple[str, str]
_Question: TypeAlias = Callable[[], Awaitable[None]]
_Questions: TypeAlias = Callable[[Collection[JobKey]], dict[JobKey, _Question]]


class Speaker:
    """Prints lines; the same one no more often than once a minute."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Print a line."""
        with suppress(OSError):
            print(f"keepstep: {one_line(text)}", file=sys.stderr, flush=True)

    def once(self, text: str) -> None:
        """Print a line, unless it was printed within the minute."""
        now_s = time.monotonic()
        if now_s - self._said_s.get(text, float("-inf")) < _REPEAT_S:
            return
        if len(self._said_s) > _MOST_REMEMBERED:
            self._said_s.clear()
        self._said_s[text] = now_s
        self.say(text)


class _Service(msgspec.Struct):
    metadata: Meta = Meta()


@dataclass(slots=True)
class _Known:
    """What is remembered of a job between two looks."""

    uid: str
    since: Since = field(default_factory=Since)
    interview: Interview = field(default_factory=Interview)
    reported_s: float = float("-inf")
    refused: str = ""
    is_busy: bool = False
    places: dict[str, None] = field(
        default_factory=dict[str, None]
    )  # nodes on which a job of another maker was
    said: str = ""  # whether it is heard, as an Event said last


class Operator:
    """One operator, for the jobs of some namespaces."""

    def __init__(
        self,
        client: AsyncClient,
        namespaces: Sequence[str],
        *,
        me: str,
        most: Remedy,
        dry_run: bool,
        speaker: Speaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            client: it acts as this one is allowed to.
            namespaces: of the jobs.
            me: differs between all operators.
            most: the most that is done about nodes, whatever jobs want.
            dry_run: say what would be done, and do nothing.
            speaker: prints lines.
            clock: steady seconds.
        """
        self._api = Api(client, speaker.once)
        self._client, self._speaker, self._clock = client, speaker, clock
        self._most: Remedy = most
        self._dry_run = dry_run
        self._election = Election(me)
        self._was_leading = False
        self._changes = asyncio.Event()
        self._known: dict[JobKey, _Known] = {}
        self._known_watched: dict[JobKey, _Known] = {}
        self._unseen = watched.Unseen()
        self._retry_s: dict[str, tuple[float, float]] = {}  # by action: not before, and how long was waited
        self._tasks: set[asyncio.Task[None]] = set()
        self._acting = asyncio.Semaphore(_AT_ONCE)
        both = (self._changes.set, speaker.once)
        ours = {JOB: op.exists()}
        self._nodes = Mirror(client, NODES, Node, *both)
        self._jobs = [
            Mirror(client, JOBS, TrainingJob, *both, namespace=one, hint=_HINT) for one in namespaces
        ]
        self._pods = [Mirror(client, PODS, Pod, *both, namespace=one, labels=ours) for one in namespaces]
        others = {WATCH: op.exists()}
        self._others = [Mirror(client, PODS, Pod, *both, namespace=one, labels=others) for one in namespaces]
        self._services = [
            Mirror(client, SERVICES, _Service, *both, namespace=one, labels=ours) for one in namespaces
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Work until told to stop."""
        mirrors = [self._nodes, *self._jobs, *self._pods, *self._others, *self._services]
        loops = [*(one.run() for one in mirrors), self._look_on()]
        loops.append(self._ask_on(lambda: self._known, self._questions))
        loops.append(self._ask_on(lambda: self._known_watched, self._questions_to_watched))
        if not self._dry_run:
            loops.append(self._stand_for_election())
        tasks = [asyncio.ensure_future(one) for one in loops]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for one in done - {stopping}:
                one.result()  # none of them ends by itself, except by an error of ours
        finally:
            ending = [*tasks, stopping, *self._tasks]
            for one in ending:
                one.cancel()
            # A server that does not answer TLS's goodbye would be waited for half a minute.
            await asyncio.wait(ending, timeout=_END_S)
            await self._resign()

    # --- who acts ---------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this operator may act now."""
        return self._dry_run or self._election.leads(self._clock())

    async def _stand_for_election(self) -> None:
        namespace = self._client.namespace
        while True:
            try:
                await self._take_lease(namespace)
            except FAILURES as error:
                if code_of(error) != CONFLICT:
                    self._speaker.once(f"lease {namespace}/{LEASE}: {told_by(error)}")
            if self._was_leading != self.leads:
                self._was_leading = self.leads
                self._speaker.say(
                    "this operator acts now"
                    if self.leads
                    else "this operator does not act: another one does, or the API server is away"
                )
                self._changes.set()
            await asyncio.sleep(_LEASE_LOOK_S)

    async def _take_lease(self, namespace: str) -> None:
        lease = await self._api.get(LEASES, LEASE, namespace)
        began_s = self._clock()
        self._election.saw(lease, began_s)
        spec = self._election.wanted(lease, began_s, time.time())
        if spec is not None:
            written = await self._api.write_lease(namespace, LEASE, lease, spec)
            self._election.wrote(written, began_s)

    async def _resign(self) -> None:
        """Leave the Lease to another one at once."""
        if self._dry_run or not self._election.leads(self._clock()):
            return
        with suppress(*FAILURES):
            lease = await self._api.get(LEASES, LEASE, self._client.namespace)
            if lease is not None and lease["spec"].get("holderIdentity") == self._election.me:
                spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": int(LEASE_S)}
                await self._api.write_lease(self._client.namespace, LEASE, lease, spec)

    # --- looking and acting -----------------------------------------------------------------------------------------

    async def _look_on(self) -> None:
        while True:
            with suppress(asyncio.TimeoutError):
                await within(_LOOK_S, self._changes.wait())
            self._changes.clear()
            if self.leads and self._nodes.is_complete:
                self._look()
            await asyncio.sleep(_LEAST_S)

    def _look(self) -> None:
        nodes = {name: one for (_, name), one in self._nodes.found.items()}
        self._start(node_remedies.tidied(nodes.values()))
        tainted = {
            fault.node
            for jobs in self._jobs
            for job in jobs.found.values()
            for fault in job.status.faults
            if fault.taint and fault.state == "Ordered"
        }
        notes = watched.notes_on(nodes, time.time())
        unseen = self._unseen.on(nodes)
        tainted |= watched.to_be_tainted(notes) | unseen
        for jobs, pods, services in zip(self._jobs, self._pods, self._services, strict=True):
            if not (jobs.is_complete and pods.is_complete and services.is_complete):
                continue
            for key, job in jobs.found.items():
                self._look_at(key, job, jobs.raw[key], pods, key in services.found, nodes, tainted)
        jobs_now = {key for mirror in self._jobs for key in mirror.found}
        if all(one.is_complete for one in self._jobs):
            self._known = {key: one for key, one in self._known.items() if key in jobs_now}
        others: set[JobKey] = set()
        if unseen:
            return
        for mirror in self._others:
            if mirror.is_complete:
                found = _watched(mirror)
                others |= found.keys()
                budget = watched.budget_of(found, notes)
                for key, own in found.items():
                    self._look_at_watched(key, own, nodes, notes, tainted, budget)
        if all(one.is_complete for one in self._others):
            self._known_watched = {key: one for key, one in self._known_watched.items() if key in others}

    def _look_at(
        self,
        key: JobKey,
        job: TrainingJob,
        raw: Object,
        pods: Mirror[Pod],
        has_service: bool,
        nodes: dict[str, Node],
        tainted: set[str],
    ) -> None:
        known = self._known.get(key)
        if known is None or known.uid != job.metadata.uid:
            known = self._known[key] = _Known(job.metadata.uid)
        if known.is_busy:
            return
        now_s = self._clock()
        known.since.turn(now_s)
        own = [one for one in pods.found.values() if one.belongs_to(job.metadata.uid)]
        seen = Seen(
            job=job,
            pods=own,
            has_service=has_service,
            nodes=nodes,
            told=known.interview.told,
            trouble=known.interview.trouble,
            since=known.since,
            unix_s=time.time(),
            most=self._most,
            refused=known.refused,
            tainted=tainted,
        )
        actions = list(reconcile(seen))
        for action in list(actions):
            if isinstance(action, Report) and not action.is_urgent:
                if now_s - known.reported_s < _REPORT_S:
                    actions.remove(action)
                else:
                    known.reported_s = now_s
        self._start(actions, known, raw)

    def _look_at_watched(
        self,
        key: JobKey,
        pods: Sequence[Pod],
        nodes: dict[str, Node],
        notes: dict[str, list[watched.Noted]],
        tainted: set[str],
        budget: DrainBudget,
    ) -> None:
        known = self._known_watched.setdefault(key, _Known(""))
        if known.is_busy:
            return
        known.since.turn(self._clock())
        known.places |= dict.fromkeys(watched.places_of(pods))
        known.places = dict.fromkeys(list(known.places)[-_MOST_PLACES:])
        told = known.interview.told
        cluster = node_remedies.Cluster(nodes, known.places, self._most, time.time(), tainted, budget)
        faults = told.faults if told is not None else ()
        actions = list(watched.remedies_for(key, pods, faults, notes, cluster))
        reason, message = (
            ("Watched", "its controller answers") if told is not None else known.interview.trouble
        )
        is_news = reason not in ("", known.said) and (
            told is not None or known.since.seconds(reason) >= _SAY_S
        )
        if is_news:
            known.said = reason
            actions.append(watched.told_about(pods, reason, message))
        self._start(actions, known)

    def _start(
        self, actions: Iterable[Action], known: _Known | None = None, raw: Object | None = None
    ) -> None:
        """Begin to carry actions out; a job is not looked at again before they are done."""
        due = [one for one in actions if self._retry_s.get(str(one), (0.0, 0.0))[0] <= self._clock()]
        if not due:
            return
        if self._dry_run:
            for one in due:
                self._speaker.once(f"would do: {one}")
            return

        for one in due:
            if isinstance(one, Note):
                self._unseen.add(one)

        async def all_of_them() -> None:
            try:
                await asyncio.gather(*(self._do(one, raw, known) for one in due))
            finally:
                if known is not None:
                    known.is_busy = False
                self._changes.set()

        if known is not None:
            known.is_busy = True
        task = asyncio.get_running_loop().create_task(all_of_them())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, action: Action, raw: Object | None, known: _Known | None) -> None:
        async with self._acting:
            if not self.leads:
                if isinstance(action, Note):
                    self._unseen.drop(action)
                return
            text = str(action)
            try:
                await self._api.do(action, raw)
            except FAILURES as error:
                if isinstance(action, Note) and code_of(error):
                    self._unseen.drop(action)
                # What was read may be old: of a name that is taken nothing is said before the third time.
                is_taken = code_of(error) == CONFLICT and isinstance(action, Make)
                if is_taken or code_of(error) not in (CONFLICT, NOT_THERE):
                    waited_s = self._retry_s.get(text, (0.0, 0.0))[1]
                    wait_s = min(max(2 * waited_s, _FIRST_RETRY_S), _LONGEST_RETRY_S)
                    if len(self._retry_s) > _MOST_REMEMBERED:
                        self._retry_s.clear()
                    self._retry_s[text] = (self._clock() + wait_s, wait_s)
                    if is_taken and wait_s < 4 * _FIRST_RETRY_S:
                        return
                    self._speaker.once(f"cannot {text}: {told_by(error)}")
                    if known is not None and isinstance(action, Make) and code_of(error):
                        known.refused = told_by(error)
            else:
                if known is not None and isinstance(action, Make):
                    known.refused = ""
                self._retry_s.pop(text, None)
                if not isinstance(action, Report) or action.is_urgent:
                    self._speaker.once(text)

    # --- asking the jobs --------------------------------------------------------------------------------------------

    async def _ask_on(self, known: Callable[[], dict[JobKey, _Known]], questions: _Questions) -> None:
        rounds, asking = Rounds[JobKey](), set[asyncio.Task[None]]()

        async def ask(key: JobKey, known: _Known, question: _Question) -> None:
            before = _gist(known)
            try:
                await question()
            finally:
                rounds.end(key, self._clock(), heard=known.interview.told is not None)
            if _gist(known) != before:
                self._changes.set()

        try:
            while True:
                await asyncio.sleep(_ASK_LOOK_S)
                for task in [one for one in asking if one.done()]:
                    asking.remove(task)
                    task.result()
                if not self.leads:
                    continue
                jobs, made = known(), questions(due := rounds.begin(known(), self._clock()))
                for key in due:
                    if key in made:
                        asking.add(asyncio.ensure_future(ask(key, jobs[key], made[key])))
                    else:
                        rounds.end(key, self._clock(), heard=True)
        finally:
            for task in asking:
                task.cancel()

    def _questions(self, due: Collection[JobKey]) -> dict[JobKey, _Question]:
        """What asks each of these jobs that is not over."""
        found: dict[JobKey, _Question] = {}
        for jobs, pods in zip(self._jobs, self._pods, strict=True):
            for key in jobs.found.keys() & due:
                job = jobs.found[key]
                if job.status.phase not in ENDS:
                    own = [one for one in pods.found.values() if one.belongs_to(job.metadata.uid)]
                    ask = self._known[key].interview.ask
                    found[key] = partial(ask, self._api, key[0], job.spec.secret_name, own)
        return found

    def _questions_to_watched(self, due: Collection[JobKey]) -> dict[JobKey, _Question]:
        found: dict[JobKey, _Question] = {}
        for mirror in self._others if due else ():
            all_pods = _watched(mirror)
            for key in all_pods.keys() & due:
                pods = all_pods[key]
                job, doubt = watched.job_of(key, pods, {}), watched.doubt_of(pods)
                ask = self._known_watched[key].interview.ask
                found[key] = partial(ask, self._api, key[0], job.spec.secret_name, pods, doubt)
        return found


def _gist(known: _Known) -> object:
    """What of a job's answer is acted upon at once; all else is seen at the next look."""
    told = known.interview.told
    return (told.state, told.faults) if told is not None else known.interview.trouble


def _watched(mirror: Mirror[Pod]) -> dict[JobKey, list[Pod]]:
    return watched.watched_jobs(mirror.found.values())


async def clear(client: AsyncClient, name: str, *, dry_run: bool, speaker: Speaker) -> int:
    """Remove all conditions and taints of ours from a node; the exit code."""
    api = Api(client, speaker.once)
    count = 0
    for kind in (
        Unmark,
        SetTaints,
    ):  # read anew each time: an operator removes taints when their condition goes
        found = await api.get(NODES, name)
        if found is None:
            speaker.say(f"{name}: there is no such node")
            return 1
        for action in node_remedies.cleared(msgspec.convert(found, Node)):
            if isinstance(action, kind):
                if not dry_run:
                    await api.do(action)
                speaker.say(f"would do: {action}" if dry_run else str(action))
                count += 1
    if not count:
        speaker.say(f"{name}: nothing of keepstep's is there")
    return 0
