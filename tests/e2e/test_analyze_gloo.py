"""The flight recorder of a real Gloo job in which one rank stays away from a collective, judged from its dumps."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.analyze import analyze
from keepstep.core.layout import ParallelLayout

pytestmark = pytest.mark.e2e

JOB = """
import os, sys, threading, time
import torch
import torch.distributed as dist
import torch._C._distributed_c10d as recorder

rank, folder = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
values = torch.ones(100)
for _ in range(3):
    dist.all_reduce(values)
    dist.all_reduce(values, group=pair)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(values, 1 - rank)

def go_on():
    dist.all_gather([torch.empty(100) for _ in range(4)], values)

if rank != 2:
    threading.Thread(target=go_on, daemon=True).start()
time.sleep(1)
for name, data in (("json", recorder._dump_fr_trace_json(True, False)), ("pickle", recorder._dump_fr_trace())):
    with open(f"{folder}/{name}/rank_{rank}", "wb") as file:
        file.write(data)
open(f"{folder}/done_{rank}", "w").close()
while len([name for name in os.listdir(folder) if name.startswith("done_")]) < 4:
    time.sleep(0.05)
os._exit(0)
"""


def test_the_rank_that_stays_away_is_named(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("json", "pickle"):
        (tmp_path / name).mkdir()
    script = tmp_path / "job.py"
    script.write_text(JOB)
    env = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job = [
        subprocess.Popen([sys.executable, str(script), str(tmp_path)], env={**env, "RANK": str(rank)})
        for rank in range(4)
    ]
    try:
        assert [process.wait(120) for process in job] == [0] * 4
    finally:
        for process in job:
            process.kill()
            process.wait()
    for name in ("json", "pickle"):
        found = analyze(tmp_path / name, ParallelLayout.declared("tp2-dp2"))
        (incident,) = found.incidents
        assert (incident.kind, [culprit.rank for culprit in incident.culprits]) == ("hang", [2])
        assert incident.victims == (0, 1, 3)
        assert "ALLGATHER" in incident.summary
