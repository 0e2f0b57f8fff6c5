"""An all-reduce that never ends, a step of the optimizer behind it, and an abort by another thread; two ranks.

    python gate_job.py KIND FOLDER

Rank 0 writes to ``FOLDER/fed`` whether the step was made on gradients that were not reduced: while the gate was closed
(``before``) and once all has ended (``after``). ``KIND``: "gated"; "left", where nobody opens the gate; "open", where
there is none. When it is gated, two steps more are made, each behind another abort: ``late``, while the gate is left
open, and ``renewed``, after the groups were said to be whole. Told is whether the device makes them at once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.stand_in.device import compute_values

from keepstep.session.device_gate import DeviceGate


def main(kind: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    weight = torch.nn.Parameter(torch.ones(64).cuda())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gate = DeviceGate() if kind != "open" else None
    others = [dist.new_group([0, 1]) for _ in range(2)] if kind == "gated" else []
    for other in others:
        dist.all_reduce(torch.ones(64).cuda(), group=other)
    weight.grad = torch.ones(64).cuda()
    dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
    optimizer.step()  # the first: weights are 0
    torch.cuda.synchronize()
    assert gate is None or gate.stands
    if rank == 0:
        weight.grad.fill_(5.0)
        dist.all_reduce(weight.grad, dist.ReduceOp.AVG)  # rank 1 never comes
        optimizer.step()
        aborting = threading.Thread(target=abort)
        aborting.start()
        aborting.join()
        time.sleep(0.3)
        told = {"before": fed(weight)}
        if kind == "gated":
            assert gate is not None
            gate.open()
        torch.cuda.synchronize()
        told["after"] = fed(weight)
        if kind == "gated":
            assert gate is not None
            told["late"] = steps_at_once(optimizer, others[0])
            gate.renew()
            told["renewed"] = steps_at_once(optimizer, others[1])
        (folder / "fed").write_text(json.dumps(told))
    else:
        while not (folder / "fed").exists():
            time.sleep(0.02)
    os._exit(0)


def abort(group: Any = None) -> None:
    group = group or dist.group.WORLD
    assert group is not None
    group.abort()


def steps_at_once(optimizer: torch.optim.Optimizer, group: Any) -> bool:
    """Whether the device makes a step after a thread has aborted this group, as torch's watchdog does.

    It is given as long as 20 copies take on another stream, one after the other.
    """
    aborting = threading.Thread(target=abort, args=(group,))
    aborting.start()
    aborting.join()
    optimizer.step()
    behind = torch.cuda.Event()
    behind.record()
    weight = optimizer.param_groups[0]["params"][0]
    return any(fed(weight) and behind.query() for _ in range(20))


def fed(weight: torch.nn.Parameter) -> bool:
    """Whether the weights have changed, read on a stream that waits for nothing."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        host = torch.empty(64, pin_memory=True)
        host.copy_(weight.detach(), non_blocking=True)
    aside.synchronize()
    return bool(host.any())


if __name__ == "__main__":
    compute_values()
    main(sys.argv[1], Path(sys.argv[2]))
