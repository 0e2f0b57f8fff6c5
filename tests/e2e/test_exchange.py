"""Two nodes of a running job exchange their ranks: each goes on with what the other held, with the very losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e import testbed as beds
from tests.e2e.test_backups import read, until
from tests.e2e.testbed import HOURS

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(900)]

TRAIN = Path(__file__).with_name("standby_train.py")
STEPS = 100
PATIENCE_S = 300
NODES = 3


def losses(folder: Path) -> dict[str, set[str]]:
    """The losses that each rank and step gave, over all times that it was made."""
    found: dict[str, set[str]] = {}
    for rank in range(NODES):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            found.setdefault(f"{rank}/{step}", set()).add(loss)
    return found


def test_two_nodes_exchange_their_ranks_and_back(tmp_path: Path) -> None:
    if reason := beds.missing():
        pytest.skip(reason)
    run = tmp_path / "run"
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS)[:NODES]) as bed:
        hosts = list(bed.hosts.values())

        def ctl(*words: str) -> str:
            command = [sys.executable, "-m", "keepstep.cli", "ctl", str(run), *words]
            process = hosts[0].start(command, {})
            out, err = process.communicate(timeout=PATIENCE_S)
            return f"{process.returncode} {out}{err}"

        def start(number: int) -> subprocess.Popen[str]:
            command = [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(run)),
                *("--nnodes", str(NODES), "--node-rank", str(number), "--master-addr", "node-a"),
                *("--master-port", "29555", "--nproc-per-node", "1", "--max-restarts", "1"),
                *("--standbys", "0", "--no-validate", str(TRAIN), str(tmp_path), str(STEPS), ""),
            ]
            return hosts[number].start(command, {"OMP_NUM_THREADS": "1", "STEP_S": "0.1"})

        running = {host.name: start(number) for number, host in enumerate(hosts)}
        log = tmp_path / "losses-1"
        until(lambda: log.exists() and len(log.read_text().splitlines()) > 8)
        assert ctl("exchange", "node-a", "node-x").startswith("2 "), "it has no node-x"
        places: list[list[str]] = []
        for incarnation in (1, 2):
            told = ctl("exchange", "node-a", "node-c")
            assert told.startswith("0 "), told
            until(lambda number=incarnation: read(run / "status.json").get("incarnation") == number)
            until(lambda: read(run / "status.json").get("state") == "running")
            places.append([node["node"] for node in read(run / "status.json")["nodes"]])
        results = beds.collect(running, PATIENCE_S)
    assert [one.returncode for one in results.values()] == [0] * NODES, results
    assert places == [["node-c", "node-b", "node-a"], ["node-a", "node-b", "node-c"]]
    said = results["node-a"].stderr
    assert said.count("nodes node-a,node-c exchanged their ranks; all nodes begin again\n") == 2, said
    found = losses(tmp_path)
    assert len(found) == NODES * STEPS
    assert {len(one) for one in found.values()} == {1}
