"""Runs a training script on Gloo whose process groups keepstep's probe takes for NCCL's.

    python benchmarks/campaign/as_nccl.py SCRIPT [ARGUMENT ...]

The probe then records what it records of NCCL: nothing of what C++ calls (DDP's reducer, functional collectives), and
of all other calls the end of the call instead of the end of the transfer. Unlike on a GPU, the host does not run ahead
of the transfers. It is a cheap double for NCCL: nothing of keepstep knows of it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist  # torch loads the probe

from keepstep.capture import captured_groups, twins


def _backends_of(group: Any) -> dict[str, str]:
    return {"cuda": dist.Backend.NCCL}


def main() -> None:
    for module in (captured_groups, twins):
        vars(module)["backends_of"] = _backends_of
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
