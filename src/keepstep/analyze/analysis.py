"""From a path to incidents: which kind of trace it is, who reads it, and who judges what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.analyze._call_logs import slow_in_calls
from keepstep.analyze._episodes import slow_episodes
from keepstep.core.errors import TraceError
from keepstep.core.incident import Culprit, Diagnosis, Incident
from keepstep.core.ranges import fold_ranks
from keepstep.locate import WhatIf, locate_hang, step_graphs, what_if
from keepstep.report.incidents import read_incidents
from keepstep.traces import open_run
from keepstep.traces.call_log import looks_like_call_log, read_call_log
from keepstep.traces.flight_recorder import rank_of, read_dumps
from keepstep.traces.operation_tables import is_parquet, read_operation_table
from keepstep.traces.training_log import looks_like_training_log, read_head, read_training_log

_FORMATS = (
    "a folder of a keepstep run, a folder with a flight-recorder dump per rank (dump_0, dump_1, …), a training log of "
    "Megatron-LM, MegaTrace call logs, or an operation table (Parquet)"
)
_PICKLE = b"\x80"
_SLOW = 1.05  # of a step's time to its ideal: less is everyday unevenness
_EXPLAINS = 0.5  # of the lost time that comes back with one rank or stage


@dataclass(frozen=True, slots=True)
class Analysis:
    """``incidents`` as a live run would have written them; ``missing``: what is not in the trace or cannot be read."""

    source: str  # what kind of trace it was
    incidents: tuple[Incident, ...]
    missing: tuple[str, ...] = ()


def analyze(path: Path) -> Analysis:
    """Judge a trace.

    Raises:
        TraceError: there is nothing at ``path`` that can be read; the message says what was expected.
    """
    if not path.exists():
        raise TraceError(f"{path}: there is nothing there; give {_FORMATS}")
    if path.is_dir():
        return _folder(path)
    if is_parquet(path):
        return _operation_table(path)
    if looks_like_call_log(path):
        return _call_log([path])
    if looks_like_training_log(read_head(path)):
        return _training_log(path)
    if rank_of(path) is not None and _is_dump(path):
        raise TraceError(f"{path}: is the dump of one rank; give the folder with the dumps of all ranks")
    raise TraceError(f"{path}: is no trace that keepstep knows; give {_FORMATS}")


def _folder(path: Path) -> Analysis:
    if (path / "run.json").exists():
        return Analysis("keepstep run", tuple(read_incidents(open_run(str(path)).path / "incidents")))
    files = sorted(entry for entry in path.iterdir() if entry.is_file())
    dumps = [entry for entry in files if rank_of(entry) is not None and _is_dump(entry)]
    if dumps:
        return _flight_recorder(dumps)
    calls = [entry for entry in files if looks_like_call_log(entry)]
    if calls:
        return _call_log(calls)
    logs = [entry for entry in files if looks_like_training_log(read_head(entry))]
    if len(logs) == 1:
        return _training_log(logs[0])
    if logs:
        names = ", ".join(entry.name for entry in logs[:4])
        raise TraceError(f"{path}: holds {len(logs)} training logs ({names}, …); give one of them")
    raise TraceError(f"{path}: nothing in it is a trace that keepstep knows; give {_FORMATS}")


def _is_dump(path: Path) -> bool:
    """A pickle, JSON, or nothing at all: what a flight recorder leaves."""
    with open(path, "rb") as file:
        head = file.read(1)
    return head in (_PICKLE, b"{", b"")


def _flight_recorder(files: Sequence[Path]) -> Analysis:
    dumps = read_dumps(files)
    nodes = dict.fromkeys(range(dumps.world_size), "")
    diagnosis = locate_hang(dumps.states, dumps.groups, nodes)
    missing = (*dumps.missing, "stacks and phases: a flight recorder has none")
    if not any(state.in_flight for state in dumps.states):
        return Analysis(
            "flight recorder", (), (*missing, "an operation in flight: all that was enqueued is done")
        )
    return Analysis("flight recorder", (_hang(diagnosis, dumps.world_size, len(dumps.states)),), missing)


def _hang(diagnosis: Diagnosis, world_size: int, reporting: int) -> Incident:
    return Incident(
        number=1,
        kind=diagnosis.kind,
        onset_step=None,
        detected_step=None,
        relief_step=None,
        job_slowdown=None,
        culprits=diagnosis.culprits,
        victims=diagnosis.victims,
        evidence=diagnosis.evidence,
        missing=diagnosis.missing,
        status="ended",
        summary=diagnosis.summary,
        ranks_reporting=reporting,
        world_size=world_size,
    )


def _training_log(path: Path) -> Analysis:
    """Every slowdown from onset to relief, with the job's time alone to judge by."""
    log = read_training_log(path)
    numbers, times = zip(*log.iterations, strict=True)
    missing = ("times per rank: a training log has the job's iteration time only",)
    found = slow_episodes(times, numbers, f"{len(numbers)} iterations of {path.name}")
    return Analysis("training log", tuple(replace(one, missing=missing) for one in found), log.missing)


