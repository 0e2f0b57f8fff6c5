"""Two nodes of a running job exchange their ranks: each goes on with what the other held, with the very losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import testbed as beds
from tests.e2e.test_backups import read, until
from tests.e2e.testbed import HOURS

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(900)]

TRAIN = Path(__file__).with_name("standby_train.py")
IN_PLACE = str(Path(__file__).with_name("in_place_train.py"))
STEPS = 1000  # More than are made, at 0.1 s each, before all is seen and the job is told to hurry.
PATIENCE_S = 300
NODES = 3


def losses(folder: Path) -> dict[str, set[str]]:
    """The losses that each rank and step gave, over all times that it was made."""
    found: dict[str, set[str]] = {}
    for rank in range(NODES):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss, *_ = line.split()
            found.setdefault(f"{rank}/{step}", set()).add(loss)
    return found


def ctl(host: beds.Host, run: Path, *words: str) -> str:
    process = host.start([sys.executable, "-m", "keepstep.cli", "ctl", str(run), *words], {})
    out, err = process.communicate(timeout=PATIENCE_S)
    return f"{process.returncode} {out}{err}"


def running_nodes(run: Path, incarnation: int) -> list[str]:
    """Wait until that incarnation runs, or a later one; its nodes by node rank, read in the same look.

    It is a later one where Gloo lost a connection while it formed its groups, which costs a restart.
    """

    def status() -> dict[str, Any] | None:
        found = read(run / "status.json")
        state = found.get("state")
        assert state not in ("done", "failed"), f"the job ended before it was seen to run: {found}"
        return found if state == "running" and found["incarnation"] >= incarnation else None

    return [node["node"] for node in until(status)["nodes"]]


def hurry(folder: Path) -> None:
    """Let the job's steps take no time of their own from now on."""
    (folder / "hurry").touch()


def start(
    host: beds.Host, number: int, folder: Path, *flags: str, train: tuple[str, ...] = (str(TRAIN),)
) -> subprocess.Popen[str]:
    script, *kind = train
    command = [
        *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run")),
        *("--nnodes", str(NODES), "--node-rank", str(number), "--master-addr", "node-a"),
        *("--master-port", "29555", "--nproc-per-node", "1", "--standbys", "0", "--no-validate"),
        *(*flags, script, str(folder), *kind, str(STEPS), ""),
    ]
    return host.start(command, {"OMP_NUM_THREADS": "1", "STEP_S": "0.1"})


def test_two_nodes_exchange_their_ranks_and_back(tmp_path: Path) -> None:
    if reason := beds.missing():
        pytest.skip(reason)
    run = tmp_path / "run"
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS)[:NODES]) as bed:
        hosts = list(bed.hosts.values())
        running = {
            host.name: start(host, number, tmp_path, "--max-restarts", "2")
            for number, host in enumerate(hosts)
        }
        log = tmp_path / "losses-1"
        until(lambda: log.exists() and len(log.read_text().splitlines()) > 8)
        assert ctl(hosts[0], run, "exchange", "node-a", "node-x").startswith("2 "), "it has no node-x"
        assert ctl(hosts[0], run, "exchange", "node-a", "node-b", "--now").startswith("2 ")
        assert "no spare waits to take the place of node-b" in ctl(hosts[0], run, "drain", "node-b")
        would = ctl(hosts[0], run, "exchange", "node-a", "node-c", "--dry-run")
        assert "node-a and node-c would exchange their ranks" in would, would
        places: list[list[str]] = []
        for incarnation in (1, 2):
            told = ctl(hosts[0], run, "exchange", "node-a", "node-c")
            assert told.startswith("0 "), told
            places.append(running_nodes(run, incarnation))
        hurry(tmp_path)
        results = beds.collect(running, PATIENCE_S)
    assert [one.returncode for one in results.values()] == [0] * NODES, results
    assert places == [["node-c", "node-b", "node-a"], ["node-a", "node-b", "node-c"]]
    said = results["node-a"].stderr
    assert said.count("nodes node-a,node-c exchanged their ranks; all nodes begin again\n") == 2, said
    found = losses(tmp_path)
    assert len(found) == NODES * STEPS
    assert {len(one) for one in found.values()} == {1}


@pytest.mark.long
def test_the_processes_stay_where_they_are_and_play_each_others_ranks(tmp_path: Path) -> None:
    if reason := beds.missing():
        pytest.skip(reason)
    run = tmp_path / "run"

    def trainers(host: beds.Host) -> set[int]:
        return {pid for pid, line in host.processes().items() if f" -u {IN_PLACE} " in line}

    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS)[:NODES]) as bed:
        hosts = list(bed.hosts.values())
        flags, train = ("--max-restarts", "1", "--in-place"), (IN_PLACE, "ddp")
        running = {
            host.name: start(host, number, tmp_path, *flags, train=train) for number, host in enumerate(hosts)
        }
        log = tmp_path / "losses-1"
        until(lambda: log.exists() and len(log.read_text().splitlines()) > 8)
        before = [trainers(host) for host in hosts]
        assert ctl(hosts[0], run, "exchange", "node-a", "node-c").startswith("0 ")
        places = running_nodes(run, 1)
        after = [trainers(host) for host in hosts]
        hurry(tmp_path)
        results = beds.collect(running, PATIENCE_S)
    assert [one.returncode for one in results.values()] == [0] * NODES, results
    assert places == ["node-c", "node-b", "node-a"]
    assert before == after, "nobody is replaced"
    assert all(len(pids) == 1 for pids in before)
    found = losses(tmp_path)
    assert len(found) == NODES * STEPS
    assert {len(one) for one in found.values()} == {1}


@pytest.mark.long
@pytest.mark.usefixtures("cold")
def test_a_host_that_is_lost_before_its_new_ranks_have_their_states_costs_none(tmp_path: Path) -> None:
    if reason := beds.missing():
        pytest.skip(reason)
    run = tmp_path / "run"
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS, 2 * HOURS)) as bed:
        hosts = list(bed.hosts.values())
        running = {
            host.name: start(host, number, tmp_path, "--max-restarts", "1")
            for number, host in enumerate(hosts)  # the last one is a spare
        }
        until(lambda: (read(run / "status.json").get("backups") or {}).get("step", -1) >= 8)
        told = ctl(hosts[0], run, "exchange", "node-b", "node-c")
        assert told.startswith("0 "), told
        hosts[2].shut_down()
        del running["node-c"]
        hurry(tmp_path)
        results = beds.collect(running, PATIENCE_S)
        places = [node["node"] for node in read(run / "status.json")["nodes"]]
    assert [one.returncode for one in results.values()] == [0] * NODES, results
    assert places == ["node-a", "node-d", "node-b"]
    said = results["node-a"].stderr
    assert "nodes node-b,node-c exchanged their ranks; all nodes begin again\n" in said, said
    assert "node node-c lost; node node-c replaced; all nodes begin again, restart 1 of 1\n" in said, said
    found = losses(tmp_path)
    assert len(found) == NODES * STEPS
    assert {len(one) for one in found.values()} == {1}
