"""After a rank's words blame the network, agents probe each other, and the incident has what they found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.e2e import testbed as beds

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]

JOB = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(60):
    parameter.grad = torch.ones(4)
    dist.all_reduce(parameter.grad)
    optimizer.step()
    if first and step == 40 and dist.get_rank() == 1:
        raise RuntimeError("connect to 10.77.0.1<40001> failed : No route to host")
    time.sleep(0.1)
"""


def test_agents_probe_each_other_after_a_failure_of_the_network(tmp_path: Path) -> None:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    with beds.four_hosts((0, 7200)) as bed:
        results = bed.run(
            lambda host: [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(tmp_path / "run")),
                *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--max-restarts", "1"),
                *("--rdzv-endpoint", "10.77.0.1:29400", "--local-addr", host.address, str(script)),
            ],
            timeout_s=400,
        )
    assert [result.returncode for result in results.values()] == [0, 0], results
    assert not any("warm-up: " in result.stderr for result in results.values()), results
    incident = json.loads((tmp_path / "run/incidents/0001.json").read_text())
    assert incident["cause"]["cause_class"] == "network", incident
    told = [line for line in incident["evidence"] if line.startswith("probed after it: ")]
    assert told == ["probed after it: the agents of 2 nodes reach each other, in 1 pair"], incident
