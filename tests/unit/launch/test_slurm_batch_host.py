"""What the launcher that ends a job orders where the batch host was lost, with a stand-in for Slurm's programs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from keepstep.launch.slurm_batch_host import REQUEUES, end_without_batch_host

PROGRAM = """#!/bin/sh
echo "${{0##*/}} $*" >> {folder}/orders
case "$2" in
  job) echo "JobId=7 JobState={state} Restarts={restarts} BatchFlag={batch} ReqNodeList=(null) NodeList={nodes}";;
  node) echo "NodeAddr=127.0.0.1 Port={port}";;
esac
"""


@pytest.mark.parametrize(
    ("state", "restarts", "nodes", "node", "code", "requeues", "batch", "ordered"),
    [
        ("RUNNING", 0, "n[1-2]", "n1", 0, "1", 1, ["scancel 7"]),
        ("RUNNING", 0, "n[1-2]", "n1", 75, "1", 1, ["scontrol requeue 7"]),
        ("RUNNING", 0, "n[1-2]", "n1", 75, "", 1, ["scancel 7"]),
        ("RUNNING", 1, "n[1-2]", "n1", 75, "1", 1, []),  # Slurm has begun it again
        ("COMPLETING", 0, "n[1-2]", "n1", 75, "1", 1, []),
        ("RUNNING", 0, "n[0-2]", "n1", 75, "1", 1, []),  # the batch host answers
        ("RUNNING", 0, "n[1-2]", "n0", 75, "1", 1, []),
        ("RUNNING", 0, "n[1-2]", "n1", 0, "1", 0, []),  # salloc: no batch script was lost
        ("RUNNING", 0, "n[1-", "n1", 0, "1", 1, []),
    ],
)
def test_the_job_is_ended_or_begun_again_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    restarts: int,
    nodes: str,
    node: str,
    code: int,
    requeues: str,
    batch: int,
    ordered: list[str],
) -> None:
    async def end() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for name in ("scontrol", "scancel"):
            told = {"state": state, "restarts": restarts, "nodes": nodes, "batch": batch}
            text = PROGRAM.format(folder=tmp_path, port=port, **told)
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        environ = {
            "SLURM_JOB_ID": "7",
            "KEEPSTEP_SLURM_NODES": "n[0-2]",
            "SLURMD_NODENAME": node,
            REQUEUES: requeues,
        }
        await end_without_batch_host(environ, code, lambda _: None)
        server.close()
        await server.wait_closed()

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    asyncio.run(end())
    orders = tmp_path / "orders"
    given = orders.read_text().splitlines() if orders.exists() else []
    assert [one for one in given if " show " not in one] == ordered
