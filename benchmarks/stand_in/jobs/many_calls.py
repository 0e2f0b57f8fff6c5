"""A job of many small operations on the stand-in GPU: all-reduces and an optimizer step, at a pace.

python many_calls.py SECONDS CALLS STEPS_A_SECOND
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    seconds, calls, pace = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    weight = torch.nn.Parameter(torch.zeros(64, device="cuda"))
    weight.grad = torch.zeros(64, device="cuda")
    optimizer = torch.optim.SGD([weight], lr=0.0)
    begun = due = time.monotonic()
    steps = int(seconds * pace)  # the same on all ranks: none may wait for one that is through
    for _ in range(steps):
        for _ in range(calls):
            dist.all_reduce(weight.grad)
        optimizer.step()
        due += 1 / pace
        time.sleep(max(due - time.monotonic(), 0.0))
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"pace {steps / (time.monotonic() - begun):.3f} steps a second", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
