"""A host is lost and no spare is there: the job goes on with fewer nodes, and with more again when it returns."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e import testbed as beds
from tests.e2e.test_backups import read
from tests.e2e.test_reforming import Nodes, until
from tests.e2e.testbed import HOURS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

TRAIN = Path(__file__).with_name("elastic_train.py")
STEPS = 100
LOSE_AT = 8
PATIENCE_S = 600


def losses(folder: Path, count: int) -> dict[tuple[int, int], set[float]]:
    """What each step and micro-batch gave, over all times that it was computed."""
    found: dict[tuple[int, int], set[float]] = {}
    for number in range(count):
        for line in (folder / f"losses-{number}").read_text().splitlines():
            step, loss, _ = line.split()
            found.setdefault((int(step), number), set()).add(float.fromhex(loss))
    return found


def undisturbed(folder: Path, count: int) -> dict[tuple[int, int], set[float]]:
    """The same training in one process, which nobody runs or watches."""
    folder.mkdir()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, str(TRAIN), str(folder), str(STEPS), str(count)]
    environment = {**os.environ, **alone, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=PATIENCE_S, capture_output=True)
    return losses(folder, count)


@pytest.mark.root
@pytest.mark.parametrize(("size", "count"), [(2, 2), pytest.param(3, 6, marks=pytest.mark.long)])
def test_a_lost_host_is_done_without_and_taken_in_when_it_returns(
    tmp_path: Path, size: int, count: int
) -> None:
    if reason := beds.missing():
        pytest.skip(reason)
    expected = undisturbed(tmp_path / "undisturbed", count)
    status = tmp_path / "run/status.json"
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS)[:size]) as bed:
        names = list(bed.hosts)

        def start(name: str) -> subprocess.Popen[str]:
            command = [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(tmp_path / "run")),
                *("--mitigate", "off"),  # losses are compared bit by bit
                *("--nnodes", f"{size - 1}:{size}", "--node-rank", str(names.index(name))),
                *("--master-addr", "node-a", "--master-port", "29555", "--nproc-per-node", "1"),
                *("--max-restarts", "2", "--shrink-after", "1", "--standbys", "0", "--no-validate"),
                *(str(TRAIN), str(tmp_path), str(STEPS), str(count)),
            ]
            environment = {"OMP_NUM_THREADS": "1", "LOSE_AT": str(LOSE_AT), "SLOWLY": "0.05"}
            return bed.hosts[name].start(command, environment)

        running = {name: start(name) for name in names}
        logs = [tmp_path / f"losses-{number}" for number in range(count)]
        until(lambda: all(log.exists() and len(log.read_text().splitlines()) == LOSE_AT for log in logs))
        bed.hosts["node-b"].shut_down()  # of three the middle one: others get other ranks
        until(lambda: all((tmp_path / f"start-1-{rank}").exists() for rank in range(size - 1)))
        until(lambda: read(status).get("state") == "running" and read(status)["incarnation"] == 1)
        small = read(status)
        bed.hosts["node-b"].boot()
        running["node-b"] = start("node-b")
        results = beds.collect(running, PATIENCE_S)
    assert [one.returncode for one in results.values()] == [0] * size, results
    assert ([node["node"] for node in small["nodes"]], small["most_nodes"]) == (
        [name for name in names if name != "node-b"],
        size,
    )
    shrunk = {(tmp_path / f"start-1-{rank}").read_text() for rank in range(size - 1)}
    assert shrunk <= {f"{LOSE_AT - 1} of {size - 1}", f"{LOSE_AT - 2} of {size - 1}"}  # sealed and compared
    assert len(shrunk) == 1
    grown = {(tmp_path / f"start-2-{rank}").read_text() for rank in range(size)}
    assert len(grown) == 1
    assert grown.pop().endswith(f" of {size}")
    said = results["node-a"].stderr
    assert f"fewer nodes, {size - 1} after {size}; all nodes begin again, restart 1 of 2" in said
    assert f"node-b can be taken in; more nodes, {size} after {size - 1}; all nodes begin again\n" in said
    found = losses(tmp_path, count)
    if (size, count) == (2, 2):
        assert found == expected  # every bit: sums of two have one order, and halves are exact
    assert found.keys() == expected.keys()
    for key, (right,) in expected.items():
        assert all(math.isclose(one, right, rel_tol=1e-4) for one in found[key]), (key, right, found[key])


@pytest.mark.long
def test_what_differs_between_ranks_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSE_AT", str(LOSE_AT))
    monkeypatch.setenv("STRANGE", "1")
    monkeypatch.setenv("KEEPSTEP_JOIN_TIMEOUT_S", "90")
    nodes = Nodes(tmp_path / "job")
    try:
        for _ in range(2):
            flags = ("--nnodes", "1:2", "--shrink-after", "0")
            nodes.start(str(TRAIN), str(nodes.folder), str(STEPS), "2", restarts=2, flags=flags)
        logs = [nodes.folder / f"losses-{number}" for number in range(2)]
        until(lambda: all(log.exists() and len(log.read_text().splitlines()) == LOSE_AT for log in logs))
        nodes.launchers[1].kill()
        assert nodes.launchers[0].wait(PATIENCE_S) == 1, nodes.said()
    finally:
        nodes.end()
    why = r"what rank [01] saves is not known to be the same on all ranks \(docs/howto/session\.md\)"  # who is left
    assert re.search(f"it does not go on with fewer nodes: {why}", nodes.said())
    assert not (nodes.folder / "start-1-0").exists()
