"""Each rank says whether its recorder is read: at first, and after rank 0 has aborted a group."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keepstep.agent.sensors.flight_recorder import ask

RANK = int(os.environ["RANK"])


def say(when: str) -> None:
    answer, _ = ask(Path(os.environ["KEEPSTEP_RUN_DIR"]), os.getpid(), RANK)
    print(f"rank {RANK}, {when}: {type(answer).__name__}", flush=True)


def abort(group: Any) -> None:
    group._get_backend(torch.device("cuda")).abort()


def main() -> None:
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl")
    x = torch.ones(8).cuda()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    time.sleep(1)  # torch counts what has ended every tenth of a second
    say("at first")
    if RANK == 0:
        dist.all_reduce(x)  # rank 1 never comes
        assert dist.group.WORLD is not None
        abort(dist.group.WORLD)
    say("at last")
    time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main()
