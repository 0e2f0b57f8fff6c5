"""The place of a node in its job, and the environment and command that each of its workers is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from keepstep.core.errors import UsageError
from keepstep.core.staying import ADDRESS as STAYING
from keepstep.launch.command.job import Job, interpreter

RUN_DIR = "KEEPSTEP_RUN_DIR"
RING = "KEEPSTEP_RING"
ORDERS = "KEEPSTEP_ORDERS"
MICROBATCHES = "KEEPSTEP_MICROBATCHES"  # 1 where the controller may order replicas' shares of micro-batches
LINKS = "KEEPSTEP_LINKS"
INCARNATION = "KEEPSTEP_INCARNATION"
CACHE = "KEEPSTEP_CACHE"
NO_CACHE = "KEEPSTEP_NO_CACHE"
LAYOUT = "KEEPSTEP_LAYOUT"
ELASTIC = "KEEPSTEP_ELASTIC"  # 1 where the job may go on with fewer nodes or more
CHECKPOINT_DIR = "KEEPSTEP_CHECKPOINT_DIR"
CHECKPOINT_EVERY = "KEEPSTEP_CHECKPOINT_EVERY"
FAILURES_PER_DAY = "KEEPSTEP_FAILURES_PER_DAY"
MILESTONES = "KEEPSTEP_MILESTONES"
IMPORTS = "KEEPSTEP_IMPORTS"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
COOKIE = "KEEPSTEP_JOB"  # variable that every process of a run has, by which the guard finds it
OURS = frozenset(
    {RING, ORDERS, LINKS, RUN_DIR, CACHE, NO_CACHE, INCARNATION, MILESTONES, IMPORTS, STAYING, ELASTIC}
)
"""Variables that every worker is given anew, and no other process has."""
GLOO_IN_BATCHES = ("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "GLOO_ENABLE_STORE_V2_API")
"""Variables that have Gloo set up a group from short values, 128 ranks at once; see docs/design/recovery.md."""
BY_PLACE = frozenset(
    {"RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"}
    | {"MASTER_ADDR", "MASTER_PORT"}
)
"""Variables that a spare does not know before it has a place."""
_LOCAL_RANK_MACRO = "${local_rank}"


@dataclass(frozen=True, slots=True)
class Place:
    """A node's row of the rank table: it plays ``first_rank`` to ``first_rank + nproc - 1``.

    The fields are those of ``wire.Placement``, in the same order.
    """

    node_rank: int
    first_rank: int
    world_size: int
    node_count: int
    master_addr: str
    master_port: int
    incarnation: int = 0
    pauses: int = 0  # how many incarnations so far were ordered, so that they count as no restarts

    @property
    def restarts(self) -> int:
        """How often the job has begun again after a failure."""
        return self.incarnation - self.pauses


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A worker that is to be started. ``environment`` is set on top of the launcher's own."""

    rank: int
    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]


def worker_plan(
    job: Job, place: Place, local_rank: int, environ: Mapping[str, str], more: Mapping[str, str]
) -> WorkerPlan:
    """One worker of this node. ``environ``: the launcher's own. ``more``: variables for this worker alone."""
    return WorkerPlan(
        rank=place.first_rank + local_rank,
        local_rank=local_rank,
        command=worker_command(job, local_rank, environ),
        environment={**worker_environment(job, place, local_rank, environ), **more},
    )


def spare_plan(job: Job, local_rank: int, environ: Mapping[str, str], more: Mapping[str, str]) -> WorkerPlan:
    """The worker that a spare will have, as far as it is known: not its rank, nor who the others are (`BY_PLACE`)."""
    plan = worker_plan(job, Place(0, 0, 1, 1, "", 0), local_rank, environ, more)
    known = {name: value for name, value in plan.environment.items() if name not in BY_PLACE}
    return replace(plan, rank=-1, environment=known)


_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ENDING = "3"
"""Torch's own default. torchrun's is 1, with which the watchdog aborts before it ends the process: for a moment the
device goes on, on what an aborted collective has left."""
_KEEPING = {
    _HANDLING: "2",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""With these torch's watchdog ends no process that is to outlive its groups, keeps none from going on, and does not
read its flight recorder, which holds events of groups that are gone."""


def keeping(job: Job, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Variables besides with which torch's watchdog ends no process that may outlive its incarnation.

    For workers with the NCCL shim: without it nobody sees what the watchdog aborts, and no process can be kept. Empty,
    too, where the user has the watchdog do something else.
    """
    if not (job.in_place and job.max_restarts > 0) or environ.get(_HANDLING, "2") != "2":
        return {}
    return {name: usual for name, usual in _KEEPING.items() if name not in environ}


def worker_environment(job: Job, place: Place, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun sets for a worker, with the values that it would give them but for NCCL's errors
    (`_ENDING`), and Gloo's switches.

    ``TORCHELASTIC_USE_AGENT_STORE=False`` has rank 0 make the TCP store itself, because the launcher runs no torch.
    """
    rank = place.first_rank + local_rank
    result = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(place.node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": job.role,
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "WORLD_SIZE": str(place.world_size),
        "GROUP_WORLD_SIZE": str(place.node_count),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.incarnation),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signal.name for signal in job.signals),
        _HANDLING: environ.get(_HANDLING, _ENDING),
        **{name: environ.get(name, "1") for name in GLOO_IN_BATCHES},
    }
    if job.watch and job.mitigate == "auto":
        result[MICROBATCHES] = "1"
    if job.virtual_local_rank:
        result["LOCAL_RANK"] = "0"
        result["CUDA_VISIBLE_DEVICES"] = _own_device(local_rank, environ)
    if job.nproc > 1 and "OMP_NUM_THREADS" not in environ:
        result["OMP_NUM_THREADS"] = "1"
    return result


def _own_device(local_rank: int, environ: Mapping[str, str]) -> str:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={visible}; "
            "lower --nproc-per-node"
        )
    return devices[local_rank].strip()


def worker_command(job: Job, local_rank: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The worker's command line. ``${local_rank}`` in the script's arguments becomes the local rank."""
    arguments = tuple(text.replace(_LOCAL_RANK_MACRO, str(local_rank)) for text in job.arguments)
    if job.entry == "program":
        return (job.script, *arguments)
    python = (interpreter(environ), "-u")
    return (*python, *(("-m",) if job.entry == "module" else ()), job.script, *arguments)
