"""Starts the training on each rank as a wrapper might: without LD_PRELOAD, with a plugin of its own, on an old NCCL."""

from __future__ import annotations

import os
import sys

from benchmarks.stand_in.launch import TRAIN

RANK = int(os.environ["RANK"])

if RANK == 0:
    del os.environ["LD_PRELOAD"]
elif RANK == 1:
    os.environ["NCCL_PROFILER_PLUGIN"] = "other"
elif RANK == 2:
    os.environ["STAND_IN_NCCL_VERSION"] = "21703"
os.execv(sys.executable, [sys.executable, str(TRAIN), *sys.argv[1:]])
