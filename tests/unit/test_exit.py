"""A worker that has trained to its end ends well, whatever torch's own threads hold then."""

from __future__ import annotations

import os
import subprocess
import sys

GLOO_STILL_WANTS_THE_GIL = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch._C._stash_obj_in_tls("something of Python's, as DDP keeps it", object())
sys.setswitchinterval(100)  # nobody else gets the GIL unless it is given up
tensor = torch.ones(1000)
for _ in range(8):
    dist.all_reduce(tensor, async_op=True)
until = time.monotonic() + 0.3
while time.monotonic() < until:
    pass
"""


def test_gloos_threads_let_go_of_python_before_it_ends() -> None:
    """Without that the process aborts, with torch 2.13: "terminate called without an active exception"."""
    done = subprocess.run(
        [sys.executable, "-c", GLOO_STILL_WANTS_THE_GIL],
        env={**os.environ, "KEEPSTEP_JOB": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
