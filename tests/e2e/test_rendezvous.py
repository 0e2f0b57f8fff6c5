"""Ranks of several hosts meet: nobody's name is looked up for it, and Gloo's groups are set up in batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.e2e import testbed as beds

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(900)]

# A name server that knows nobody: writes down whom it is asked about.
NAMESERVER = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server, open(sys.argv[1], "w", 1) as asked:
    server.bind(("", 53))
    print("ready", flush=True)
    while True:
        query, peer = server.recvfrom(4096)
        at, labels = 12, []
        while size := query[at]:
            labels.append(query[at + 1 : at + 1 + size].decode())
            at += 1 + size
        print(".".join(labels), file=asked)
        server.sendto(query[:2] + b"\\x81\\x83" + query[4:6] + bytes(6) + query[12:], peer)
"""
MEET = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
half = dist.new_group([0, 3])
told = [None] * 4
dist.all_gather_object(told, dist.get_rank())
number = torch.ones(1)
if dist.get_rank() in (0, 3):
    dist.all_reduce(number, group=half)
with open(f"{sys.argv[1]}-{dist.get_rank()}", "w") as file:
    print(told, number.item(), os.environ["MASTER_ADDR"], file=file)
dist.barrier()
dist.destroy_process_group()
"""


def test_nobody_is_looked_up_when_ranks_of_two_hosts_meet(tmp_path: Path) -> None:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    asked, script, met = tmp_path / "asked", tmp_path / "meet.py", tmp_path / "met"
    script.write_text(MEET)
    with beds.four_hosts((0, 0), nameserver="10.77.0.1") as bed:
        first, _ = bed.hosts.values()
        nameserver = first.start([sys.executable, "-c", NAMESERVER, str(asked)])
        assert nameserver.stdout is not None
        assert nameserver.stdout.readline() == "ready\n"
        assert first.start(["getent", "hosts", "10.9.9.9"]).wait(60) == 2
        results = bed.run(
            lambda host: [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(tmp_path / "run")),
                *("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--no-validate"),
                *("--rdzv-endpoint", "node-a", "--local-addr", host.name, str(script), str(met)),
            ],
            env={"OMP_NUM_THREADS": "1"},
            timeout_s=800,
        )
    assert [result.returncode for result in results.values()] == [0, 0], results
    master = (tmp_path / "met-0").read_text().split()[-1]
    assert master in ("10.77.0.1", "10.77.0.2"), "an address, of whichever host was first"
    for rank in range(4):
        number = 2.0 if rank in (0, 3) else 1.0
        assert (tmp_path / f"met-{rank}").read_text() == f"[0, 1, 2, 3] {number} {master}\n"
    assert asked.read_text().splitlines() == ["9.9.9.10.in-addr.arpa"]
