"""`keepstep operator` on the bed, under the role that is shipped, and a training job that it makes the pods of."""

from __future__ import annotations

import copy
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.faulty_api import FaultyApi
from tests.e2e.kube_api import MERGE, ApiError, Object
from tests.e2e.kube_bed import KubeBed, until
from tests.e2e.stand_in_job import SHARED, StandInJob
from tests.e2e.test_backups import backed_up

OPERATOR = Path(__file__).parents[2] / "deploy/kubernetes/operator"
TRAIN = Path(__file__).parents[2] / "benchmarks/operate/job.py"
JOBS = "/apis/keepstep.dev/v1alpha1/namespaces/default/trainingjobs"
PODS = "/api/v1/namespaces/default/pods"
FALSE = Path(__file__).with_name("false_controller.py")
_XID = "NVRM: Xid (PCI:0000:3b:00): 48, pid=77, name=python, An uncorrectable double bit error (DBE)"


class Operated:
    """A cluster in which the operator is installed."""

    def __init__(self, bed: KubeBed) -> None:
        self.bed, self.api = bed, bed.api
        self.operators: list[subprocess.Popen[bytes]] = []
        self.log = bed.folder / "operator.log"
        for name in ("namespace", "crd", "operator", "jobs/role"):
            shipped = yaml.safe_load_all((OPERATOR / f"{name}.yaml").read_text())
            own = [
                one for one in shipped if one["kind"] != "Deployment"
            ]  # the tests start operators themselves
            self.api.apply(yaml.safe_dump_all(own))
        self.faulty = FaultyApi(
            self.api.server, "127.0.0.1", bed.tls
        )  # the operators see the API server through it
        self.config = bed.kubeconfig(bed.token("keepstep-operator", "keepstep"), "keepstep")
        config = json.loads(self.config.read_text())
        config["clusters"][0]["cluster"]["server"] = self.faulty.server
        self.config.write_text(json.dumps(config))
        until(self._knows_jobs, "the CRD is served")
        secret = {"metadata": {"name": "keepstep"}, "stringData": {"secret": secrets.token_hex(32)}}
        self.api.post("/api/v1/namespaces/default/secrets", secret)
        self.folder = bed.folder / "work"
        self.folder.mkdir()
        self.folder.chmod(0o1777)

    def define_jobs(self) -> None:
        """Install the definition of training jobs anew."""
        self.api.apply((OPERATOR / "crd.yaml").read_text())
        until(self._knows_jobs, "the CRD is served")

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """Start an operator."""
        command = [sys.executable, "-m", "keepstep.cli", "operator", "--namespace=default", *flags]
        with self.log.open("ab") as log:
            self.operators.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, "KUBECONFIG": str(self.config)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
        return self.operators[-1]

    def let_operator_look(self, times: int) -> None:
        """Wait until the operator has looked after its Lease, and so at everything, so many times more."""

        def looked() -> int:
            return sum("/leases/" in path for _, path, _ in self.faulty.seen)

        before = looked()
        until(lambda: looked() >= before + times, "the operator looks")

    def run(self, *flags: str) -> str:
        """Run an operator's order to its end; what it says."""
        command = [sys.executable, "-m", "keepstep.cli", "operator", *flags]
        environ = {**os.environ, "KUBECONFIG": str(self.config)}
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, check=True, timeout=60
        ).stderr

    def stop(self) -> None:
        """End all operators."""
        for one in self.operators:
            one.send_signal(signal.SIGTERM)
        for one in self.operators:
            one.wait(30)
        self.faulty.close()

    def train(self, steps: int, *, nodes: int = 3, spares: int = 1, **spec: Any) -> None:
        """Make a training job of real launchers."""
        words = ["--nnodes=$(TRAINING_JOB_NODES)", "--nproc-per-node=1", "--max-restarts=3"]
        words += ["--run-dir=/run/keepstep/train", str(TRAIN), SHARED, str(steps), "0.1"]
        self.make(words, nodes=nodes, spares=spares, **spec)

    def make(self, words: list[str], *, command: list[str] | None = None, **spec: Any) -> None:
        """Make the training job that is shipped, with another command."""
        job: Object = copy.deepcopy(yaml.safe_load((OPERATOR / "trainingjob.yaml").read_text()))
        pod = job["spec"]["template"]["spec"]
        (main,) = pod["containers"]
        main["command"], main["args"] = command or ["python", "-m", "keepstep.cli", "run"], words
        del main["resources"]
        pod["tolerations"] = []
        main["volumeMounts"].append({"name": "shared", "mountPath": SHARED})
        main["volumeMounts"].append({"name": "kmsg", "mountPath": "/dev/kmsg", "readOnly": True})
        pod["volumes"].append({"name": "shared", "hostPath": {"path": str(self.folder)}})
        pod["volumes"].append({"name": "kmsg", "hostPath": {"path": "/dev/kmsg"}})
        job["spec"] |= spec
        self.api.post(JOBS, job)

    def train_indexed(self, steps: int, *flags: str, **annotations: str) -> StandInJob:
        """Make the pods of an indexed Job of real launchers, three nodes and a spare, which are to be watched."""
        words = ["--nnodes=3", "--nproc-per-node=1", "--max-restarts=3", "--secret-file=/etc/keepstep/secret"]
        words += [*flags, "--run-dir=/run/keepstep/train", str(TRAIN), SHARED, str(steps), "0.1"]
        own = {f"keepstep.dev/{name.replace('_', '-')}": text for name, text in annotations.items()}
        labels = {"keepstep.dev/watch": "train"}
        return StandInJob(self.api, 4, words, self.folder, labels=labels, annotations=own, has_secret=True)

    def make_false(
        self, name: str, *accused: str, namespace: str = "default", job: str = "", spec: Object | None = None
    ) -> None:
        """Make a pod that is to be watched and says of nodes that they are bad."""
        pod: Object = {
            "metadata": {
                "name": name,
                "labels": {"keepstep.dev/watch": job or name},
                "annotations": {"keepstep.dev/node-remedy": "auto"},
            },
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "false",
                        "image": "none",
                        "command": [
                            "sh",
                            "-c",
                            f'exec python "{FALSE}" {name[:-2]} "$@" "$NODE"',
                            "sh",
                            *accused,
                        ],
                        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
                        "volumeMounts": [{"name": "secret", "mountPath": "/etc/keepstep"}],
                    }
                ],
                "volumes": [{"name": "secret", "secret": {"secretName": "keepstep", "defaultMode": 0o400}}],
                **(spec or {}),
            },
        }
        self.api.post(PODS.replace("/default/", f"/{namespace}/"), pod)

    def make_namespace(self, name: str) -> None:
        """Make a namespace with a secret that pods share."""
        self.api.post("/api/v1/namespaces", {"metadata": {"name": name}})
        self.bed.token("default", name)
        secret = {"metadata": {"name": "keepstep"}, "stringData": {"secret": secrets.token_hex(32)}}
        self.api.post(f"/api/v1/namespaces/{name}/secrets", secret)

    def put_into_secret(self, files: Mapping[str, str]) -> None:
        """Add files to the secret that the pods share: paths by key."""
        texts = {key: Path(path).read_text() for key, path in files.items()}
        self.api.patch("/api/v1/namespaces/default/secrets/keepstep", {"stringData": texts})

    def events(self, pod_prefix: str) -> set[str]:
        """The reasons of the operator's Events about pods whose names begin so."""
        return {
            one["reason"]
            for one in self.api.get("/api/v1/namespaces/default/events")["items"]
            if one["source"].get("component") == "keepstep-operator"
            and one["involvedObject"]["kind"] == "Pod"
            and one["involvedObject"]["name"].startswith(pod_prefix)
        }

    def job(self) -> Object:
        """The job as it is now."""
        return self.api.get(f"{JOBS}/train")

    def status(self) -> Object:
        return self.job().get("status", {})

    def pods(self) -> dict[str, Object]:
        """All pods by name."""
        return {one["metadata"]["name"]: one for one in self.api.get(PODS)["items"]}

    def nodes_of_pods(self) -> dict[str, str]:
        """Where each pod is that runs."""
        return {
            name: one["spec"].get("nodeName", "")
            for name, one in self.pods().items()
            if one["status"].get("phase") == "Running"
        }

    def watched(self) -> str:
        """Whether the operator hears the job's controller."""
        found = self.status().get("conditions", [])
        return next((one["status"] for one in found if one["type"] == "Watched"), "")

    def uid(self, pod: str) -> str:
        """The uid of the pod that has a name now; empty where there is none."""
        return self.pods().get(pod, {"metadata": {"uid": ""}})["metadata"]["uid"]

    def taints(self, node: str) -> dict[str, str]:
        """A node's taints, without Kubernetes' own ones of a busy machine: effects by key."""
        found = self.api.get(f"/api/v1/nodes/{node}")["spec"].get("taints", [])
        return {one["key"]: one["effect"] for one in found if "node.kubernetes.io" not in one["key"]}

    def notes(self, node: str) -> str:
        """What the operator has noted on a node."""
        meta = self.api.get(f"/api/v1/nodes/{node}")["metadata"]
        return meta.get("annotations", {}).get("keepstep.dev/faults", "")

    def conditions(self, node: str) -> dict[str, str]:
        """What keepstep says of a node: messages by condition."""
        found = self.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
        return {one["type"]: one["message"] for one in found if one["type"].startswith("Keepstep")}

    def change(self, change: Object) -> None:
        """Change the job as a user does."""
        self.api.patch(f"{JOBS}/train", change, MERGE)

    def rank_nodes(self, rank: int) -> list[str]:
        """The nodes on which a rank was, in their order."""
        return list(dict.fromkeys(line.split()[3] for line in self._losses(rank)))

    def step(self, rank: int) -> int:
        lines = self._losses(rank)
        return int(lines[-1].split()[0]) if lines else -1

    def break_gpu(self, node: str) -> None:
        """The kernel of a node and torch in its ranks tell of a broken GPU."""
        self.bed.kubelets.say_as_kernel(node, f"{_XID} has been detected on GPU in the framebuffer.")
        (self.folder / f"break-{node}").touch()

    def trains(self, ranks: int = 3, steps: int = 5) -> None:
        """Wait until all ranks have made so many more steps."""
        before = [self.step(rank) for rank in range(ranks)]
        until(lambda: all(self.step(rank) >= before[rank] + steps for rank in range(ranks)), "all train", 90)

    def is_backed_up(self, first_pod: str = "train-0") -> bool:
        """Whether each node's state is on another one, too."""
        first = self.bed.kubelets.find(first_pod).container.folder
        return backed_up(first / "volumes/keepstep-run/train") >= 5

    def said(self) -> str:
        """What the operators have said."""
        return self.log.read_text()

    def _losses(self, rank: int) -> list[str]:
        path = self.folder / f"losses-{rank}"
        return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []

    def _knows_jobs(self) -> bool:
        try:
            return "items" in self.api.get(JOBS)
        except ApiError:
            return False
