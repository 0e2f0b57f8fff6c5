"""Runs with agent and controller: both may be killed, nodes meet through the controller, a death is a verdict."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import certificates
from tests.e2e.marked import marked

pytestmark = pytest.mark.e2e

PATIENCE_S = 60


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return found


class Nodes:
    """Launchers on this machine, one for each node, with a run folder each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"KEEPSTEP_TEST_MARK={folder}"
        self.launchers: list[subprocess.Popen[str]] = []
        self.secret = folder / "secret"

    def start(self, script: str, *flags: str, node: str = "node0") -> subprocess.Popen[str]:
        path = self.folder / "job.py"
        path.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(script))
        name, _, value = self.mark.partition("=")
        self.launchers.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "keepstep.cli",
                    "run",
                    "--run-dir",
                    str(self.folder / node),
                    *flags,
                    str(path),
                ],
                cwd=self.folder,
                env={**os.environ, name: value, "KEEPSTEP_NODE_NAME": node},
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return self.launchers[-1]

    def finish(self) -> list[tuple[int, str, str]]:
        ended: list[tuple[int, str, str]] = []
        for launcher in self.launchers:
            out, err = launcher.communicate(timeout=PATIENCE_S)
            ended.append((launcher.returncode, out, err))
        return ended

    def program(self, module: str) -> list[int]:
        """Processes of this test that run ``python -m module``."""
        found: list[int] = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) in self.left():
                try:
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if module.encode() in words:
                    found.append(int(entry))
        return found

    def left(self) -> list[int]:
        """Processes that carry our mark."""
        return marked(self.mark)

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "node0" / "status.json").read_text())
        except OSError:
            return {}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    left = made.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for launcher in made.launchers:
        launcher.communicate()
    assert left == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


WAIT = "while not os.path.exists('go'): time.sleep(0.01)\n"


@pytest.mark.parametrize("after_s", [0, 1])
def test_a_death_is_an_incident(nodes: Nodes, after_s: int) -> None:
    """Even one that comes before agent and controller have begun to work."""
    nodes.start(
        f"time.sleep({after_s})\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)",
        "--nproc-per-node",
        "2",
    )
    ((code, _, err),) = nodes.finish()
    assert code == 137
    incident = json.loads((nodes.folder / "node0/incidents/0001.json").read_text())
    assert incident["kind"] == "crash"
    assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
    assert "CRASH" in err
    assert json.loads((nodes.folder / "node0/end.json").read_text())["exit_code"] == 137


@pytest.mark.parametrize("module", ["keepstep.agent", "keepstep.control"])
def test_what_watches_is_started_again_and_training_goes_on(nodes: Nodes, module: str) -> None:
    nodes.start("open(f'w{rank}', 'a').write('started\\n')\n" + WAIT, "--nproc-per-node", "2")
    until(lambda: all((nodes.folder / f"w{rank}").exists() for rank in (0, 1)))
    until(lambda: nodes.program("keepstep.agent"))
    before = json.loads((nodes.folder / "node0/run.json").read_text())["controller"]
    (first,) = until(lambda: nodes.program(module))
    os.kill(first, signal.SIGKILL)
    until(lambda: nodes.program(module) not in ([], [first]))
    written = until(lambda: nodes.status())
    until(lambda: nodes.status() != written)  # there is a controller that works
    assert json.loads((nodes.folder / "node0/run.json").read_text())["controller"] == before
    (nodes.folder / "go").touch()
    assert nodes.finish()[0][0] == 0
    assert (nodes.folder / "w0").read_text() == "started\n"


def start_two(nodes: Nodes, script: str, *flags: str, static: bool = False) -> None:
    port = str(free_port())
    for number in (0, 1):
        if static:
            meet = ["--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", port]
        else:
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "j"]
        secret = ["--secret-file", str(nodes.secret)]
        nodes.start(script, "--nnodes", "2", *meet, *secret, *flags, node=f"node{number}")


SHOW = """
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
line = " ".join(os.environ[name] for name in (*names, "MASTER_PORT"))
os.write(1, (line + "\\n").encode())  # one write: the workers share the pipe
"""


