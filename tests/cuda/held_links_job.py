"""Ranks of an NCCL job test the links between them as if they were held, then train on. Each prints what it found.

held_links_job.py CASE    healthy, cut (0 → 1), slow (0 → 1), stopped (cut, and stopped meanwhile), full (no memory)
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.stand_in.device import Device

from keepstep.core.validation import RankTests, TransferEndpoint
from keepstep.validate.plan import transfers
from keepstep.validate.worker import HeldTests

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LIMIT_S = 20.0


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def main() -> None:
    case = sys.argv[1]
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl")
    x = torch.ones(8, device="cuda")
    dist.all_reduce(x)
    device = Device()
    stream = torch.cuda.current_stream().cuda_stream
    if RANK == 0 and case in ("cut", "stopped"):
        device.cut(stream, 0, 1)
    if RANK == 0 and case == "slow":
        device.slow_pair(stream, 0, 1, 100)
    torch.cuda.synchronize()
    kept = torch.empty(7 << 30, dtype=torch.uint8, device="cuda") if case == "full" and RANK == 0 else None
    before = groups()

    tests = HeldTests(RANK)
    told: list[Any] = [None] * SIZE
    for rank in range(SIZE):  # objects between ranks need operators that compute
        if rank == RANK:
            store().set(f"endpoint {rank}", json.dumps(tests.endpoint()))
    for rank in range(SIZE):
        told[rank] = TransferEndpoint(**json.loads(store().get(f"endpoint {rank}")))
    own = tuple(one for one in transfers([range(SIZE)]) if RANK in (one.source, one.target))
    order = asdict(RankTests(RANK, own, dict(enumerate(told)), LIMIT_S))
    if case == "stopped":
        threading.Timer(0.3, tests.stop).start()
    found: dict[str, Any] = {}
    threads = set(threading.enumerate())
    running = threading.Thread(target=lambda: found.update(tests.run(order)))
    running.start()
    running.join()
    tests.stop()
    del kept
    if RANK == 0 and case != "full":
        device.cut(stream, 0, 1, False)
        device.slow_pair(stream, 0, 1, 0)
    torch.cuda.synchronize()
    store().set(f"over {RANK}", "1")
    for rank in range(SIZE):
        store().wait([f"over {rank}"])
    for _ in range(3):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    time.sleep(float(os.environ.get("LINGER_S", "0")))
    found |= {
        "groups": groups() - before,
        "threads": len(set(threading.enumerate()) - threads),
        "links": found["links"],
    }
    print(f"found {json.dumps({'rank': RANK, **found})}", flush=True)
    dist.destroy_process_group()


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


if __name__ == "__main__":
    main()
