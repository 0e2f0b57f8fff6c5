"""What becomes of a process group when a peer is late for good, or dead, or a kernel never ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from benchmarks.stand_in.device import Device

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(*words: object) -> None:
    print(f"rank {RANK}:", *words, flush=True)


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def reduced(value: float) -> torch.Tensor:
    x = torch.tensor([value], dtype=torch.float32).cuda()
    dist.all_reduce(x)
    return x


def abort(store: dist.Store, both: bool) -> None:
    """Rank 1 never comes to the second all-reduce; rank 0 aborts from another thread while its main thread waits."""
    say("together", int(reduced(RANK + 1).item()))
    if RANK == 0:
        x = reduced(5)
        gone = threading.Event()

        def give_up() -> None:
            group()._get_backend(torch.device("cuda")).abort()
            gone.set()

        threading.Thread(target=give_up).start()
        torch.cuda.synchronize()
        say("after the abort", int(x.item()))  # nobody says so, and the value was never reduced
        if both:
            say("alone it returns", gone.wait(0.5))
            store.set("asked", "")
        gone.wait()
        say("returned")
    else:
        if both:
            store.get("asked")
        else:
            time.sleep(0.5)
        group()._get_backend(torch.device("cuda")).abort()
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.PrefixStore("again", store), rank=RANK, world_size=SIZE)
    say("again", int(reduced(RANK + 1).item()))


def abort_behind_a_kernel(store: dist.Store) -> None:
    """A kernel of rank 0 never ends; the abort of what was enqueued behind it waits for it."""
    say("together", int(reduced(RANK + 1).item()))
    if RANK == 0:
        Device().hang_next()
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        gone = threading.Event()

        def give_up() -> None:
            group()._get_backend(torch.device("cuda")).abort()
            gone.set()

        threading.Thread(target=give_up, daemon=True).start()
        say("it returns", gone.wait(0.5))
        store.set("told", "")
    store.wait(["told"])  # the end of rank 1 would be an error of the all-reduce
    os._exit(0)


def dead() -> None:
    """Rank 1 is killed; what rank 0 calls then fails, though nothing tells it from outside."""
    say("together", int(reduced(RANK + 1).item()))
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
    assert work is not None
    backend = group()._get_backend(torch.device("cuda"))
    for _ in range(200 if os.environ["STAND_IN_NOTICE_DEATH"] == "0" else 3000):
        if backend.get_error().name != "SUCCESS":
            say("told of a", backend.get_error().name)
            break
        time.sleep(0.01)
    try:
        reduced(1)
    except dist.DistBackendError as error:
        say("the next call raises", "remote process exited" in str(error))
    os._exit(0)


def main() -> None:
    torch.cuda.set_device(RANK)
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), None, RANK == 0, wait_for_workers=False
    )
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore("first", store),
        rank=RANK,
        world_size=SIZE,
        timeout=timedelta(seconds=600),
    )
    if sys.argv[1] == "dead":
        dead()
    if sys.argv[1] == "abort-behind":
        abort_behind_a_kernel(store)
    abort(store, both=sys.argv[1] == "abort-waits")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