@pytest.mark.parametrize(("static", "watch"), [(True, ()), (False, ("--no-watch",))])
def test_two_nodes_meet(nodes: Nodes, static: bool, watch: tuple[str, ...]) -> None:
    start_two(nodes, SHOW, "--nproc-per-node", "2", *watch, static=static)
    ended = nodes.finish()
    assert [code for code, _, _ in ended] == [0, 0], ended
    lines = [line.split() for _, out, _ in ended for line in out.splitlines()]
    assert sorted(int(line[0]) for line in lines) == [0, 1, 2, 3]
    for rank, local_rank, group_rank, *rest in lines:
        assert int(rank) == int(group_rank) * 2 + int(local_rank)
        assert rest[:4] == ["4", "2", "2", "127.0.0.1"]
    assert len({line[-1] for line in lines}) == 1
    if static:
        assert {line[2] for line in (text.split() for text in ended[1][1].splitlines())} == {"1"}


@pytest.mark.parametrize("victim", ["0", "3"])
def test_a_failure_on_one_node_ends_the_other(nodes: Nodes, victim: str) -> None:
    script = f"time.sleep(0.5)\nif rank == {victim}: sys.exit(5)\ntime.sleep(60)"
    start_two(nodes, script, "--nproc-per-node", "2", static=True)
    assert [code for code, _, _ in nodes.finish()] == [5, 5]
    incident = json.loads((nodes.folder / "node0/incidents/0001.json").read_text())
    assert [culprit["rank"] for culprit in incident["culprits"]] == [int(victim)]


def test_ctrl_c_on_one_node_ends_the_other(nodes: Nodes) -> None:
    start_two(nodes, "open(f'w{rank}', 'w').close()\ntime.sleep(60)", static=True)
    until(lambda: all((nodes.folder / f"w{rank}").exists() for rank in (0, 1)))
    nodes.launchers[0].send_signal(signal.SIGINT)
    assert [code for code, _, _ in nodes.finish()] == [130, 130]


def test_a_node_that_never_comes_is_named_as_the_reason(nodes: Nodes) -> None:
    port = free_port()
    flags = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "join_timeout=2"]
    nodes.start("pass", *flags)
    ((code, _, err),) = nodes.finish()
    assert code == 2
    assert "joined" in err


def test_a_port_that_is_taken_is_named(nodes: Nodes) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        nodes.start("pass", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{other.getsockname()[1]}")
        ((code, _, err),) = nodes.finish()
    assert code == 2
    assert "--rdzv-endpoint" in err


def test_the_wrong_secret_keeps_a_node_out(nodes: Nodes) -> None:
    port = free_port()
    meet = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    conf = ["--rdzv-conf", "join_timeout=4"]
    for number in (0, 1):
        secret = nodes.folder / f"secret{number}"
        secret.write_text(f"{number}" * 64 + "\n")
        secret.chmod(0o600)
        flags = [*meet, *conf, "--node-rank", str(number), "--secret-file", str(secret)]
        nodes.start("pass", *flags, node=f"node{number}")
    ended = nodes.finish()
    assert [code for code, _, _ in ended] == [2, 2]
    assert "secret" in ended[1][2]


def test_with_tls_nodes_meet_and_a_death_is_told(nodes: Nodes) -> None:
    paths = certificates(nodes.folder)
    flags = ["--tls-cert", paths.cert, "--tls-key", paths.key, "--tls-ca", paths.ca]
    start_two(nodes, "time.sleep(1)\nif rank == 1: sys.exit(5)\ntime.sleep(60)", *flags, static=True)
    assert [code for code, _, _ in nodes.finish()] == [5, 5]
    incident = json.loads((nodes.folder / "node0/incidents/0001.json").read_text())
    assert [culprit["node"] for culprit in incident["culprits"]] == ["node1"]


def test_with_tls_a_node_of_another_authority_stays_out(nodes: Nodes) -> None:
    port = free_port()
    meet = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    for number in (0, 1):
        folder = nodes.folder / f"certificates{number}"
        folder.mkdir()
        paths = certificates(folder)
        flags = ["--tls-cert", paths.cert, "--tls-key", paths.key, "--tls-ca", paths.ca]
        flags += ["--secret-file", str(nodes.secret), "--rdzv-conf", "join_timeout=4"]
        nodes.start("pass", *meet, *flags, "--node-rank", str(number), node=f"node{number}")
    ended = nodes.finish()
    assert [code for code, _, _ in ended] == [2, 2]
    assert "certificate" in ended[1][2].lower()
