"""Many nodes, few descriptors, and a neighbour that holds connections open without a word."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_run_watched import free_port

from keepstep import wire
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.node.programs import controller_command

pytestmark = [pytest.mark.e2e, pytest.mark.quiet, pytest.mark.timeout(120), pytest.mark.usefixtures("cold")]

NODES = 600
SILENT = 1500
SOFT, HARD = 1024, 2048  # 1,200 connections of nodes and 1,500 silent ones do not fit into either
# Opens connections and never says anything. What the other end closes is opened again, until the input ends.
SILENCE = """
import resource, select, socket, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
kept = {}
closed = select.poll()
closed.register(sys.stdin, select.POLLIN)
def begin():
    one = socket.create_connection((host, port))
    kept[one.fileno()] = one
    closed.register(one, select.POLLIN)
for _ in range(count):
    begin()
print(len(kept), flush=True)
while True:
    for descriptor, _ in closed.poll():
        if descriptor == sys.stdin.fileno():
            sys.exit()
        closed.unregister(descriptor)
        kept.pop(descriptor).close()
        begin()
"""


def limited(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Programs:
    """Those of one test; none outlives it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
        self._stack.enter_context(process)  # closes its streams, waits for its end
        self._stack.callback(process.kill)
        return process


@pytest.fixture
def programs() -> Iterator[Programs]:
    with ExitStack() as stack:
        yield Programs(stack)


def line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def silence(programs: Programs, port: int) -> int:
    return line(programs.start([sys.executable, "-c", SILENCE, "127.0.0.1", str(port), str(SILENT)]))


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * SILENT, reason="few descriptors here")
def test_600_nodes_beside_1500_silent_connections_of_another_program(
    programs: Programs, tmp_path: Path
) -> None:
    wire.write_secret(tmp_path / "secret")
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:1", "--rdzv-id", "many"]
    job = job_from_command_line(["--nnodes", str(NODES), *meet, "train.py"], {})
    command = controller_command(job, tmp_path, tmp_path / "secret", Endpoint("127.0.0.1", 0))
    controller = programs.start(command, preexec_fn=limited(SOFT, HARD))
    port = line(controller)["port"]
    assert silence(programs, port) == SILENT
    words = [f"127.0.0.1:{port}", str(tmp_path / "secret"), "many", str(NODES)]
    nodes = programs.start([sys.executable, str(Path(__file__).with_name("stand_in_nodes.py")), *words])
    joined = line(nodes)
    print(f"{NODES} nodes joined in {joined['seconds']:.1f} s")
    assert silence(programs, port) == SILENT  # once more, when the job runs
    time.sleep(2.5)
    assert nodes.stdin is not None
    nodes.stdin.close()
    told = line(nodes)
    assert told["connected"] == joined["connected"] == 2 * NODES
    assert told["again"] == joined["again"]  # none that was there was closed
    status = json.loads((tmp_path / "status.json").read_text())
    assert [(one["agent"], one["launcher"]) for one in status["nodes"]] == [("ok", "ok")] * NODES
    assert all(one["heard_s_ago"] < 3 for one in status["nodes"])
    assert status["counters"]["refused_crowded-out"] > 0
    assert controller.poll() is None


def launch(folder: Path, script: str, *flags: str, limits: tuple[int, int]) -> tuple[int, str, str]:
    (folder / "job.py").write_text(script)
    command = [sys.executable, "-m", "keepstep.cli", "run", "-q", "--run-dir", str(folder / "run"), *flags]
    done = subprocess.run(
        [*command, str(folder / "job.py")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limited(*limits),
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_launcher_has_all_descriptors_and_its_workers_those_that_it_was_given(tmp_path: Path) -> None:
    script = (
        "import os, resource\n"
        "for process in (os.getpid(), os.getppid()):\n"
        "    print(*resource.prlimit(process, resource.RLIMIT_NOFILE))\n"
    )
    assert launch(tmp_path, script, limits=(256, 1000)) == (0, "256 1000\n1000 1000\n", "")


def test_a_job_of_more_nodes_than_descriptors_does_not_start(tmp_path: Path) -> None:
    wire.write_secret(tmp_path / "secret")
    meet = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-conf",
        "is_host=1",
    ]
    flags = ["--nnodes", "2000", *meet, "--secret-file", str(tmp_path / "secret")]
    assert launch(tmp_path, "print('ran')", *flags, limits=(256, 1024)) == (
        2,
        "",
        "keepstep: 2,000 nodes need 4,064 descriptors; the hard limit of this process is 1,024: "
        "raise it with ulimit -Hn or LimitNOFILE=\n",
    )
