"""A real control plane of Kubernetes 1.20 on this machine, below one folder, for one test.

etcd, kube-apiserver with TLS, tokens and RBAC, kube-scheduler and kube-controller-manager run as they are. There is no
kubelet: a stand-in has the nodes n0, n1, … and runs their pods (``stand_in_kubelet.py``).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.certificates import certificates
from tests.e2e.kube_api import ApiError, KubeApi
from tests.e2e.slurm_bed import free_ports, until
from tests.e2e.stand_in_kubelet import StandInKubelets
from tests.e2e.stand_in_pod import Network

from keepstep.wire import TlsPaths

PATIENCE_S = 60.0
PLACE = Path(
    os.environ.get("KEEPSTEP_KUBERNETES")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "keepstep/kubernetes-1.20.2")
)
_PROGRAMS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")
_TOKENS = """\
admin-token,admin,admin,system:masters
scheduler-token,system:kube-scheduler,scheduler
manager-token,system:kube-controller-manager,manager
"""


def missing() -> str:
    """Why there can be no bed here; empty where there can."""
    if os.geteuid() != 0:
        return "pods of the stand-in kubelet need root"
    tools = [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    if tools:
        return f"not installed: {', '.join(tools)} (packages iproute2 and util-linux)"
    absent = [name for name in _PROGRAMS if not (PLACE / name).exists()]
    return f"not built: {', '.join(absent)} (make kubernetes)" if absent else ""


@dataclass
class KubeBed:
    """A running cluster. ``api``: its administrator."""

    folder: Path
    network: Network
    api: KubeApi
    kubelets: StandInKubelets
    nodes: list[str]
    unreachable_s: int
    tls: TlsPaths
    ports: dict[str, int]
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    def start_api(self) -> None:
        """Start the API server, for the first time or again."""
        self._start("kube-apiserver", **self._api_flags())
        until(self._is_ready, "the API server is ready", PATIENCE_S)

    def stop_api(self) -> None:
        """Stop the API server; everything else goes on."""
        program = self.programs.pop("kube-apiserver")
        program.kill()
        program.wait()

    def kubeconfig(self, token: str, namespace: str = "default") -> Path:
        """A file that lets kubectl, or a client library, in with a token."""
        path = self.folder / f"{token[-24:]}.kubeconfig"
        cluster = {"server": self.api.server, "certificate-authority": self.tls.ca}
        context = {"cluster": "bed", "user": "own", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bed",
            "clusters": [{"name": "bed", "cluster": cluster}],
            "users": [{"name": "own", "user": {"token": token}}],
            "contexts": [{"name": "bed", "context": context}],
        }
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def token(self, account: str, namespace: str = "default") -> str:
        """The token of a ServiceAccount, once it has one."""
        until(lambda: self._token(account, namespace), f"{account} has a token", PATIENCE_S)
        return self._token(account, namespace)

    def taint(self, node: str, key: str, effect: str = "NoExecute") -> None:
        """Taint a node."""
        self.api.patch(f"/api/v1/nodes/{node}", {"spec": {"taints": [{"key": key, "effect": effect}]}})

    def start_all(self) -> None:
        """Start everything, in its order."""
        etcd, peer = self.ports["etcd"], self.ports["peer"]
        self._start(
            "etcd",
            data_dir=f"{self.folder}/etcd",
            listen_client_urls=f"http://127.0.0.1:{etcd}",
            advertise_client_urls=f"http://127.0.0.1:{etcd}",
            listen_peer_urls=f"http://127.0.0.1:{peer}",
            initial_advertise_peer_urls=f"http://127.0.0.1:{peer}",
            initial_cluster=f"default=http://127.0.0.1:{peer}",
            log_level="warn",
        )
        self.start_api()
        manager, scheduler = self.kubeconfig("manager-token"), self.kubeconfig("scheduler-token")
        alone = {"leader_elect": "false", "port": 0, "secure_port": 0}
        self._start(
            "kube-controller-manager",
            kubeconfig=manager,
            service_account_private_key_file=self.tls.key,
            use_service_account_credentials="true",
            root_ca_file=self.tls.ca,
            node_monitor_period="500ms",
            node_monitor_grace_period="5s",
            **alone,
        )
        self._start("kube-scheduler", kubeconfig=scheduler, **alone)
        until(lambda: self._has_namespace("kube-node-lease"), "the namespaces are there", PATIENCE_S)
        self.kubelets.start(self.nodes)
        self.token("default")
        until(self._nodes_are_ready, "all nodes are ready", PATIENCE_S)

    def stop_all(self) -> None:
        """End all pods and programs, and remove the network."""
        self.kubelets.stop()
        for program in reversed(self.programs.values()):
            program.kill()
            program.wait()
        self.network.remove()

    def _api_flags(self) -> dict[str, object]:
        issuer = "https://kubernetes.default.svc"
        return {
            "etcd_servers": f"http://127.0.0.1:{self.ports['etcd']}",
            "secure_port": self.ports["api"],
            "bind_address": "0.0.0.0",
            "advertise_address": self.network.address,
            "tls_cert_file": self.tls.cert,
            "tls_private_key_file": self.tls.key,
            "token_auth_file": self.folder / "tokens.csv",
            "authorization_mode": "RBAC",
            "anonymous_auth": "true",
            "service_account_issuer": issuer,
            "service_account_key_file": self.tls.cert,
            "service_account_signing_key_file": self.tls.key,
            "service_cluster_ip_range": "10.96.0.0/16",
            "default_unreachable_toleration_seconds": self.unreachable_s,
            "default_not_ready_toleration_seconds": self.unreachable_s,
            "watch_cache": "true",
            "cert_dir": self.folder / "certificates",
        }

    def _start(self, name: str, **flags: object) -> None:
        words = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.programs[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", str(PLACE / name), *words],
                env={**os.environ, "GOGC": "40"},  # a third of the memory for a tenth of the time
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def _is_ready(self) -> bool:
        program = self.programs["kube-apiserver"]
        assert program.poll() is None, (self.folder / "kube-apiserver.log").read_text()[-2000:]
        with suppress(ApiError, OSError, ValueError):
            return self.api.get("/api/v1/namespaces/default")["metadata"]["name"] == "default"
        return False

    def _has_namespace(self, name: str) -> bool:
        return any(one["metadata"]["name"] == name for one in self.api.get("/api/v1/namespaces")["items"])

    def _nodes_are_ready(self) -> bool:
        found = self.api.get("/api/v1/nodes")["items"]
        return len(found) == len(self.nodes) and not any(one["spec"].get("taints") for one in found)

    def _token(self, account: str, namespace: str) -> str:
        inside = f"/api/v1/namespaces/{namespace}"
        with suppress(ApiError):
            for one in self.api.get(f"{inside}/serviceaccounts/{account}").get("secrets", []):
                data = self.api.get(f"{inside}/secrets/{one['name']}")["data"]
                return base64.b64decode(data["token"]).decode()
        return ""


@contextmanager
def kubernetes(
    folder: Path, count: int = 6, *, unreachable_s: int = 300, environ: dict[str, str] | None = None
) -> Iterator[KubeBed]:
    """A cluster of so many nodes.

    Pods leave a node that is not heard so many seconds later. ``environ``: for all pods.
    """
    folder.chmod(0o755)
    (folder / "tls").mkdir()
    (folder / "pods").mkdir()
    (folder / "tokens.csv").write_text(_TOKENS)
    (folder / "tokens.csv").chmod(0o600)
    network = Network()
    try:
        tls = certificates(folder / "tls", network.address)
        ports: dict[str, int] = dict(zip(("etcd", "peer", "api"), free_ports(3), strict=True))
        api = KubeApi(f"https://127.0.0.1:{ports['api']}", Path(tls.ca), "admin-token")
        kubelets = StandInKubelets(api, folder / "pods", network, environ or {})
        nodes = [f"n{number}" for number in range(count)]
        bed = KubeBed(folder, network, api, kubelets, nodes, unreachable_s, tls, ports)
    except BaseException:
        network.remove()
        raise
    try:
        bed.start_all()
        yield bed
    finally:
        bed.stop_all()


def wait_for(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> float:
    """Wait until a condition holds; how long that took."""
    began_s = time.monotonic()
    until(condition, what, patience_s)
    return time.monotonic() - began_s
