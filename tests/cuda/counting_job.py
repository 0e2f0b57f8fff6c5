"""The training of the stand-in; at its end each rank says how often its host has waited for its device."""

from __future__ import annotations

import os

from benchmarks.stand_in.device import Device
from benchmarks.stand_in.jobs.train import main

if __name__ == "__main__":
    main()
    print(f"rank {os.environ['RANK']} synchronized {Device().count('synchronizations')} times", flush=True)
