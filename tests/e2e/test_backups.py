"""Four hosts back each other up; one is lost with its memory, and what its ranks had comes back from the others."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import testbed as beds
from tests.e2e.testbed import HOURS, Host, Testbed

from keepstep import wire

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]

PORT = 29400
WORLD = 8
PATIENCE_S = 240


@pytest.fixture
def bed() -> Iterator[Testbed]:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS, 30 * HOURS)) as made:
        yield made


def start_node(bed: Testbed, folder: Path, host: Host, rank: int, how: str) -> None:
    controller = f"{bed.hosts['node-a'].address}:{PORT}"
    words = [str(folder), host.name, str(rank), str(WORLD), controller, how]
    host.start([sys.executable, "-m", "tests.e2e.backup_node", *words], {"OMP_NUM_THREADS": "1"})


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)
    return found


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}


def backed_up(folder: Path) -> int:
    return (read(folder / "status.json").get("backups") or {}).get("step", -1)


@pytest.mark.long
def test_a_lost_nodes_ranks_get_their_state_from_the_others(bed: Testbed, tmp_path: Path) -> None:
    wire.write_secret(tmp_path / "secret")
    first = bed.hosts["node-a"]
    first.start(
        [
            *(sys.executable, "-m", "keepstep.control", "--run-dir", str(tmp_path), "--no-parent"),
            *("--listen", f"{first.address}:{PORT}", "--secret-file", str(tmp_path / "secret")),
            *("--nodes", "4", "--backups", "1", "--no-validate"),
        ]
    )
    for rank, host in enumerate(bed.hosts.values()):
        start_node(bed, tmp_path, host, rank, "train")
    step = 0

    def one_more_is_backed_up(than: int) -> bool:
        nonlocal step
        if all((tmp_path / f"saved-{rank}-{step}").exists() for rank in range(WORLD)) or not step:
            step += 1
            (tmp_path / "step").write_text(str(step))
        return backed_up(tmp_path) > than

    until(lambda: one_more_is_backed_up(2))
    lost = bed.hosts["node-b"]
    promised = backed_up(tmp_path)
    lost.shut_down()
    lost.boot()
    start_node(bed, tmp_path, lost, 1, "return")
    for rank in (2, 3):
        found = until(lambda rank=rank: read(tmp_path / f"returned-{rank}"))
        assert found["step"] >= promised
        assert found["digest"] == (tmp_path / f"saved-{rank}-{found['step']}").read_text()
        assert found["where"] in ("the backup on node-c", "the backup on node-d")
    # What was backed up on the lost node, and what its ranks save from now on, is safe again after a while.
    before = step
    until(lambda: one_more_is_backed_up(before))
    (tmp_path / "end").touch()


JOB = """
import os, sys, time
import torch
import torch.distributed as dist
import keepstep.checkpoint

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(500, 500))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
start = keepstep.checkpoint.load(state) or 0
stop = torch.zeros(1)
step = start
while not stop:
    model(torch.randn(2, 500)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    keepstep.checkpoint.save(state, step)
    stop.fill_(os.path.exists(sys.argv[1]))
    dist.all_reduce(stop)
    time.sleep(0.05)
"""


def test_keepstep_run_backs_up_what_its_workers_save(tmp_path: Path) -> None:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    script, end = tmp_path / "job.py", tmp_path / "end"
    script.write_text(JOB)
    with beds.four_hosts((0, 5 * HOURS)) as bed:
        running = {}
        for number, host in enumerate(bed.hosts.values()):
            command = [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(tmp_path / "run")),
                *("--nnodes", "2", "--node-rank", str(number), "--master-addr", "node-a"),
                *("--master-port", "29555", "--nproc-per-node", "2", "--no-validate", str(script), str(end)),
            ]
            running[host.name] = host.start(command, {"OMP_NUM_THREADS": "1"})
        first = until(lambda: max(backed_up(tmp_path / "run"), 0))
        until(lambda: backed_up(tmp_path / "run") > first + 10)
        # On a busy machine a backup may be late for a moment.
        until(lambda: not read(tmp_path / "run/status.json")["backups"]["trouble"])
        end.touch()
        results = beds.collect(running, PATIENCE_S)
    assert [one.returncode for one in results.values()] == [0, 0], results
    assert "4 snapshots of rank 0 take" in results["node-a"].stderr
    assert "was not saved" not in "".join(one.stderr for one in results.values())
    for node in (0, 1):
        assert "is backed up here after" in (tmp_path / f"run/nodes/{node}/agent.log").read_text()
