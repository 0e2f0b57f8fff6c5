"""Two hosts have one name, and their launchers have the same process numbers: neither is taken for the other."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.e2e import testbed as beds

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(300)]

DIE = """
import os, time
open(f"{os.environ['KEEPSTEP_TEST_FOLDER']}/{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(1)
    if os.environ["RANK"] == "1":
        os._exit(9)
    time.sleep(60)
"""


def test_two_hosts_of_one_name_are_told_apart(tmp_path: Path) -> None:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    script = tmp_path / "job.py"
    script.write_text(DIE)
    with beds.four_hosts((0, 7200)) as bed:
        for host in bed.hosts.values():
            assert host.start(["hostname", "vm"]).wait(60) == 0
        results = bed.run(
            lambda host: [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(tmp_path / "run")),
                *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--max-restarts", "1"),
                *("--rdzv-endpoint", "10.77.0.1:29400", "--local-addr", host.address, str(script)),
            ],
            env={"KEEPSTEP_TEST_FOLDER": str(tmp_path)},
            timeout_s=200,
        )
    assert [result.returncode for result in results.values()] == [0, 0], results
    told = "".join(result.stderr for result in results.values())
    (name,) = re.findall(
        r"two nodes are named vm: the one at (?:\S+) is called (vm@10\.77\.0\.[12]) from now on", told
    )
    names = set(re.findall(r"rank [01] of 2 on (\S+): watched", told))
    assert names == {"vm", name}
    of_rank_1 = re.search(r"rank 1 of 2 on (\S+): watched", told)
    assert of_rank_1 is not None
    incident = json.loads((tmp_path / "run/incidents/0001.json").read_text())
    assert [(one["rank"], one["node"]) for one in incident["culprits"]] == [(1, of_rank_1[1])]
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert sorted(node["node"] for node in status["nodes"]) == ["vm", name]
    assert (tmp_path / "0-1").exists()
    assert (tmp_path / "1-1").exists()