def _call_log(paths: Sequence[Path]) -> Analysis:
    return Analysis("call log", *slow_in_calls(read_call_log(paths)))


def _operation_table(path: Path) -> Analysis:
    """The rank or stage whose slowness, taken away, gives back most of the time that steps lose."""
    operations, missing = read_operation_table(path)
    graphs = step_graphs(operations)
    graph = graphs[0]
    if len(graphs) > 1:
        others = sum(len(other.steps) for other in graphs[1:])
        missing = (*missing, f"{path.name}: {others} steps with other operations than most, not looked at")
    found = what_if(graph)
    if found.slowdown < _SLOW:
        return Analysis("operation table", (), missing)
    culprits, told = _straggler(found, graph.stage_of)
    ideal = f"a step takes {found.actual_s:.3g} s, {found.ideal_s:.3g} s were all ranks alike"
    incident = Incident(
        number=1,
        kind="slow",
        onset_step=graph.steps[0],
        detected_step=None,
        relief_step=None,
        job_slowdown=found.slowdown,
        culprits=culprits,
        victims=tuple(sorted(set(graph.stage_of) - {culprit.rank for culprit in culprits}))
        if culprits
        else (),
        evidence=(ideal, *told),
        missing=() if culprits else ("one rank or stage that accounts for half of the lost time",),
        iteration_before_s=found.ideal_s,
        iteration_after_s=found.actual_s,
        ranks_reporting=len(graph.stage_of),
        world_size=len(graph.stage_of),
    )
    return Analysis("operation table", (incident,), missing)


def _straggler(found: WhatIf, stage_of: Mapping[int, int]) -> tuple[tuple[Culprit, ...], tuple[str, ...]]:
    """A rank if it alone gives back most of what its stage does, else the stage; nobody if neither gives back half."""
    rank = max(found.by_rank, key=lambda one: found.by_rank[one])
    stage = max(found.by_stage, key=lambda one: found.by_stage[one])
    told = (
        f"were rank {rank} like the others, {found.by_rank[rank]:.0%} of the lost time would come back",
        f"were stage {stage} like the others, {found.by_stage[stage]:.0%}",
    )
    if found.by_rank[rank] >= max(_EXPLAINS, 0.8 * found.by_stage[stage_of[rank]]):
        return (_slow_rank(found, rank, f"pipeline stage {stage_of[rank]}", "compute"),), told
    if found.by_stage[stage] < _EXPLAINS:
        return (), told
    ranks = sorted(rank for rank, its in stage_of.items() if its == stage)
    detail = f"pipeline stage {stage}: all its ranks {fold_ranks(ranks)} alike"
    return tuple(_slow_rank(found, rank, detail, "more work in its stage") for rank in ranks), told


def _slow_rank(found: WhatIf, rank: int, detail: str, cause: str) -> Culprit:
    ratio = round(found.rank_ratio.get(rank, 0.0), 2)
    return Culprit(rank, None, "", "forward and backward", ratio, "high", cause, detail)
