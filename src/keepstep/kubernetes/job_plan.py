"""What is to be done about one training job. Pure: what the operator sees comes in, actions come out.

It looks at what is there, not at what has changed, so that an event that was missed or seen twice makes no difference.
What the next step depends on is written into the job's status first, and done once it is seen there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

import msgspec

from keepstep.kubernetes import node_remedies
from keepstep.kubernetes.actions import Action, EndPod, Make, Report, Tell
from keepstep.kubernetes.ends import End, blamed, end_of, short
from keepstep.kubernetes.objects import (
    ENDS,
    GROUP,
    KIND,
    VERSION,
    Again,
    Condition,
    JobStatus,
    Node,
    Phase,
    Pod,
    Remedy,
    TrainingJob,
)
from keepstep.kubernetes.pods import JOIN_S, pod_name, pod_of, service_of
from keepstep.kubernetes.since import Since
from keepstep.launch.schedulers.slurm import expand_nodes
from keepstep.wire.messages import Overview

FORGET_S = 30.0
"""For so long a pod is waited for that is to end on a node that is not heard."""
GONE_S = 60.0
"""A controller that has not answered for so long is gone, unless it cannot be asked at all."""
FINISH_S, LATE_S = 120.0, 10.0
"""For so long after the first pod's end the others are waited for; once as many have finished as train, the second."""
_AGAIN_S, _LONGEST_S = 5.0, 300.0
"""A pod that ended with 75 is made again after the first time, doubled each time up to the second."""
_MOST_FORMER = 1000
HOUR_S = 3600.0
"""Launchers that were killed are counted within this time."""
RUNNING = "running"
"""The state of a job all of whose ranks train."""
_BEGINNING_AGAIN = ("checking", "recovering")
_NOT_GOING_ON = ("created", "done", "failed")
_STOPPED, _INFRASTRUCTURE = "stopped", "infrastructure"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint with which somebody says that a node is shut down for certain."""
NO_NODE = "-"
"""In the status, the node of a pod that has none."""
NO_ANSWER = "NoAnswer"
"""Reason in `Seen.trouble`: the job's controller was asked, and has not answered."""


@dataclass(slots=True)
class Seen:
    """What the operator sees of a job.

    Attributes:
        pods: those that the job has made.
        told: what the job's controller says; None where it does not answer.
        trouble: reason and message why it was not asked.
        refused: why the API server has refused what was to be made last; empty where it has not.
    """

    job: TrainingJob
    pods: Sequence[Pod]
    has_service: bool
    nodes: Mapping[str, Node]
    told: Overview | None
    trouble: tuple[str, str]
    since: Since
    unix_s: float
    most: Remedy = "auto"
    refused: str = ""
    tainted: set[str] = field(default_factory=set[str])


def reconcile(seen: Seen) -> list[Action]:
    """What is to be done now about a job."""
    if seen.job.metadata.deletion_timestamp is not None:
        return []  # Kubernetes ends what the job has made
    return _Plan(seen).made()


