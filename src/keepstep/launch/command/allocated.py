"""What the scheduler says becomes the flags that nobody gave: flags win, then ``PET_…``, then the scheduler."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from keepstep.core.errors import UsageError
from keepstep.launch.command.meeting import node_range
from keepstep.launch.schedulers import allocation_of
from keepstep.launch.schedulers.local import NOTHING_TOLD, Allocation

_MEETING = frozenset({"rdzv_endpoint", "master_addr", "master_port", "node_rank", "standalone"})
"""Flags with which a user says how nodes meet; then the scheduler is not asked."""


def fill_from_scheduler(given: argparse.Namespace, environ: Mapping[str, str], fqdn: str) -> Allocation:
    """Set the flags that were not given to what the scheduler says; returns all that it says.

    Args:
        given: the parsed command line; changed in place.
        environ: the launcher's environment.
        fqdn: this host's name with its domain.

    Raises UsageError where flags and scheduler contradict each other, or the scheduler's variables cannot be read and
    are needed.
    """
    by_flags = bool(given.said & _MEETING)
    try:
        told = allocation_of(environ, fqdn)
    except UsageError as error:
        if not by_flags:
            raise
        return Allocation(warnings=(f"{error}; not needed, as flags say how the nodes meet",))
    if told is NOTHING_TOLD:
        return told
    contradictions = tuple(_contradictions(given, told))
    if told.workers and "nproc_per_node" not in given.said:
        given.nproc_per_node = str(told.workers)
    if by_flags:
        if told.run_id and not told.master and "rdzv_id" not in given.said:
            given.rdzv_id = told.run_id  # the scheduler itself has set the flags, as PET_…
        names = Allocation(name=told.name, node=told.node, failure_domain=told.failure_domain)
        return replace(names, warnings=contradictions)
    if told.untold and _is_of_several(given, told):
        raise UsageError(
            f"--nnodes {given.nnodes}: which node this is and where the first one is cannot be told: {told.untold}; "
            "give --node-rank, --master-addr and --master-port, or --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        )
    told = replace(told, warnings=(*told.warnings, *contradictions))
    if told.node_rank >= 0 and _is_of_several(given, told):
        _let_meet(given, told)
    return told


def _contradictions(given: argparse.Namespace, told: Allocation) -> Iterator[str]:
    """Where flags that hold say something else than Slurm. In Kubernetes a node's rank may well be no pod's index."""
    if not told.name.startswith("Slurm"):
        return
    rank, workers = given.node_rank, str(given.nproc_per_node).strip()
    has_effect = "node_rank" in given.said and given.rdzv_backend == "static"
    if has_effect and told.node_rank >= 0 and rank != told.node_rank:
        yield f"--node-rank {rank}: by {told.name} this is node {told.node_rank} of {told.nodes}; the flag holds"
    # The first node says it for all.
    is_number = told.node_rank <= 0 and "nproc_per_node" in given.said and re.fullmatch("[0-9]{1,6}", workers)
    if is_number and told.workers not in (0, int(workers)):
        yield f"--nproc-per-node {workers}: {told.name} has {told.workers} GPUs on this node; the flag holds"


def _is_of_several(given: argparse.Namespace, told: Allocation) -> bool:
    """Whether this node plays a part in a job of several."""
    if "nnodes" not in given.said:
        return told.nodes > 1
    low, high = node_range(given.nnodes)
    if not told.nodes:
        return high > 1
    if low > told.nodes:
        raise UsageError(
            f"--nnodes {given.nnodes}: {told.name} has {told.nodes} here; start it on more nodes"
        )
    if high < told.nodes and not given.max_restarts:
        raise UsageError(
            f"--nnodes {given.nnodes}: {told.name} has {told.nodes} nodes here; with --max-restarts N the others are "
            "spares, else start it on fewer"
        )
    return told.nodes > 1


def _let_meet(given: argparse.Namespace, told: Allocation) -> None:
    if "nnodes" not in given.said:
        given.nnodes = str(told.nodes)
    given.rdzv_backend, given.node_rank = "static", told.node_rank
    given.master_addr, given.master_port = told.master, told.port
    if told.run_id and "rdzv_id" not in given.said:
        given.rdzv_id = told.run_id
