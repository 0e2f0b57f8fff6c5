"""An example of sessions, whose rank 1 kills itself in its 7th step of the first incarnation if ``DIES`` is set.

Each process leaves an empty file ``process-RANK-PID``.

Arguments: the example, steps, folder.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

folder = Path(sys.argv[3])
example = runpy.run_path(
    str(Path(__file__).parents[2] / "examples" / "recover" / sys.argv[1]), run_name="example"
)
Data, drawn = example["Data"], example["Data"].batch
batches = 0


def batch(data: Any) -> Any:
    global batches
    batches += 1
    (folder / f"process-{dist.get_rank()}-{os.getpid()}").touch()
    if (
        batches == 7
        and os.environ["KEEPSTEP_INCARNATION"] == "0"
        and dist.get_rank() == 1
        and "DIES" in os.environ
    ):
        os.kill(os.getpid(), signal.SIGKILL)
    return drawn(data)


Data.batch = batch
dist.init_process_group("gloo")
example["train"](int(sys.argv[2]), folder)
dist.destroy_process_group()