class _Plan:
    def __init__(self, seen: Seen) -> None:
        self._seen, self._job, self._since = seen, seen.job, seen.since
        self._status = status = seen.job.status
        self._pods = {one.index: one for one in seen.pods if self._is_current(one)}
        self._ends = {index: end for index, one in self._pods.items() if (end := end_of(one)) is not None}
        self._phase: Phase = status.phase
        self._reason, self._message = status.reason, status.message
        self._attempt = status.attempt
        self._killed, self._killed_since = status.killed, status.killed_since
        self._again = dict(status.again)
        self._avoided = list(status.avoided_nodes)
        told = seen.told.faults if seen.told is not None else ()
        self._faults = node_remedies.believed(seen.job, told, seen.pods, seen.unix_s)
        leaving = sum(one.metadata.deletion_timestamp is not None for one in seen.pods)
        self._spares_left = (seen.told.spares if seen.told is not None else 0) - leaving
        self._is_unanswered = seen.told is None and seen.trouble[0] == NO_ANSWER
        self._unheard_s = self._since.seconds("unheard") if self._is_unanswered else 0.0

    def made(self) -> list[Action]:
        """All actions, the status first."""
        job, seen = self._job, self._seen
        over = job.status.phase in ENDS
        doings = list(self._after_the_end() if over else self._course())
        used = {one.spec.node_name for one in seen.pods} | {*job.status.nodes, *job.status.former_nodes}
        cluster = node_remedies.Cluster(
            seen.nodes, used - {"", NO_NODE}, seen.most, seen.unix_s, seen.tainted
        )
        faults = node_remedies.judged(job, () if over else self._faults, cluster)
        status = self._written(faults)
        actions: list[Action] = []
        if status != job.status:
            namespace, name = job.key
            actions.append(Report(namespace, name, status, self._is_urgent(status)))
            if status.phase != job.status.phase and status.phase in (*ENDS, "Restarting"):
                actions.append(self._told(status))
        return [*actions, *doings, *node_remedies.orders(job, seen.nodes)]

    # --- what becomes of the job ------------------------------------------------------------------------------------

    def _course(self) -> Iterator[Action]:
        ends = [end for _, end in sorted(self._ends.items())]
        finished = [end for end in ends if end.kind == "finished"]
        failed = next((end for end in ends if end.kind == "failed"), None)
        # A spare that was not used ends with 0 whenever the job does not end with 75: its 0 alone proves nothing.
        unproven = len(finished) <= self._job.spec.spares
        stopped = next((end for end in ends if end.kind == "killed" and end.category and unproven), None)
        if failed is not None:
            self._end("Failed", _reason(failed), failed.text)
        elif finished:
            # Who has not ended by then may have come too late to be told that the job is over.
            wait_s = FINISH_S if len(finished) < self._job.spec.nodes else LATE_S
            if self._active and self._since.seconds("finishing") <= wait_s:
                self._stands("Running", "Finishing", "")
            elif stopped is not None:
                self._end("Failed", _reason(stopped), stopped.text)
            else:
                self._end("Succeeded", "Finished", finished[0].text)
        elif self._has_ended_as_a_whole:
            self._begin_again()
        else:
            self._count_ended()
            if self._phase not in ENDS:
                running = sum(pod.status.phase == "Running" for pod in self._active.values())
                if running >= self._job.spec.nodes:
                    self._stands("Running", "", "")
                else:
                    refused = self._seen.refused
                    phase = "Pending" if self._phase in ("", "Pending") else "Restarting"
                    reason = "Refused" if refused else "PodsMissing" if phase == "Restarting" else ""
                    self._stands(phase, reason, refused)
                yield from self._keep_pods()

    @property
    def _active(self) -> dict[int, Pod]:
        return {index: pod for index, pod in self._pods.items() if index not in self._ends}

    @property
    def _has_ended_as_a_whole(self) -> bool:
        """Whether all launchers have ended, so that the job has: those that wait to begin are no part of it."""
        if not any(end.kind in ("again", "killed") for end in self._ends.values()):
            return False
        return not self._active or (
            self._controller_is_gone
            and all(self._waits_to_begin(index, pod) for index, pod in self._active.items())
        )

    def _waits_to_begin(self, index: int, pod: Pod) -> bool:
        """Whether a pod is no part of a job that went on; one that has run for long does not wait for others."""
        return (
            pod.status.phase == "Pending"
            or pod.metadata.deletion_timestamp is not None
            or (self._times(index) > 0 and self._seen.unix_s - pod.started_unix_s < JOIN_S)
        )

    @property
    def _controller_is_gone(self) -> bool:
        """Whether the job's controller has answered, and does not for a while now, or has nobody to control."""
        told = self._seen.told
        if told is not None:
            return told.state in _NOT_GOING_ON
        return bool(self._status.state) and self._unheard_s > GONE_S

    @property
    def _may_be_ending(self) -> bool:
        """Whether the job's controller has just fallen silent: as the job ends, or for a moment."""
        return bool(self._status.state) and self._is_unanswered and self._unheard_s <= GONE_S

    def _begin_again(self) -> None:
        told = [end for _, end in sorted(self._ends.items()) if end.kind in ("again", "killed")]
        last = max(told, key=lambda end: (end.kind == "again", bool(blamed(end.text)), bool(end.category)))
        if last.kind == "killed" and last.category:
            self._end("Failed", _reason(last), last.text)
        elif self._attempt >= self._job.spec.restart_limit:
            self._end("Failed", "RestartLimit", f"begun again {self._attempt} times; {last.text}")
        else:
            self._attempt, self._again, self._killed = self._attempt + 1, {}, 0
            own = {one.spec.node_name for one in self._seen.pods}
            self._avoided = sorted({*self._avoided, *(own & set(_unfolded(blamed(last.text))))})[
                -_MOST_FORMER:
            ]
            self._stands("Restarting", "BeginsAgain", last.text)

    def _count_ended(self) -> None:
        """Note pods that have ended alone; those of the cluster's doing are not counted against the limit."""
        for index, end in self._ends.items():
            before = self._again.get(str(index), Again())
            if before.pod != self._pods[index].metadata.uid:
                self._again[str(index)] = Again(times=before.times + 1, pod=self._pods[index].metadata.uid)
                if end.kind == "killed":
                    self._count_killed()
                if end.category == _INFRASTRUCTURE:
                    self._avoid([self._pods[index].spec.node_name])
        if self._is_at_limit and not self._may_go_on:
            self._end(
                "Failed", "PodRestartLimit", f"launchers were killed {self._killed} times within an hour"
            )

    def _count_killed(self) -> None:
        if self._seen.unix_s - self._killed_since >= HOUR_S:
            self._killed, self._killed_since = 0, int(self._seen.unix_s)
        self._killed += 1

    @property
    def _is_at_limit(self) -> bool:
        """Whether too many launchers were killed within the hour."""
        within = self._seen.unix_s - self._killed_since < HOUR_S
        return within and self._killed > self._job.spec.pod_restart_limit

    @property
    def _may_go_on(self) -> bool:
        """Whether the job's controller says that it goes on, or has just fallen silent."""
        told = self._seen.told
        return self._may_be_ending if told is None else told.state not in _NOT_GOING_ON

    def _avoid(self, nodes: Collection[str]) -> None:
        """Pods that are made from now on come to these nodes only where no other is free."""
        self._avoided = list(dict.fromkeys((*self._avoided, *sorted(nodes))))[-_MOST_FORMER:]

    def _stands(self, phase: Phase, reason: str, message: str) -> None:
        if phase == self._status.phase == "Restarting" and not message:
            return  # the reason why it began again is still the newest thing to say
        self._phase, self._reason, self._message = phase, reason, short(message)

    def _end(self, phase: Phase, reason: str, message: str) -> None:
        self._phase, self._reason, self._message = phase, reason, short(message)

    # --- pods -------------------------------------------------------------------------------------------------------

    def _keep_pods(self) -> Iterator[Action]:
        if not self._seen.has_service:
            yield Make(service_of(self._job))
        for pod in self._seen.pods:
            yield from self._ended_pod(pod)
        there = {one.metadata.name for one in self._seen.pods}
        for index in range(self._job.spec.pods):
            if pod_name(self._job, index) not in there:
                yield Make(pod_of(self._job, index))

    def _ended_pod(self, pod: Pod) -> Iterator[EndPod]:
        end, uid = self._ends.get(pod.index), pod.metadata.uid
        if pod.metadata.deletion_timestamp is not None:
            if (
                self._since.seconds(("ends", uid)) > FORGET_S
                and self._is_unheard(pod)
                and self._has_ended(pod)
            ):
                yield self._ends_pod(pod, "its node is lost", now=True)
        elif not self._is_current(pod):
            yield self._ends_pod(pod, "it is of an earlier attempt, or one too many")
        elif end is not None and end.kind == "killed" and self._is_at_limit:
            pass  # the job goes on without it
        elif end is not None:
            noted = self._status.again.get(str(pod.index), Again())
            first_s = _AGAIN_S if end.kind == "again" else _AGAIN_S / 4
            wait_s = min(_LONGEST_S, first_s * 2 ** min(noted.times - 1, 10)) if noted.times else _LONGEST_S
            waited = self._since.seconds(("ended", uid)) >= wait_s
            if noted.pod == uid and waited and not (end.kind == "again" and self._may_be_ending):
                yield self._ends_pod(pod, f"it is made again; {end.text}")
        elif pod.spec.node_name in self._status.excluded_nodes and (
            self._spares_left > 0 or self._is_down_on(pod.spec.node_name)
        ):
            self._spares_left -= 1
            yield self._ends_pod(pod, f"node {pod.spec.node_name} is excluded")
        elif self._job.spec.pods > 1 and self._is_told_lost(pod) and self._is_unheard(pod):
            yield self._ends_pod(pod, "its node is lost, as the job and the cluster say", now=True)

    def _is_down_on(self, node: str) -> bool:
        """Whether the job does not train at the moment, and had better not begin again on a broken node."""
        told = self._seen.told
        broken = {one.node for one in self._status.faults if one.kind == "hardware" and one.taint}
        return told is not None and told.state in _BEGINNING_AGAIN and node in broken

    def _ends_pod(self, pod: Pod, why: str, *, now: bool = False) -> EndPod:
        return EndPod(pod.metadata.namespace, pod.metadata.name, pod.metadata.uid, short(why), now)

    def _is_current(self, pod: Pod) -> bool:
        return 0 <= pod.index < self._job.spec.pods and pod.attempt == self._job.status.attempt

    def _is_unheard(self, pod: Pod) -> bool:
        """Whether nothing is heard of a pod's node, and of not too many other nodes of the job either."""
        node, nodes = pod.spec.node_name, self._seen.nodes
        silent = {name for one in self._seen.pods if (name := one.spec.node_name) and self._is_silent(name)}
        return bool(nodes) and node in silent and len(silent) <= max(1, self._job.spec.pods // 10)

    def _is_silent(self, name: str) -> bool:
        node = self._seen.nodes.get(name)
        return node is None or not node.is_ready

    def _has_ended(self, pod: Pod) -> bool:
        """Whether a pod whose node is not heard may be taken for ended: not against the job's word.

        A job whose only pod is cut off has no word: then somebody has to say that the node is out of service.
        """
        node = self._seen.nodes.get(pod.spec.node_name)
        if node is not None and node.taint(OUT_OF_SERVICE) is not None:
            return True
        goes_on = self._seen.told is not None and self._seen.told.state == RUNNING
        return self._job.spec.pods > 1 and (not goes_on or self._is_told_lost(pod))

    def _is_told_lost(self, pod: Pod) -> bool:
        return any(one.kind == "lost" and one.node == pod.spec.node_name for one in self._faults)

    def _after_the_end(self) -> Iterator[Action]:
        """Pods that have not begun are ended at once, others that have not ended a while later."""
        for index, pod in self._active.items():
            if pod.metadata.deletion_timestamp is None:
                waits = pod.status.phase == "Pending"
                if waits or self._since.seconds("over") > FINISH_S:
                    yield self._ends_pod(pod, f"the job is over, and pod {index} has not ended")
        self._since.seconds("over")

    def _times(self, index: int) -> int:
        return self._status.again.get(str(index), Again()).times

    # --- the status -------------------------------------------------------------------------------------------------

    def _written(self, faults: list[node_remedies.Fault]) -> JobStatus:
        job, told = self._job, self._seen.told
        before = self._status
        nodes = [NO_NODE] * job.spec.pods
        for index, pod in self._pods.items():
            nodes[index] = pod.spec.node_name or NO_NODE
        former = [one for one in (*before.former_nodes, *before.nodes) if one not in (NO_NODE, *nodes)]
        running = sum(one.status.phase == "Running" for one in self._active.values())
        return msgspec.structs.replace(
            before,
            phase=self._phase,
            reason=self._reason,
            message=self._message,
            observed_generation=job.metadata.generation,
            attempt=self._attempt,
            killed=self._killed,
            killed_since=self._killed_since,
            running=f"{running}/{job.spec.pods}",
            nodes=nodes,
            former_nodes=list(dict.fromkeys(former))[-_MOST_FORMER:],
            excluded_nodes=node_remedies.excluded(faults),
            avoided_nodes=self._avoided,
            verdict=short(told.verdict) if told is not None and told.verdict else before.verdict,
            state=self._state(),
            again=self._again,
            faults=faults,
            conditions=self._conditions(),
        )

    def _state(self) -> str:
        if self._phase in ENDS or self._attempt != self._status.attempt:
            return ""
        return self._seen.told.state if self._seen.told is not None else self._status.state

    def _conditions(self) -> list[Condition]:
        reason, message = self._seen.trouble
        watched = self._seen.told is not None
        made = {
            "Complete": self._condition("Complete", self._phase == "Succeeded", self._reason or "NotYet", ""),
            "Failed": self._condition("Failed", self._phase == "Failed", self._reason or "No", ""),
        }
        if self._status.phase not in ENDS and (watched or reason):
            why = ("Answers", "") if watched else (reason, message)
            made["Watched"] = self._condition("Watched", watched, *why)
        kept = [one for one in self._status.conditions if one.type not in made]
        return sorted([*kept, *made.values()], key=lambda one: one.type)

    def _condition(self, kind: str, holds: bool, reason: str, message: str) -> Condition:
        status = "True" if holds else "False"
        before = next((one for one in self._status.conditions if one.type == kind), None)
        same = before is not None and before.status == status
        if before is not None and same and kind in ("Complete", "Failed") and not holds:
            return before
        at = datetime.fromtimestamp(self._seen.unix_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Condition(
            type=kind,
            status=status,
            reason=reason,
            message=short(message),
            last_transition_time=before.last_transition_time if before is not None and same else at,
        )

    def _is_urgent(self, status: JobStatus) -> bool:
        before = self._status
        return (status.phase, status.attempt, status.again, status.faults) != (
            *(before.phase, before.attempt, before.again, before.faults),
        )

    def _told(self, status: JobStatus) -> Tell:
        namespace, name = self._job.key
        about = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": namespace,
            "name": name,
            "uid": self._job.metadata.uid,
        }
        text = f"attempt {status.attempt}: {status.message}" if status.attempt else status.message
        return Tell(about, status.reason, short(text), is_warning=status.phase != "Succeeded")


def _reason(end: End) -> str:
    if end.category == _STOPPED:
        return "Stopped"
    return f"{end.category.capitalize()}Failed" if end.category else "ContainerFailed"


def _unfolded(names: str) -> tuple[str, ...]:
    """Names of nodes as `core.ranges.fold_nodes` writes them."""
    try:
        return expand_nodes(re.sub(r"\s", "", names))
    except ValueError:
        return ()
