"""A real Prometheus and Alertmanager with the shipped configuration, what they scrape, and where alarms arrive."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_READY_S, _POLL_S = 30.0, 0.05


def missing() -> str:
    """Why it cannot run here; "" if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return (
        f"{', '.join(absent)} missing: apt-get install prometheus prometheus-alertmanager" if absent else ""
    )


@contextmanager
def http_server(
    look: Callable[[], bytes] | None = None, take: Callable[[str, bytes], None] | None = None
) -> Iterator[int]:
    """A server on a port of this machine that answers GET by ``look`` and gives bodies of POST to ``take``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = b"" if look is None else look()
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if take is not None:
                take(self.path, content)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass
class Webhook:
    """What an Alertmanager has sent: for each notification when it came (monotonic), where to, and what."""

    came: list[tuple[float, str, dict[str, Any]]] = field(
        default_factory=list[tuple[float, str, dict[str, Any]]]
    )

    def take(self, path: str, content: bytes) -> None:
        """Keep one."""
        self.came.append((time.monotonic(), path, json.loads(content)))

    def wait_for(
        self, is_it: Callable[[dict[str, Any]], bool], within_s: float = 60.0
    ) -> tuple[float, dict[str, Any]]:
        """The first notification that is it, and when it came."""
        found = eventually(lambda: [(s, one) for s, _, one in list(self.came) if is_it(one)], within_s)
        return found[0]


@dataclass(frozen=True)
class Bed:
    """A Prometheus that runs."""

    url: str
    manager: str  # URL of the Alertmanager
    webhook: Webhook

    def alarms(self) -> list[dict[str, Any]]:
        """What the Alertmanager knows, told or not."""
        with urllib.request.urlopen(f"{self.manager}/api/v2/alerts") as answer:
            return json.load(answer)

    def asked(self, path: str, **given: str) -> Any:
        """The data of an answer of its API."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(given)}") as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What it finds now."""
        return self.asked("query", query=expression)["result"]

    def query_range(self, expression: str, since_unix_s: float) -> list[dict[str, Any]]:
        """What it finds from then until now, a second apart."""
        return self.asked(
            "query_range", query=expression, start=str(since_unix_s), end=str(time.time()), step="1"
        )["result"]

    def wait_for(self, expression: str, within_s: float = 60.0) -> list[dict[str, Any]]:
        """What it finds once it finds something."""
        return eventually(lambda: self.query(expression), within_s)


def eventually(look: Callable[[], list[Any]], within_s: float) -> list[Any]:
    """What is found once something is. Raises TimeoutError."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if found := look():
            return found
        time.sleep(_POLL_S)
    raise TimeoutError(f"nothing within {within_s:g} s")


@contextmanager
def bed(
    folder: Path,
    keepstep: Mapping[int, Mapping[str, str]],
    dcgm: int | None = None,
    *,
    intervals: Mapping[str, str] | None = None,
) -> Iterator[Bed]:
    """Prometheus and Alertmanager with the files of ``deploy/``, in ``folder``.

    ``keepstep``: ports that are scraped, with the labels that their targets have; ``dcgm``: the port of a stand-in for
    dcgm-exporter. ``intervals`` replaces intervals of the shipped files, as a test has less time than an operator.
    """
    reason = missing()
    if reason:
        raise RuntimeError(reason)
    shutil.copytree(DEPLOY / "prometheus", folder / "prometheus")
    ports = {"9093": free_port(), "prometheus": free_port()}
    webhook = Webhook()
    with ExitStack() as parts:
        hook = parts.enter_context(http_server(take=webhook.take))
        manager = (DEPLOY / "alertmanager/alertmanager.yml").read_text().replace(":9095/", f":{hook}/")
        (folder / "alertmanager.yml").write_text(manager)
        targets = [{"targets": [f"127.0.0.1:{port}"], "labels": dict(one)} for port, one in keepstep.items()]
        (folder / "prometheus/keepstep-targets.yml").write_text(json.dumps(targets))
        config = (folder / "prometheus/prometheus.yml").read_text()
        config = config.replace(":9093", f":{ports['9093']}").replace(":9400", f":{dcgm or free_port()}")
        (folder / "prometheus/prometheus.yml").write_text(config)
        for name in ("prometheus.yml", "keepstep.rules.yml", "keepstep-dcgm.rules.yml"):
            path = folder / "prometheus" / name
            content = path.read_text()
            for old, new in (intervals or {}).items():
                content = content.replace(f"interval: {old}", f"interval: {new}")
            path.write_text(content)
        parts.enter_context(
            _program(
                folder,
                "prometheus-alertmanager",
                f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/alertmanager",
                f"--web.listen-address=127.0.0.1:{ports['9093']}",
                "--cluster.listen-address=",
            )
        )
        _ready(f"http://127.0.0.1:{ports['9093']}/-/ready")
        parts.enter_context(
            _program(
                folder,
                "prometheus",
                f"--config.file={folder}/prometheus/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{ports['prometheus']}",
            )
        )
        url = f"http://127.0.0.1:{ports['prometheus']}"
        _ready(f"{url}/-/ready")
        yield Bed(url, f"http://127.0.0.1:{ports['9093']}", webhook)


@contextmanager
def _program(folder: Path, name: str, *arguments: str) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        started = subprocess.Popen([name, *arguments], stdout=log, stderr=log, cwd=folder)
        try:
            yield
        finally:
            started.terminate()
            started.wait()


def _ready(url: str) -> None:
    def answered() -> list[int]:
        try:
            with urllib.request.urlopen(url) as answer:
                return [answer.status]
        except OSError:
            return []

    eventually(answered, _READY_S)


def panels(name: str) -> Iterator[tuple[str, str]]:
    """Title and expression of everything that a dashboard asks Prometheus."""
    for panel in json.loads((DEPLOY / "grafana" / name).read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


DCGM = """\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
"""
_FIGURES = {
    "DCGM_FI_DEV_SM_CLOCK": 1980,
    "DCGM_FI_DEV_GPU_TEMP": 60,
    "DCGM_FI_DEV_POWER_USAGE": 650.5,
    "DCGM_FI_DEV_GPU_UTIL": 100,
    "DCGM_FI_DEV_XID_ERRORS": 0,
}


def dcgm_page(nodes: list[str], gpus: int = 8) -> bytes:
    """What exporters of these nodes would tell: names and labels as dcgm-exporter has them; GPU n is at 60 + n °C."""
    lines = [
        f'{name}{{gpu="{gpu}",UUID="GPU-{node}-{gpu}",pci_bus_id="00000000:{gpu:02X}:00.0",device="nvidia{gpu}",'
        f'modelName="NVIDIA H100 80GB HBM3",Hostname="{node}",DCGM_FI_DRIVER_VERSION="550.54.15"}} '
        f"{value + gpu if name == 'DCGM_FI_DEV_GPU_TEMP' else value}"
        for name, value in _FIGURES.items()
        for node in nodes
        for gpu in range(gpus)
    ]
    return (DCGM + "\n".join(lines) + "\n").encode()
