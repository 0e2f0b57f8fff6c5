"""An all-reduce a step on Gloo. Arguments: folder, steps, ``--exit=CODE``; writes ``places/RANK``: the node's name.

A step takes 0.1 s until there is a file ``hurry`` in the folder. With ``--exit`` rank 1 ends so after the last step.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
(folder / "places").mkdir(exist_ok=True)
for step in range(steps):
    dist.all_reduce(torch.ones(8))
    if step == 2:
        (folder / "places" / f".{rank}").write_text(os.environ["SLURMD_NODENAME"])
        (folder / "places" / f".{rank}").replace(folder / "places" / str(rank))
    if not (folder / "hurry").exists():
        time.sleep(0.1)
if rank == 1 and sys.argv[3:]:
    sys.exit(int(sys.argv[3].removeprefix("--exit=")))
dist.destroy_process_group()
