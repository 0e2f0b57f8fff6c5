"""Runs one seed in Kubernetes: a cluster of six nodes and one for keepstep's operator, a TrainingJob, the fault."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.kube_api import ApiError, KubeApi, Object
from tests.e2e.kube_bed import KubeBed, kubernetes, until
from tests.e2e.stand_in_job import PODS, SHARED, exit_code, make_secret, template_of
from tests.e2e.stand_in_kubelet import StandInPod

from benchmarks.operate.judge import Losses
from benchmarks.operate.kube_judge import OTHERS, Seen, faults
from benchmarks.operate.kube_plans import KubePlan
from benchmarks.operate.kube_watching import Watching
from benchmarks.operate.rows import row_of
from benchmarks.operate.trial import JOB, PAUSE_S, STEPS, losses_of
from keepstep.core.incident import REPLACEMENT

MANIFESTS = Path(__file__).parents[2] / "deploy/kubernetes/operator"
JOBS = "/apis/keepstep.dev/v1alpha1/namespaces/default/trainingjobs"
NAME = "train"
_AWAY_S = 60.0
_PATIENCE_S = 150.0
_END_S = 240.0  # the operator itself may wait two minutes for pods that have not ended with the others
_ITS_NODE, _KEPT = "n6", "example.com/control"
_XID = (
    "NVRM: Xid (PCI:0000:3b:00): 48, pid=77, name=python, An uncorrectable double bit error (DBE) has been "
    "detected on GPU in the framebuffer at partition 6, subpartition 0."
)


def install(bed: KubeBed) -> None:
    """Install the operator as it is shipped, on a node that jobs keep from, as such programs are."""
    bed.taint(_ITS_NODE, _KEPT, "NoSchedule")
    for name in ("namespace", "crd", "jobs/role", "operator"):
        for one in yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()):
            if one["kind"] == "Deployment":
                (container,) = one["spec"]["template"]["spec"]["containers"]
                container["args"].append("--node-remedy=auto")
                one["spec"]["template"]["spec"] |= {
                    "nodeSelector": {"kubernetes.io/hostname": _ITS_NODE},
                    "tolerations": [{"key": _KEPT, "operator": "Exists"}],
                }
            bed.api.apply(yaml.safe_dump(one))
    until(lambda: _is_served(bed.api), "TrainingJobs are served")


def _is_served(api: KubeApi) -> bool:
    with suppress(ApiError):
        return "items" in api.get(JOBS)
    return False


def run_seed(plan: KubePlan, folder: Path, reference: Losses) -> dict[str, Any]:
    """Run and judge a seed; its line for the results."""
    began_s, wrong = time.monotonic(), list[str]()
    with kubernetes(folder, 7) as bed:
        trial = KubeTrial(plan, bed, reference)
        try:
            trial.run()
        except (AssertionError, OSError) as error:
            wrong.append(f"the trial did not come to its end: {error}")
        seen = trial.seen()
        trial.watching.close()
        wrong += faults(plan, trial.node, seen)
    return row_of(plan, trial.node, seen, wrong, began_s)


class KubeTrial:
    """One seed while it runs. ``node``: the one that is hurt."""

    def __init__(self, plan: KubePlan, bed: KubeBed, reference: Losses) -> None:
        self.plan, self.bed, self.reference = plan, bed, reference
        self.work = bed.folder / "work"
        self.work.mkdir()
        self.work.chmod(0o1777)
        self.node, self._index = "", ""
        self._hurt_s, self._looks = 0.0, 0
        self._proven_s: float | None = None
        self._steps_away: int | None = None
        self._bystander, self._victim = "", ""  # the uids of two pods on the node
        self.watching = Watching(bed.api)
        install(bed)

    def run(self) -> None:
        """Run the job, hurt it, and wait until it is over."""
        self._submit()
        until(lambda: self._step() >= self.plan.at_step, "the job trains", _PATIENCE_S)
        rank = self.plan.victim * self.plan.ranks
        self.node = self._lines(rank)[-1].split()[3]
        if self.plan.fault != "healthy":
            self._hurt(rank)
        if self.plan.taint:
            until(lambda: len(self._others()) == OTHERS, "pods of others", _PATIENCE_S)
            until(self._replaced, "the victim's pod on another node", _PATIENCE_S)
        if self.plan.fault == "slow-node" and not self.plan.taint:
            until(self._verdict, "the slow node is named", _PATIENCE_S)
        step = self._step() + 10
        until(lambda: self._step() >= step, "the job trains on", _PATIENCE_S)
        (self.work / "enough").touch()
        until(lambda: self._job().get("phase") in ("Succeeded", "Failed"), "the job is over", _END_S)

    def seen(self) -> Seen:
        """What is to be judged."""
        watching, node = self.watching, self.node
        verdict = self._verdict()
        condition = watching.conditions.get((node, self.plan.condition))
        due = verdict[1] if verdict else None
        if due is not None and self.plan.fault == "node-lost":
            due = max(due, watching.unready.get(node, due))
        taint = watching.taints.get((node, self.plan.taint))
        if self.plan.fault == "slow-node":
            due = self._proven_s
        status = self._job()
        pods = self.bed.api.get(PODS, labelSelector=f"keepstep.dev/job={NAME}")["items"]
        operator = [one for one in self.bed.kubelets.pods.values() if "operator" in one.name]
        return Seen(
            phase=status.get("phase", ""),
            reason=status.get("reason", ""),
            conditions=watching.of_nodes(watching.conditions),
            taints=watching.of_nodes(watching.taints),
            named=verdict[0] if verdict else "",
            condition_s=_apart(due, condition),
            left_s=_apart(taint, watching.left.get(self._victim)),
            bystander_left=self._bystander in watching.left,
            replaced_on=self._replaced(),
            others_on=self._others(),
            steps_away=self._steps_away,
            exit_codes=[code for one in pods if (code := exit_code(one)) is not None],
            said=[line[:300] for one in operator for line in one.container.log().splitlines()][-40:],
            losses=losses_of(self.work),
            reference=self.reference,
        )

    def _submit(self) -> None:
        plan = self.plan
        make_secret(self.bed.api)
        words = [f"--nnodes={plan.nodes}", f"--nproc-per-node={plan.ranks}", "--max-restarts=3"]
        words += ["--secret-file=/etc/keepstep/secret", "--run-dir=/run/keepstep/train"]
        words += [f"--checkpoint-dir={SHARED}/checkpoints", "--checkpoint-every=3"]
        template = template_of([*words, str(JOB), SHARED, str(STEPS), str(PAUSE_S)], self.work)
        spec = {
            "nodes": plan.nodes,
            "spares": int(plan.spare),
            "nodeRemedy": "auto",
            "secretName": "keepstep",
            "template": template,
        }
        job = {"apiVersion": "keepstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": NAME}}
        self.bed.api.post(JOBS, {**job, "spec": spec})

    def _hurt(self, rank: int) -> None:
        plan, bed = self.plan, self.bed
        victim = self._pod_on(self.node)
        self._index = victim.pod["metadata"]["labels"]["keepstep.dev/index"]
        self._victim = victim.pod["metadata"]["uid"]
        self._bystander = self._stand_by()
        if plan.api_away:
            bed.stop_api()
            time.sleep(2)
        before = self._step()
        self._hurt_s = time.time()
        if plan.fault == "hardware":
            bed.kubelets.say_as_kernel(self.node, _XID)
            (self.work / f"break-{self.node}").touch()
        elif plan.fault == "node-lost":
            bed.kubelets.lose(self.node)
        elif plan.fault == "slow-node":
            (self.work / f"slow-{self.node}").touch()
        else:
            os.kill(victim.pid_of(f"RANK={rank}"), signal.SIGKILL)
        if plan.api_away:
            time.sleep(_AWAY_S)
            self._steps_away = self._step() - before
            bed.start_api()
        if plan.taint and plan.fault == "slow-node":
            until(self._proven, "the job is faster with a spare", _PATIENCE_S)
        if plan.taint:
            until(lambda: (self.node, plan.taint) in self.watching.taints, "the taint", _PATIENCE_S)
            # Twenty pods that begin at once take what this host has.
            until(lambda: self._victim in self.watching.left, "the victim's pod leaves", _PATIENCE_S)
            if plan.api_away:  # which the scheduler hears of late
                until(self._scheduler_knows, "the scheduler sees the taint", _PATIENCE_S)
            for number in range(OTHERS):
                self._make_pod(f"other-{number}", {})

    def _scheduler_knows(self) -> bool:
        """Whether Kubernetes' own scheduler has heard of the taint: it finds no place for a pod of this node alone."""
        self._looks += 1
        name = f"look-{self._looks}"
        self._make_pod(name, {"kubernetes.io/hostname": self.node})
        path, told = f"{PODS}/{name}", list[str]()

        def has_told() -> bool:
            told[:] = [
                one.get("reason", "")
                for one in self.bed.api.get(path)["status"].get("conditions", [])
                if one["type"] == "PodScheduled"
            ]
            return bool(told)

        until(has_told, "a pod's place", _PATIENCE_S)
        self.bed.api.delete(path)
        return told == ["Unschedulable"]

    def _proven(self) -> bool:
        """Whether an incident tells that the job is faster with a spare in the node's place; it is noted when."""
        for path in self._incidents():
            acted = json.loads(path.read_text())["actions"]
            if any(one["name"] == REPLACEMENT and one["measured_iteration_s"] for one in acted):
                self._proven_s = self._proven_s or time.time()
        return self._proven_s is not None

    def _incidents(self) -> list[Path]:
        folders = self.bed.folder / "pods"
        return sorted(folders.glob("*/volumes/keepstep-run/train/incidents/[0-9]*.json"))

    def _stand_by(self) -> str:
        """Start a pod of somebody else on the victim's node; its uid."""
        self._make_pod("bystander", {"kubernetes.io/hostname": self.node})
        path = f"{PODS}/bystander"
        until(lambda: self.bed.api.get(path)["status"].get("phase") == "Running", "a pod of somebody else")
        return self.bed.api.get(path)["metadata"]["uid"]

    def _make_pod(self, name: str, selector: dict[str, str]) -> None:
        main = {"name": "main", "image": "none", "command": ["sleep", "infinity" if selector else "1"]}
        spec = {"containers": [main], "nodeSelector": selector, "restartPolicy": "Never"}
        spec["terminationGracePeriodSeconds"] = 1
        self.bed.api.post(PODS, {"metadata": {"name": name, "labels": {"whose": "others"}}, "spec": spec})

    def _others(self) -> list[str]:
        found = self.bed.api.get(PODS, labelSelector="whose=others")["items"]
        return [
            node
            for one in found
            if one["metadata"]["name"].startswith("other-") and (node := one["spec"].get("nodeName"))
        ]

    def _replaced(self) -> list[str]:
        return [
            node
            for at_s, index, node in self.watching.bound.values()
            if index and index == self._index and at_s > self._hurt_s
        ]

    def _pod_on(self, node: str) -> StandInPod:
        return next(
            one
            for one in self.bed.kubelets.pods.values()
            if one.node == node and "keepstep.dev/index" in one.pod["metadata"].get("labels", {})
        )

    def _job(self) -> Object:
        return self.bed.api.get(f"{JOBS}/{NAME}").get("status", {})

    def _verdict(self) -> tuple[str, float] | None:
        """The node that an incident blames for the fault, and when that was known."""
        kind = "slow" if self.plan.fault == "slow-node" else "crash"
        cause = "node lost" if self.plan.fault == "node-lost" else ""
        for path in self._incidents():
            incident = json.loads(path.read_text())
            for one in incident["culprits"]:
                named = one.get("node") and (not cause or one.get("cause") == cause)
                if incident["kind"] == kind and named:
                    return one["node"], incident["detected_unix_s"]
        return None

    def _step(self) -> int:
        last = [
            lines[-1] for rank in range(self.plan.nodes * self.plan.ranks) if (lines := self._lines(rank))
        ]
        return max((int(line.split()[0]) for line in last), default=-1)

    def _lines(self, rank: int) -> list[str]:
        path = self.work / f"losses-{rank}"
        return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def _apart(first: float | None, then: float | None) -> float | None:
    return None if first is None or then is None else round(then - first, 2)
