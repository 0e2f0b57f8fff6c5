"""Three hosts in network namespaces, a rank each, in an all-reduce: a cut path and a hang in software look alike.

Until the agents probe each other: then the cut path is named, or the rank behind a sound path that does not read.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import testbed as beds
from tests.e2e.testbed import HOURS, Host, Testbed

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]

JOB = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
while True:
    model(torch.randn(2, 1000)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.05)
"""
SMALL = (
    JOB.replace("1000", "3")
    .replace("dist.all", "for _ in range(20): dist.all")
    .replace("time.sleep(0.05)", "")
)
STEPS = 30
PATIENCE_S = 240
_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207


@pytest.fixture
def bed() -> Iterator[Testbed]:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS)) as made:
        yield made


def start(bed: Testbed, folder: Path, job: str = JOB) -> None:
    script = folder / "job.py"
    script.write_text(job)
    for number, host in enumerate(bed.hosts.values()):
        where = [
            "--nnodes",
            "3",
            "--node-rank",
            str(number),
            "--master-addr",
            "node-a",
            "--master-port",
            "29555",
        ]
        command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), *where]
        process = host.start([*command, "--nproc-per-node", "1", str(script)])
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)  # little is printed: nobody needs to read it meanwhile


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


def sure(folder: Path, cause: str = "") -> dict[str, Any]:
    """The run's hang, once somebody is blamed for sure, or for this cause. Before it the machine may have been slow.

    A process is not blamed for sure before nothing of it has moved for minutes.
    """
    for path in sorted((folder / "run/incidents").glob("*.json")):
        incident = read(path)
        blamed = incident.get("culprits") or []
        if incident.get("kind") == "hang" and any(
            one["cause"] == cause if cause else one["confidence"] == "high" for one in blamed
        ):
            return incident
    return {}


def trained(folder: Path) -> bool:
    return read(folder / "run/status.json").get("newest_step", -1) >= STEPS


@contextmanager
def frozen_transport(host: Host) -> Iterator[None]:
    """Gloo's thread that moves the bytes stands still, as in a deadlock of a library: no signal, no stopped process."""
    libc = ctypes.CDLL(None, use_errno=True)
    gloo: list[int] = []
    for pid in host.processes():
        for task in Path(f"/proc/{pid}/task").glob("*/comm"):
            with suppress(OSError):  # it ended since it was listed
                if task.read_text().startswith("gloo_tcp_loop"):
                    gloo.append(int(task.parent.name))
    assert gloo
    for thread in gloo:
        for request in (_PTRACE_SEIZE, _PTRACE_INTERRUPT):
            if libc.ptrace(request, thread, None, None):
                pytest.skip(f"threads cannot be stopped here: {os.strerror(ctypes.get_errno())}")
    yield  # they go on when this process ends, or end with their own


@pytest.mark.parametrize(
    "job", [pytest.param(JOB, id="large", marks=pytest.mark.long), pytest.param(SMALL, id="small")]
)
def test_a_cut_path_is_named(bed: Testbed, tmp_path: Path, job: str) -> None:
    """In small operations back to back some ranks are often through that in which the last ones wait."""
    start(bed, tmp_path, job)
    until(lambda: trained(tmp_path))
    with bed.cut("node-b", "node-c"):
        incident = until(lambda: sure(tmp_path))
    culprit, *others = incident["culprits"]
    assert not others, incident
    assert set(culprit["link"]["nodes"]) == {"node-b", "node-c"}
    assert culprit["cause"] == "path broken"
    assert any("probe node-b to node-c: no answer" in line for line in incident["evidence"])
    assert any("came back" in line for line in incident["evidence"])


def test_a_hang_in_software_behind_a_sound_path_is_named(bed: Testbed, tmp_path: Path) -> None:
    start(bed, tmp_path)
    until(lambda: trained(tmp_path))
    with frozen_transport(bed.hosts["node-c"]):

        def probed() -> dict[str, Any]:
            incident = sure(tmp_path, "does not read")
            return incident if any("paths are sound" in line for line in incident.get("evidence", ())) else {}

        incident = until(probed)
        culprit, *others = incident["culprits"]
        assert not others, incident
        assert (culprit["rank"], culprit["node"], culprit["cause"]) == (2, "node-c", "does not read")
