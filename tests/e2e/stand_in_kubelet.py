"""A stand-in for the kubelets of a cluster's nodes, all in this process: heartbeats, and pods as processes.

It does what a kubelet does with a pod of one container: secrets, ConfigMaps and empty folders at their places, the
environment with the downward API, the command, its state with exit code and last message, the end with a grace period.
It pulls no image, limits nothing, probes nothing.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e.kube_api import ApiError, KubeApi, Object
from tests.e2e.stand_in_pod import Container, Network, image_environ

BEAT_S = 1.0
_AGAIN_S = 0.3
_BACKOFF_S = 1.0
_MESSAGE_BYTES = 4096
_LOG_TAIL_BYTES = 2048
_UNREACHABLE = (OSError, http.client.HTTPException)
T = TypeVar("T")


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class StandInKubelets:
    """The kubelets of all nodes. ``lost`` nodes have none."""

    def __init__(self, api: KubeApi, folder: Path, network: Network, environ: dict[str, str]) -> None:
        self.api, self.folder, self.network, self.environ = api, folder, network, environ
        self.service = f"https://{network.address}:{api.server.rpartition(':')[2]}"  # where pods find it
        self.nodes: list[str] = []
        self.lost: set[str] = set()
        self.pods: dict[str, StandInPod] = {}  # by uid
        self.hosts: list[str] = []  # what pods know of each other
        self.over = threading.Event()
        self._lock = threading.Lock()

    def start(self, nodes: list[str]) -> None:
        for node in nodes:
            self.api.post("/api/v1/nodes", {"metadata": {"name": node, "labels": _labels(node)}})
            self.api.patch(f"/api/v1/nodes/{node}/status", {"status": _node_status(self.network.address)})
            lease = {"holderIdentity": node, "leaseDurationSeconds": 40}
            self.api.post(f"{_LEASES}", {"metadata": {"name": node}, "spec": lease})
        self.nodes = list(nodes)
        for work in (self._beat, lambda: self._follow("pods", self._pods), self._follow_endpoints):
            threading.Thread(target=work, daemon=True).start()  # ends with the API server

    def stop(self) -> None:
        """End all pods and all that was begun here."""
        self.over.set()
        for pod in list(self.pods.values()):
            pod.vanish()
        for pod in list(self.pods.values()):
            pod.join()

    def lose(self, node: str) -> None:
        """Take away a node's power: nothing is heard of it, or of its pods, any more."""
        with self._lock:
            self.lost.add(node)
            gone = [pod for pod in self.pods.values() if pod.node == node]
        for pod in gone:
            pod.container.unplug()
        for pod in gone:
            pod.vanish()
            pod.join()

    def bring_back(self, node: str) -> None:
        """Start a lost node again; of its pods nothing is left."""
        with self._lock:
            self.lost.discard(node)
        for one in self.api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={node}")["items"]:
            if "deletionTimestamp" in one["metadata"]:
                self.finish_deletion(one)
            elif one["status"].get("phase") == "Running":
                self.report(one, {"phase": "Failed", "reason": "NodeLost"}, lambda: True)

    def host_path(self, node: str, path: str) -> Path:
        """What a path of a node stands for: a file of its own where it is a device, else this machine's."""
        if not path.startswith("/dev/"):
            return Path(path)
        own = self.folder / "nodes" / node / path.removeprefix("/")
        own.parent.mkdir(parents=True, exist_ok=True)
        own.touch()
        return own

    def say_as_kernel(self, node: str, text: str) -> None:
        """Add a line to a node's kernel log, which pods may mount from ``/dev/kmsg``."""
        clock_us = round(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
        with self.host_path(node, "/dev/kmsg").open("a") as log:
            log.write(f"3,{clock_us},{clock_us},-;{text}\n")

    def find(self, name: str) -> StandInPod:
        """The newest pod of a name that is or was here."""
        return next(pod for pod in reversed(self.pods.values()) if pod.name == name)

    def report(self, pod: Object, status: Object, goes_on: Callable[[], bool]) -> None:
        """Tell a pod's status, however long the API server is away."""
        self.insist(lambda: self.api.patch(f"{path_of(pod)}/status", {"status": status}), goes_on)

    def finish_deletion(self, pod: Object) -> None:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        self.insist(lambda: self.api.delete(path_of(pod), **options), lambda: not self.over.is_set())

    def insist(self, ask: Callable[[], T], goes_on: Callable[[], bool]) -> T | None:
        """Ask until there is an answer. What is gone, or is another by now, needs none."""
        while goes_on():
            try:
                return ask()
            except ApiError as error:
                if error.code in (404, 409):
                    return None
            except _UNREACHABLE:
                pass
            time.sleep(_AGAIN_S)
        return None

    def _beat(self) -> None:
        while not self.over.wait(BEAT_S):
            for node in self.nodes:
                if node in self.lost:
                    continue
                with suppress(ApiError, *_UNREACHABLE):
                    renewed = {"renewTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
                    self.api.patch(f"{_LEASES}/{node}", {"spec": renewed})
                    ready = self.api.get(f"/api/v1/nodes/{node}")["status"].get("conditions", [])
                    if not any(one["type"] == "Ready" and one["status"] == "True" for one in ready):
                        told = _node_status(self.network.address)
                        self.api.patch(f"/api/v1/nodes/{node}/status", {"status": told})

    def _follow(self, what: str, changed: Callable[[str, Object], None]) -> None:
        """Hear of all objects of a kind, and of every change."""
        while not self.over.is_set():
            with suppress(ApiError, *_UNREACHABLE):
                listed = self.api.get(f"/api/v1/{what}")
                for one in listed["items"]:
                    changed("ADDED", one)
                for kind, one in self.api.watch(f"/api/v1/{what}", listed["metadata"]["resourceVersion"]):
                    if self.over.is_set():
                        return
                    changed(kind, one)
            self.over.wait(_AGAIN_S)

    def _pods(self, kind: str, one: Object) -> None:
        uid, node = one["metadata"]["uid"], one["spec"].get("nodeName")
        with self._lock:
            if node not in self.nodes or node in self.lost or self.over.is_set():
                return
            known = self.pods.get(uid)
            is_over = one["status"].get("phase") in ("Succeeded", "Failed")
            if known is None and kind != "DELETED" and "deletionTimestamp" not in one["metadata"]:
                if not is_over:
                    self.pods[uid] = StandInPod(self, one)
                return
        if kind == "DELETED":
            if known is not None:
                known.vanish()
        elif "deletionTimestamp" in one["metadata"] and (known is None or not known.end(one)):
            self.finish_deletion(one)

    def _follow_endpoints(self) -> None:
        known: dict[str, list[str]] = {}

        def changed(kind: str, one: Object) -> None:
            name, space = one["metadata"]["name"], one["metadata"]["namespace"]
            known[f"{space}/{name}"] = [] if kind == "DELETED" else _host_lines(one, name, space)
            self.hosts = [line for lines in known.values() for line in lines]
            for pod in list(self.pods.values()):
                pod.name_hosts()

        self._follow("endpoints", changed)


class StandInPod:
    """One pod on a node, from its first moment to its end, in a thread of its own."""

    def __init__(self, kubelets: StandInKubelets, pod: Object) -> None:
        self.kubelets, self.pod = kubelets, pod
        meta, spec = pod["metadata"], pod["spec"]
        self.name, self.node = meta["name"], spec["nodeName"]
        self.exit_code: int | None = None
        self.message = ""
        self._vanished = threading.Event()
        self._killed_at: float | None = None
        hostname = spec.get("hostname", self.name)
        subdomain = spec.get("subdomain")
        domain = f"{subdomain}.{meta['namespace']}.svc.cluster.local" if subdomain else ""
        self.container = Container(kubelets.folder / meta["uid"], kubelets.network, hostname, domain)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def name_hosts(self) -> None:
        with suppress(OSError):
            self.container.name_hosts(self.kubelets.hosts)

    def vanish(self) -> None:
        """End at once, and say nothing of it."""
        self._vanished.set()

    def pid_of(self, variable: str) -> int:
        """The number, here, of a process of the pod that has ``NAME=VALUE`` in its environment and is not the first."""
        return self.container.pid_with(variable.encode())

    def end(self, deleted: Object) -> bool:
        """Ask the command to end, as the pod was deleted; false where it has ended."""
        if not self._thread.is_alive():
            return False
        if self._killed_at is None:
            grace_s = deleted["metadata"].get("deletionGracePeriodSeconds", 30)
            self._killed_at = time.monotonic() + grace_s
        return True

    def join(self) -> None:
        self._thread.join()

    def _live(self) -> None:
        try:
            self._run()
        finally:
            self.container.remove()
        if self._killed_at is not None and not self._vanished.is_set():
            self.kubelets.finish_deletion(self.pod)

    def _run(self) -> None:
        spec = self.pod["spec"]
        (main,) = spec["containers"]
        address = self.container.address
        self._mount()
        self.name_hosts()
        restarts, state = 0, {}
        while self._goes_on() and self._killed_at is None:
            began, message = now(), self._message_file(main)
            self._start(main)
            state = {"running": {"startedAt": began}}
            self._report("Running", main, state, restarts, address)
            code = self._waited()
            if self._vanished.is_set():
                return
            self.exit_code, self.message = code, self._message(main, message, code)
            end = {
                "exitCode": code,
                "reason": "Error" if code else "Completed",
                "message": self.message,
                "startedAt": began,
                "finishedAt": now(),
            }
            policy = spec.get("restartPolicy", "Always")
            if self._killed_at is not None or policy == "Never" or (policy == "OnFailure" and not code):
                self._report("Failed" if code else "Succeeded", main, {"terminated": end}, restarts, address)
                return
            restarts += 1
            waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
            self._report("Running", main, waiting, restarts, address, last={"terminated": end})
            self._vanished.wait(_BACKOFF_S)

    def _goes_on(self) -> bool:
        return not self._vanished.is_set()

    def _waited(self) -> int:
        asked = False
        while True:
            code = self.container.wait(0.05)
            if code is not None:
                return code
            if self._killed_at is not None and not asked:
                asked = self.container.kill(signal.SIGTERM)
            late = self._killed_at is not None and time.monotonic() > self._killed_at
            if late or self._vanished.is_set():
                self.container.kill(signal.SIGKILL)

    def _report(
        self, phase: str, main: Object, state: Object, restarts: int, address: str, last: Object | None = None
    ) -> None:
        ready = "True" if "running" in state else "False"
        kinds = {"Initialized": "True", "Ready": ready, "ContainersReady": ready, "PodScheduled": "True"}
        one = {
            "name": main["name"],
            "image": main.get("image", ""),
            "imageID": "",
            "ready": "running" in state,
            "started": "running" in state,
            "restartCount": restarts,
            "state": state,
            "lastState": last or {},
        }
        told: Object = {
            "phase": phase,
            "conditions": [
                {"type": kind, "status": is_so, "lastTransitionTime": now()} for kind, is_so in kinds.items()
            ],
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": self.kubelets.network.address,
            "startTime": self.pod["metadata"]["creationTimestamp"],
            "containerStatuses": [one],
        }
        self.kubelets.report(self.pod, told, self._goes_on)

    def _start(self, main: Object) -> None:
        environ = self._environ(main)
        words = [_expanded(word, environ) for word in [*main.get("command", []), *main.get("args", [])]]
        security = {**self.pod["spec"].get("securityContext", {}), **main.get("securityContext", {})}
        user = security.get("runAsUser", 0)
        group = security.get("runAsGroup", 0)
        self.container.start(
            words, environ, (user, group, security.get("fsGroup", group)), main.get("workingDir", "/")
        )

    def _environ(self, main: Object) -> dict[str, str]:
        host, _, port = self.kubelets.service.removeprefix("https://").rpartition(":")
        environ = {**image_environ(), **self.kubelets.environ, "HOSTNAME": self.container.hostname}
        environ |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        for one in main.get("env", []):
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                environ[one["name"]] = self._field(source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source:
                ref = source["secretKeyRef"]
                environ[one["name"]] = self._data("secrets", ref["name"])[ref["key"]].decode()
            else:
                environ[one["name"]] = _expanded(one.get("value", ""), environ)
        return environ

    def _field(self, path: str) -> str:
        if path == "status.podIP":
            return self.container.address
        if path == "status.hostIP":
            return self.kubelets.network.address
        if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return self.pod["metadata"].get(match[1], {}).get(match[2], "")
        found: Any = self.pod
        for part in path.split("."):
            found = found[part]
        return str(found)

    def _data(self, kind: str, name: str) -> dict[str, bytes]:
        path = f"/api/v1/namespaces/{self.pod['metadata']['namespace']}/{kind}/{name}"
        one = None
        while one is None and self._goes_on():  # a pod waits for a secret that is not there yet
            one = self.kubelets.insist(lambda: self.kubelets.api.get(path), self._goes_on)
            if one is None:
                self._vanished.wait(_AGAIN_S)
        data = (one or {}).get("data") or {}
        if kind == "configmaps":
            return {key: value.encode() for key, value in data.items()}
        return {key: base64.b64decode(value) for key, value in data.items()}

    def _mount(self) -> None:
        spec = self.pod["spec"]
        group = spec.get("securityContext", {}).get("fsGroup", 0)
        made: dict[str, Path] = {}
        for volume in spec.get("volumes", []):
            path = self.container.folder / "volumes" / volume["name"]
            path.mkdir(parents=True)
            made[volume["name"]] = path
            if "emptyDir" in volume:
                os.chown(path, 0, group)
                path.chmod(0o2777)
            elif "hostPath" in volume:
                made[volume["name"]] = self.kubelets.host_path(self.node, volume["hostPath"]["path"])
            elif "secret" in volume or "configMap" in volume:
                kind = "secrets" if "secret" in volume else "configmaps"
                source = volume.get("secret") or volume["configMap"]
                data = self._data(kind, source.get("secretName") or source["name"])
                mode = source.get("defaultMode", 0o644) | (0o040 if group else 0)
                _write_atomic(path, data, mode, group)
            else:
                raise ValueError(f"no such volume in this stand-in: {volume}")
        for mount in spec["containers"][0].get("volumeMounts", []):
            self.container.mounts[mount["mountPath"]] = made[mount["name"]]

    def _message_file(self, main: Object) -> Path:
        path = self.container.folder / "message"
        path.write_bytes(b"")
        path.chmod(0o666)
        self.container.mounts[main.get("terminationMessagePath", "/dev/termination-log")] = path
        return path

    def _message(self, main: Object, path: Path, code: int) -> str:
        told = path.read_bytes()[:_MESSAGE_BYTES].decode(errors="replace")
        falls_back = main.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        return self.container.log()[-_LOG_TAIL_BYTES:] if not told and code and falls_back else told


_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


def path_of(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _labels(node: str) -> dict[str, str]:
    return {"kubernetes.io/hostname": node, "kubernetes.io/os": "linux"}


def _node_status(address: str) -> Object:
    room = {"cpu": "64", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": "8"}
    well = ("Ready", "True"), ("MemoryPressure", "False"), ("DiskPressure", "False"), ("PIDPressure", "False")
    return {
        "capacity": room,
        "allocatable": room,
        "addresses": [{"type": "InternalIP", "address": address}],
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": "StandIn",
                "lastHeartbeatTime": now(),
                "lastTransitionTime": now(),
            }
            for kind, status in well
        ],
        "nodeInfo": {
            "kubeletVersion": "v1.20.2",
            "operatingSystem": "linux",
            "containerRuntimeVersion": "none",
        },
    }


def _host_lines(one: Object, name: str, space: str) -> list[str]:
    """Lines of ``/etc/hosts`` for the addresses behind a Service, as the cluster's DNS would answer."""
    lines = []
    for address in (a for part in one.get("subsets") or [] for a in part.get("addresses") or []):
        ends = [name, f"{name}.{space}", f"{name}.{space}.svc", f"{name}.{space}.svc.cluster.local"]
        own = [f"{address['hostname']}.{end}" for end in ends] if "hostname" in address else []
        lines.append(" ".join([address["ip"], *own, *ends]))
    return lines


def _expanded(text: str, environ: dict[str, str]) -> str:
    return re.sub(r"\$\(([^)]+)\)", lambda found: environ.get(found[1], found[0]), text)


def _write_atomic(path: Path, data: dict[str, bytes], mode: int, group: int) -> None:
    """Files as a kubelet lays them: links to links to files in a folder that can be swapped."""
    inside = path / "..2026"
    inside.mkdir()
    for name, content in data.items():
        file = inside / name
        file.write_bytes(content)
        os.chown(file, 0, group)
        file.chmod(mode)
        (path / name).symlink_to(Path("..data", name))
    (path / "..data").symlink_to(inside.name)
