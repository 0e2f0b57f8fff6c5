"""Several nodes begin again together: after a rank's death, after the loss of a host, and not for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import testbed as beds
from tests.e2e.test_backups import backed_up, read
from tests.e2e.testbed import HOURS

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("reforming"), pytest.mark.timeout(900)]

TRAIN = Path(__file__).with_name("checkpoint_train.py")
STEPS = 12
PATIENCE_S = 400


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return found


class Nodes:
    """Launchers of one job on this machine, each the only one of a node of its own name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.endpoint = f"127.0.0.1:{_free_port()}"
        self.launchers: list[subprocess.Popen[str]] = []

    def start(self, *words: str, restarts: int = 1, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        number = len(self.launchers)
        command = [
            *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(self.folder / "run")),
            *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(restarts), "--standbys", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint),
            *("--rdzv-conf", f"is_host={int(number == 0)}", "--no-validate", *flags, *words),
        ]
        out = (self.folder / f"said-{number}").open("w")
        with out:
            launcher = subprocess.Popen(
                command,
                env={**os.environ, "KEEPSTEP_NODE_NAME": f"node-{number}", "OMP_NUM_THREADS": "1"},
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.launchers.append(launcher)
        return launcher

    def said(self) -> str:
        return "".join((self.folder / f"said-{n}").read_text() for n in range(len(self.launchers)))

    def codes(self) -> list[int]:
        return [launcher.wait(PATIENCE_S) for launcher in self.launchers]

    def end(self) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()  # its guard ends what it started
                launcher.wait()


def _free_port() -> int:
    from keepstep.launch.command.addresses import free_port

    return free_port("127.0.0.1")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "job")
    yield made
    made.end()


def losses(folder: Path) -> dict[str, set[str]]:
    """The losses that each rank and step gave, over all times that it was made."""
    found: dict[str, set[str]] = {}
    for rank in range(2):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            found.setdefault(f"{rank}/{step}", set()).add(loss)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    made = Nodes(tmp_path_factory.mktemp("jobs") / "undisturbed")
    try:
        for _ in range(2):
            made.start(str(TRAIN), str(made.folder), str(STEPS))
        assert made.codes() == [0, 0], made.said()
        return losses(made.folder)
    finally:
        made.end()


def test_two_nodes_begin_again_and_lose_no_bit(nodes: Nodes, undisturbed: dict[str, set[str]]) -> None:
    for _ in range(2):
        nodes.start(str(TRAIN), str(nodes.folder), str(STEPS), "1", "6", "backward")
    assert nodes.codes() == [0, 0], nodes.said()
    starts = {(nodes.folder / f"start-{rank}-1").read_text() for rank in range(2)}
    assert starts <= {"5", "6"}
    assert len(starts) == 1
    assert losses(nodes.folder) == undisturbed
    assert nodes.said().count("all nodes begin again, restart 1 of 1") == 1


