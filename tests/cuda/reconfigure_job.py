"""A rank of an nccl2 group dies; the others go on without it, in the same group object, and then with a new process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

RANK, SIZE, IS_NEW = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "NEW" in os.environ


def reduced() -> int:
    x = torch.tensor([1.0]).cuda()
    dist.all_reduce(x)
    return int(x.item())


def reconfigure(store: dist.Store, number: int, ranks: range) -> None:
    c10d: Any = dist.distributed_c10d  # of torch 2.14, while types are checked against an older one
    store.set(f"handle-{number}-{RANK}", c10d._get_reconfigure_handle())
    handles = [store.get(f"handle-{number}-{rank}").decode() for rank in ranks]
    c10d._reconfigure(uuid=number, handles=handles, timeout=timedelta(seconds=60)).wait()
    print(f"rank {RANK}: {len(ranks)} ranks reduce to {reduced()}", flush=True)


def main() -> None:
    torch.cuda.set_device(RANK)
    is_master = RANK == 0 and not IS_NEW
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), None, is_master, wait_for_workers=False
    )
    begin: Any = dist.init_process_group
    begin(
        "nccl2",
        store=dist.PrefixStore("first", store),
        rank=RANK,
        world_size=SIZE,
        timeout=timedelta(seconds=600),
        enable_reconfigure=True,
    )
    if not IS_NEW:
        reconfigure(store, 1, range(SIZE))
        if RANK == SIZE - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        assert dist.group.WORLD is not None
        dist.group.WORLD._get_backend(torch.device("cuda")).abort()
        reconfigure(store, 2, range(SIZE - 1))
        if RANK == 0:
            subprocess.Popen(
                [sys.executable, __file__], env={**os.environ, "RANK": str(SIZE - 1), "NEW": "1"}
            )
    reconfigure(store, 3, range(SIZE))
    store.add("over", 1)
    while store.add("over", 0) < SIZE:
        time.sleep(0.01)
    time.sleep(0.5)  # whose store it is leaves last
    os._exit(0)


if __name__ == "__main__":
    main()
