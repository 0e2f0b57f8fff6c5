"""The number of workers that ``auto``, ``gpu`` and ``cpu`` mean on this node, found out without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from keepstep.core.errors import UsageError


def worker_count(text: str, environ: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """The number of workers that ``--nproc-per-node text`` asks for.

    ``cpu``: the CPUs this process may use. ``gpu``: the NVIDIA devices under ``dev`` that
    ``CUDA_VISIBLE_DEVICES`` leaves visible. ``auto``: GPUs where there are any, else CPUs.

    Raises:
        UsageError: the text is neither a positive number nor one of these words, or there is no GPU for ``gpu``.
    """
    if re.fullmatch(r"[0-9]+", text.strip()):
        count = int(text)
        if count < 1:
            raise UsageError(f"--nproc-per-node {text}: give at least 1")
        return count
    if text == "cpu":
        return cpu_count()
    if text in ("gpu", "auto"):
        count = gpu_count(environ, dev)
        if count == 0 and text == "gpu":
            raise UsageError(
                f"--nproc-per-node gpu: no NVIDIA device visible on {os.uname().nodename}; give a number, or cpu"
            )
        return count or cpu_count()
    raise UsageError(f"--nproc-per-node {text}: give a number, auto, cpu or gpu")


def cpu_count() -> int:
    """Number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def gpu_count(environ: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Number of NVIDIA devices that a CUDA program sees in this environment; a MIG instance named there is one."""
    present = sum(1 for path in dev.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return present
    count = 0
    for entry in (word.strip() for word in visible.split(",")):
        # CUDA stops at the first entry that names no device.
        if (entry.isdigit() and int(entry) >= present) or not re.match(r"[0-9]+$|GPU-|MIG-", entry):
            break
        count += 1
    return count
