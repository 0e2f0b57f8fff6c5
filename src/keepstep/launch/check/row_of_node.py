"""This node's row: everything is looked at side by side, and nothing is waited for without a limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.kernel_records import KERNEL_LOG, KernelLog
from keepstep.core.node_memory import bounds
from keepstep.core.node_row import NodeRow, PathSpeed
from keepstep.launch.check.burning import burn_in_all
from keepstep.launch.node import node_checks
from keepstep.launch.node.checks import Subject, Wanted, gpu_health, installed, kernel_log, nics, resources
from keepstep.launch.node.checks.paths import measure_all

PATIENCE_S = (
    15.0  # how long the quick checks may take; the driver of many GPUs may take most of it to open them
)
PATHS_S = 20.0  # how long the checks of all paths may take
_PATH_BYTES, _PATH_S = 512 << 20, 2.0  # most that is written to a path, and for how long; likewise read
_LATELY_S = 3600.0  # errors that the kernel told of within this time count
_QUICK = {
    "disk": resources.disk,
    "shared_memory": resources.shared_memory,
    "memory": resources.memory,
    "kernel_log": kernel_log.look,
    "network": nics.network,
    "gpus": gpu_health.health,
}


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be checked on each node. ``burn_in_s``: 0 for none."""

    node: str
    folder: Path  # the folder in which runs are kept
    paths: tuple[Wanted, ...] = ()
    burn_in_s: float = 0.0
    kernel_log: str = KERNEL_LOG
    address: str | None = None  # by which the others reach this node; None: that towards the internet


def row_of_node(request: Request, environ: Mapping[str, str], now_s: float) -> NodeRow:
    """Check this node. ``now_s``: on CLOCK_MONOTONIC. Takes the time of the burn-in, and some seconds."""
    node = request.node
    speeds: list[PathSpeed | str] = []
    measuring = threading.Thread(
        target=lambda: speeds.extend(measure_all(request.paths, PATHS_S, _PATH_BYTES, _PATH_S)), daemon=True
    )
    measuring.start()
    models = installed.gpus()
    ranks = max(len(models), 1)
    since_s = now_s - _LATELY_S
    subject = Subject(node, ranks, (request.folder,), 0, since_s, kernel_log=request.kernel_log)
    found = node_checks.run(subject, _QUICK, patience_s=PATIENCE_S)
    measuring.join(PATHS_S + 1.0)
    # After the paths: a burn-in has the host's cores busy.
    burnt = burn_in_all(request.burn_in_s, environ) if request.burn_in_s else ()
    unfit = [one.text for one in found if one.unfit]
    warnings = [one.text for one in found if not one.unfit]
    unfit += [f"node {node}: {one}" for one in speeds if isinstance(one, str)]
    unfit += [f"node {node}: {one.device}: {text}" for one in burnt for text in one.errors]
    warnings += [f"node {node}: {one.device}: {text}" for one in burnt for text in one.missing]
    tightest = min(bounds(), key=lambda bound: bound.available_bytes)
    return NodeRow(
        node,
        memory=(tightest.available_bytes, tightest.total_bytes),
        shared=_free("/dev/shm"),
        disk=_free(
            next((str(one) for one in (request.folder, *request.folder.parents) if one.exists()), "/")
        ),
        kernel=_kernel(request.kernel_log, [one.text for one in found]),
        versions=installed.versions(),
        gpus=models,
        nics=nics.nics(address=request.address),
        paths=tuple(one for one in speeds if isinstance(one, PathSpeed)),
        burnt=tuple(burnt),
        unfit=tuple(unfit),
        warnings=tuple(warnings),
    )


def _free(path: str) -> int:
    with suppress(OSError):
        left = os.statvfs(path)
        return left.f_bavail * left.f_frsize
    return -1


def _kernel(path: str, lines: list[str]) -> str:
    if any(": the kernel tells of " in line for line in lines):
        return "errors"
    with suppress(OSError):
        KernelLog(path).close()
        return "clean"
    return "unread"
