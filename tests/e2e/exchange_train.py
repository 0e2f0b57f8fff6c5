"""Two pipelines of two stages, in data parallel: DP pairs (0, 2) and (1, 3) exchange much, pipelines little.

``exchange_train.py FOLDER STEPS [SECONDS]``. Computing is emulated by 30 ms (or SECONDS) of sleep a step, and by four
times as long on hosts of which FOLDER/slow-HOST is there. Each rank writes FOLDER/losses-RANK (a line per step: its
number, a value that depends on all weights as hex, its seconds, Unix time), and all end earlier when FOLDER/enough is
there.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep.checkpoint

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
compute_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.03
dist.init_process_group("gloo")
rank = dist.get_rank()
replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
pipeline = pipelines[rank // 2]
assert isinstance(pipeline, dist.ProcessGroup)
stage, replica = rank % 2, rank // 2
torch.manual_seed(rank)
weights = torch.ones(256 * 1024) * (1 + stage)  # 1 MiB
data = torch.Generator().manual_seed(replica)
state = {"weights": weights, "data": data.get_state()}
start = keepstep.checkpoint.load(state) or 0
data.set_state(state["data"])
slow = folder / f"slow-{socket.gethostname()}"
began_s = time.perf_counter()
with (folder / f"losses-{rank}").open("a") as log:
    for step in range(start, steps):
        activation = torch.randn(2048, generator=data)
        if stage == 0:
            dist.send(activation * weights[:2048], rank + 1, group=pipeline)
            dist.recv(activation, rank + 1, group=pipeline)
        else:
            dist.recv(activation, rank - 1, group=pipeline)
            dist.send(activation * weights[:2048].cos(), rank - 1, group=pipeline)
        time.sleep(compute_s * (4 if slow.exists() else 1))
        gradient = torch.sin(weights + activation[0])
        dist.all_reduce(gradient, group=replicas)
        weights.sub_(gradient, alpha=0.01)
        over = torch.tensor([float(rank == 0 and (folder / "enough").exists())])
        dist.all_reduce(over)
        now_s = time.perf_counter()
        log.write(f"{step} {float(weights.double().sum()).hex()} {now_s - began_s:.4f} {time.time():.4f}\n")
        log.flush()
        began_s = now_s
        state["data"] = data.get_state()
        keepstep.checkpoint.save(state, step + 1)
        if over:
            break
dist.destroy_process_group()