def test_two_nodes_are_suspended_and_resumed_by_hand(
    nodes: Nodes, undisturbed: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAUSE_AT", "8")
    for _ in range(2):
        nodes.start(str(TRAIN), str(nodes.folder), str(STEPS))
    logs = [nodes.folder / f"losses-{rank}" for rank in range(2)]
    until(lambda: all(log.exists() and len(log.read_text().splitlines()) >= 7 for log in logs))
    assert ctl(nodes, "suspend", "--now").startswith(f"{nodes.folder / 'run'}: suspended: ")
    (nodes.folder / "go").touch()
    assert "begins again, incarnation 1" in ctl(nodes, "resume")
    assert nodes.codes() == [0, 0], nodes.said()
    assert losses(nodes.folder) == undisturbed
    assert nodes.said().count("an operator ordered it; all nodes begin again\n") == 1


def ctl(nodes: Nodes, *words: str) -> str:
    command = [sys.executable, "-m", "keepstep.cli", "ctl", str(nodes.folder / "run"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr + nodes.said()
    return done.stdout


DIE = """
import os, signal, time
if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.parametrize("watch", [(), ("--no-watch",)])
def test_too_many_deaths_end_all_nodes(nodes: Nodes, watch: tuple[str, ...]) -> None:
    script = nodes.folder / "die.py"
    script.write_text(DIE)
    for _ in range(2):
        nodes.start(str(script), restarts=2, flags=watch)
    assert nodes.codes() == [137, 137], nodes.said()
    assert nodes.said().count("all nodes begin again") == 2


MEET = """
import os, sys, time
name = os.environ["KEEPSTEP_NODE_NAME"]
path = os.path.join(sys.argv[1], f"at-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
open(path + ".draft", "w").write(name)
os.rename(path + ".draft", path)
while not os.path.exists(os.path.join(sys.argv[1], "end")): time.sleep(0.05)
"""


def test_a_spare_takes_the_place_of_a_killed_launcher(nodes: Nodes) -> None:
    script = nodes.folder / "meet.py"
    script.write_text(MEET)
    for _ in range(2):
        nodes.start(str(script), str(nodes.folder))
    until(lambda: all((nodes.folder / f"at-{rank}-0").exists() for rank in range(2)))
    first, second = nodes.start(str(script), str(nodes.folder)), nodes.start(str(script), str(nodes.folder))
    until(lambda: len(read(nodes.folder / "run/status.json").get("spares", ())) == 2)
    second.send_signal(signal.SIGINT)
    assert second.wait(PATIENCE_S) == 130  # and nobody else ends for that
    nodes.launchers[1].kill()  # not the one that hosts the controller
    until(lambda: all((nodes.folder / f"at-{rank}-1").exists() for rank in range(2)))
    assert {(nodes.folder / f"at-{rank}-1").read_text() for rank in range(2)} == {"node-0", "node-2"}
    status = nodes.folder / "run/status.json"
    until(lambda: {node["node"] for node in read(status)["nodes"]} == {"node-0", "node-2"})
    (nodes.folder / "end").touch()
    assert [nodes.launchers[0].wait(PATIENCE_S), first.wait(PATIENCE_S)] == [0, 0], nodes.said()


HOW = """
import os, sys, time
import torch
torch.distributed.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, requires_grad=True))], lr=0.1)
optimizer.step()
path = os.path.join(sys.argv[1], f"how-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
with open("/proc/self/cmdline") as how, open("/proc/self/maps") as maps, open(path + ".draft", "w") as out:
    out.write(how.read() + maps.read())
os.rename(path + ".draft", path)
while not os.path.exists(os.path.join(sys.argv[1], "end")): time.sleep(0.05)
"""


@pytest.mark.usefixtures("cold")  # what is preloaded is asked for
def test_a_spare_keeps_standbys_warm_that_become_its_workers(nodes: Nodes) -> None:
    script = nodes.folder / "how.py"
    script.write_text(HOW)
    flags = ("--standbys", "1", "--verbose")
    for _ in range(3):
        nodes.start(str(script), str(nodes.folder), flags=flags)
    until(lambda: "standbys are warm for local ranks 0\n" in nodes.said())
    spare = until(lambda: read(nodes.folder / "run/status.json").get("spares"))[0]
    nodes.launchers[1 if spare != "node-1" else 2].kill()
    until(lambda: all((nodes.folder / f"how-{rank}-1").exists() for rank in range(2)))
    (nodes.folder / "end").touch()
    assert nodes.launchers[0].wait(PATIENCE_S) == 0, nodes.said()
    how = (nodes.folder / "how-1-1").read_text()
    assert "standby.py" in how
    assert "libkeepstep_nccl.so" in how  # preloaded when the standby began: a worker cannot load it later


def test_a_spare_that_is_not_needed_ends_with_the_job(nodes: Nodes) -> None:
    script = nodes.folder / "meet.py"
    script.write_text(MEET)
    for _ in range(2):
        nodes.start(str(script), str(nodes.folder))
    until(lambda: all((nodes.folder / f"at-{rank}-0").exists() for rank in range(2)))
    nodes.start(str(script), str(nodes.folder))
    until(lambda: read(nodes.folder / "run/status.json").get("spares") == ["node-2"])
    (nodes.folder / "end").touch()
    assert nodes.codes() == [0, 0, 0], nodes.said()


@pytest.mark.root
def test_a_lost_hosts_ranks_go_on_elsewhere_from_the_backup(
    tmp_path: Path, undisturbed: dict[str, set[str]]
) -> None:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS)) as bed:
        running = {}
        for number, host in enumerate(bed.hosts.values()):
            command = [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(tmp_path / "run")),
                *("--nnodes", "2", "--node-rank", str(number), "--master-addr", "node-a"),
                *("--master-port", "29555", "--nproc-per-node", "1", "--max-restarts", "2"),
                *("--standbys", "0", "--no-validate", str(TRAIN), str(tmp_path), str(STEPS)),
            ]
            environment = {"OMP_NUM_THREADS": "1", "PAUSE_AT": "8"}
            running[host.name] = host.start(command, environment)
        # Step 8 waits for a file, so that what is backed up by then is known.
        status = tmp_path / "run/status.json"
        until(lambda: backed_up(tmp_path / "run") >= 6 and read(status).get("spares") == ["node-c"])
        promised = backed_up(tmp_path / "run")
        bed.hosts["node-b"].shut_down()
        until((tmp_path / "start-1-1").exists)
        (tmp_path / "go").touch()
        ended = {name: one for name, one in running.items() if name != "node-b"}
        results = beds.collect(ended, PATIENCE_S)
    assert [one.returncode for one in results.values()] == [0, 0], results
    starts = {(tmp_path / f"start-{rank}-1").read_text() for rank in range(2)}
    assert len(starts) == 1
    assert int(starts.pop()) >= promised
    assert losses(tmp_path) == undisturbed
    assert "node node-b lost; node node-b replaced" in results["node-a"].stderr
