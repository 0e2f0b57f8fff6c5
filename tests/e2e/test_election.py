"""The controller's process dies, then its host: the job goes on with another host, and loses no bit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.e2e import testbed as beds
from tests.e2e.test_backups import backed_up, read
from tests.e2e.test_reforming import PATIENCE_S, STEPS, TRAIN, losses, undisturbed, until
from tests.e2e.testbed import HOURS

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(900)]
__all__ = ["undisturbed"]


def controllers(host: beds.Host) -> list[int]:
    return [pid for pid, line in host.processes().items() if "-m keepstep.control" in line]


def start(bed: beds.Testbed, folder: Path) -> dict[str, object]:
    """Two nodes that train and a spare. Step 8 waits for a file, so that what is backed up by then is known."""
    running = {}
    for number, host in enumerate(bed.hosts.values()):
        command = [
            *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run")),
            *("--nnodes", "2", "--node-rank", str(number), "--master-addr", "node-a"),
            *("--master-port", "29555", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-id", "e"),
            *("--standbys", "0", "--no-validate", str(TRAIN), str(folder), str(STEPS)),
        ]
        running[host.name] = host.start(command, {"OMP_NUM_THREADS": "1", "PAUSE_AT": "8"})
    status = folder / "run/status.json"
    until(lambda: backed_up(folder / "run") >= 6 and read(status).get("spares") == ["node-c"])
    return running


def test_the_controllers_death_then_that_of_its_host_cost_no_bit(
    tmp_path: Path, undisturbed: dict[str, set[str]]
) -> None:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS)) as bed:
        running = start(bed, tmp_path)
        first = controllers(bed.hosts["node-a"])
        os.kill(first[0], signal.SIGKILL)
        again = until(lambda: [pid for pid in controllers(bed.hosts["node-a"]) if pid not in first])
        assert not controllers(bed.hosts["node-b"])  # its host has the lease and keeps it
        status = tmp_path / "run/status.json"
        until(lambda: backed_up(tmp_path / "run") >= 6 and read(status).get("spares") == ["node-c"])
        assert again
        promised = backed_up(tmp_path / "run")
        bed.hosts["node-a"].shut_down()
        until((tmp_path / "start-0-1").exists)
        led = [name for name in ("node-b", "node-c") if controllers(bed.hosts[name])]
        (tmp_path / "go").touch()
        ended = {name: one for name, one in running.items() if name != "node-a"}
        results = beds.collect(ended, PATIENCE_S)  # type: ignore[arg-type]
    assert [one.returncode for one in results.values()] == [0, 0], results
    assert len(led) == 1
    starts = {(tmp_path / f"start-{rank}-1").read_text() for rank in range(2)}
    assert len(starts) == 1
    assert int(starts.pop()) >= promised
    assert losses(tmp_path) == undisturbed
    said = "".join(one.stderr for one in results.values())
    assert said.count("it runs here now") == 1
    assert "node node-a lost; node node-a replaced; all nodes begin again, restart 1 of 2" in said
