"""What Slurm says of a job, in the variables that srun sets for each task (section "output environment" of srun(1))."""

from __future__ import annotations

import re
from collections.abc import Mapping

from keepstep.core.errors import UsageError
from keepstep.launch.schedulers.local import Allocation, number_in

OWN_NODES = "KEEPSTEP_SLURM_NODES"
"""Set by ``keepstep slurm``, which makes a job step of each node: the nodes of all these steps."""
MOST_NODES = 200_000
MOST_GPUS = 4096
"""Most GPUs of one node."""
_MOST_JOBS = 1 << 32
_FIRST_PORT, _PORTS = 20_000, 10_000  # below the ports that Linux gives to connections
_PART = re.compile(r"((?:[^,\[\]]|\[[0-9,-]+\])+)(?:,|$)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?$")


def allocation_of(environ: Mapping[str, str]) -> Allocation | None:
    """What Slurm says of this process's job step; outside of a step only what it says of the job; None elsewhere.

    Raises UsageError for a variable of another form.
    """
    number = number_in(environ, "SLURM_JOB_ID", _MOST_JOBS)
    if number is None:
        return None
    if not environ.get("SLURM_STEP_ID"):
        return _outside_of_a_step(environ, f"Slurm job {number}")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if not re.fullmatch(r"1(\(x[0-9]+\))?", tasks):
        raise UsageError(
            f"Slurm starts {tasks[:40]} launchers a node: give srun --ntasks-per-node=1, "
            "and the number of workers to keepstep as --nproc-per-node"
        )
    name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    name = OWN_NODES if environ.get(OWN_NODES) else name
    nodes = nodes_in(environ, name)
    node = environ.get("SLURMD_NODENAME", "")
    if node not in nodes:
        raise UsageError(f"SLURMD_NODENAME={node!r} is not among the nodes of {name}={environ[name][:200]}")
    return Allocation(
        name=f"Slurm job {number}",
        nodes=len(nodes),
        node_rank=nodes.index(node),
        master=nodes[0],
        port=_FIRST_PORT + number % _PORTS,
        run_id=str(number),
        node=node,
        failure_domain=leaf_switch(environ),
        workers=number_in(environ, "SLURM_GPUS_ON_NODE", MOST_GPUS) or 0,
    )


def _outside_of_a_step(environ: Mapping[str, str], name: str) -> Allocation:
    nodes = number_in(environ, "SLURM_JOB_NUM_NODES", MOST_NODES) or 1
    text = f"{name} has {nodes} nodes, of which this one is used alone: start it with srun, or use keepstep slurm"
    return Allocation(
        name=name, node=environ.get("SLURMD_NODENAME", ""), warnings=(text,) if nodes > 1 else ()
    )


def job_of(environ: Mapping[str, str]) -> str:
    """The job as Slurm's commands are told it: of an array, by one task's own number they may mean all tasks.

    Raises UsageError for a variable of another form.
    """
    task = number_in(environ, "SLURM_ARRAY_TASK_ID", _MOST_JOBS)
    name = "SLURM_JOB_ID" if task is None else "SLURM_ARRAY_JOB_ID"
    job = number_in(environ, name, _MOST_JOBS)
    if job is None:
        raise UsageError(
            f"{name} is not set: run this in a job of Slurm's, as a batch script or under salloc"
        )
    return str(job) if task is None else f"{job}_{task}"


def nodes_in(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """The nodes that a variable lists. Raises UsageError where it lists none, or has another form."""
    try:
        return expand_nodes(environ.get(name, ""))
    except ValueError as error:
        raise UsageError(f"{name}={environ.get(name, '')[:200]!r}: {error}") from None


def leaf_switch(environ: Mapping[str, str]) -> str:
    """The switches above this node, as ``s0.s3``, where Slurm knows its topology; else empty."""
    address = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(address) != len(pattern) or pattern[-1] != "node" or set(pattern[:-1]) != {"switch"}:
        return ""
    return ".".join(address[:-1])


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names in a list of Slurm's, in its order: ``gpu-[01-03,7],login`` or ``rack[1-2]n[1-2]``.

    Raises ValueError, with what to write instead, for another text, no node, or more than `MOST_NODES`.
    """
    names: list[str] = []
    end = 0
    while end < len(text):
        part = _PART.match(text, end)
        if part is None or (part.end() == len(text) and text.endswith(",")):
            raise ValueError("is no list of nodes, as gpu-[01-16] or gpu-01,gpu-02")
        names += _expanded(part[1], MOST_NODES - len(names))
        end = part.end()
    if not names:
        raise ValueError("lists no nodes")
    if odd := next((name for name in names if not _NAME.fullmatch(name)), None):
        raise ValueError(f"names {odd[:40]!r}, which is no node's name")
    if len(set(names)) < len(names):
        raise ValueError("lists a node twice")
    return tuple(names)


def _expanded(part: str, most: int) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        if most < 1:
            raise ValueError(f"lists more than {MOST_NODES} nodes")
        return [part]
    ranges, _, tail = rest.partition("]")
    heads: list[str] = []
    for text in ranges.split(","):
        found = _RANGE.match(text)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or first > last:
            raise ValueError(f"has a range {text!r}, which is none; write FIRST-LAST")
        if last - first >= most - len(heads):
            raise ValueError(f"lists more than {MOST_NODES} nodes")
        heads += [f"{head}{number:0{len(found[1])}d}" for number in range(first, last + 1)]
    tails = _expanded(tail, most // len(heads)) if tail else [""]
    return [f"{one}{other}" for one in heads for other in tails]
