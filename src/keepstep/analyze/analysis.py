"""Finds out which kind of trace lies at a path, has it read, and has incidents located in it."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from keepstep.analyze._call_logs import slow_in_calls
from keepstep.analyze._episodes import judged, slow_in_iterations
from keepstep.analyze._ras import in_status
from keepstep.analyze._training_logs import in_training_log
from keepstep.core.errors import RunError, TraceError
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Incident
from keepstep.core.layout import DIMENSIONS, ParallelLayout
from keepstep.core.ranges import fold_ranks
from keepstep.core.regular_files import read_regular
from keepstep.core.summary import GroupInfo
from keepstep.locate import WhatIf, hidden_waits, locate_hang, step_graphs, waits_seen, what_if
from keepstep.report.incidents import read_incident
from keepstep.traces import open_run
from keepstep.traces.call_log import looks_like_call_log, read_call_log
from keepstep.traces.dump_files import dumps_at_the_top, dumps_below, find_dumps, is_dump, ranks_of
from keepstep.traces.flight_recorder import read_dumps
from keepstep.traces.log_text import is_text, utf16_encoding
from keepstep.traces.operation_tables import is_parquet, read_operation_table
from keepstep.traces.ras import MOST_BYTES, looks_like_ras, read_ras
from keepstep.traces.ras_service import ask
from keepstep.traces.ras_status import RasAnswer
from keepstep.traces.training_log import EXPECTED, looks_like_training_log, read_training_log

_FORMATS = (
    "a folder of a keepstep run, a folder with a flight-recorder dump per rank (dump_0, dump_1, …), a training log "
    "(Megatron-LM, NeMo, torchtitan, DeepSpeed, Lightning), MegaTrace call logs, an operation table (Parquet), or an "
    "answer of NCCL's RAS"
)
_SLOW = 1.05  # least ratio of a step's time to its ideal one: less is everyday unevenness
_EXPLAINS = 0.5  # least share of the lost time that a rank or stage must explain to be blamed


@dataclass(frozen=True, slots=True)
class Analysis:
    """``incidents`` as a live run would have written them; ``missing``: what is not in the trace or cannot be read."""

    source: str  # the kind of trace
    incidents: tuple[Incident, ...]
    missing: tuple[str, ...] = ()


def analyze(path: Path, layout: ParallelLayout | None = None) -> Analysis:
    """Judge a trace. With a declared ``layout`` culprits are told with their coordinates in it.

    Raises:
        TraceError: there is nothing at ``path`` that can be read, or its ranks are not those of the layout; the message
            says what was expected.
    """
    try:
        found = _judge(path, layout)
    except OSError as error:
        raise TraceError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: what is compressed in it is damaged: {error}") from error
    except MemoryError as error:
        raise TraceError(f"{path}: needs more memory than this process may have") from error
    return _with_places(found, layout)


def analyze_running(
    address: tuple[str, int],
    layout: ParallelLayout | None = None,
    wait: Callable[[float], object] = time.sleep,
    apart_s: float = 10.0,
) -> Analysis:
    """Judge a running job by what NCCL's RAS answers at an address (host, port).

    It is asked twice, ``apart_s`` seconds apart, since in a job that works the counts of ranks differ, too; ``wait``
    lets that time pass.

    Raises:
        TraceError: as `analyze`, or RAS does not answer.
    """
    where = f"{address[0]}:{address[1]}"
    first = _answer(ask(*address), where)
    wait(apart_s)
    return _with_places(_status([first, _answer(ask(*address), where)], where, layout, apart_s), layout)


def _answer(data: bytes, where: object) -> RasAnswer:
    try:
        return read_ras(data)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from error


def _status(
    answers: Sequence[RasAnswer], where: object, layout: ParallelLayout | None, apart_s: float = 0.0
) -> Analysis:
    incidents, missing = in_status(answers, apart_s)
    _check(layout, Path(str(where)), max((one.size for one in answers[-1].communicators), default=0))
    return Analysis("status of NCCL's RAS", incidents, missing)


def _with_places(found: Analysis, layout: ParallelLayout | None) -> Analysis:
    if layout is None:
        return found
    return replace(found, incidents=tuple(_placed(incident, layout) for incident in found.incidents))


def _placed(incident: Incident, layout: ParallelLayout) -> Incident:
    """The incident with the coordinates of its culprits in the layout."""
    culprits: list[Culprit] = []
    for culprit in incident.culprits:
        if culprit.rank is not None:
            at = layout.coordinates(culprit.rank)
            where = ", ".join(f"{name} {index}" for name, index in at.items() if layout.size(name) > 1)
            culprit = replace(culprit, detail="; ".join(filter(None, (culprit.detail, where))))
        culprits.append(culprit)
    return replace(incident, culprits=tuple(culprits))


def _check(layout: ParallelLayout | None, where: Path, ranks: int, listed: int = 0) -> None:
    """Raise TraceError if a trace does not fit the layout.

    ``ranks``: one more than the highest rank in the trace ``where``; ``listed``: the number of ranks that the trace
    says the job has, 0 if it does not say.
    """
    if layout is None:
        return
    said = f"--layout {layout} has ranks 0 to {layout.world_size - 1}"
    if ranks > layout.world_size:
        raise TraceError(
            f"{where}: has rank {ranks - 1}, but {said}; change a size, or take out what is of another job"
        )
    if 0 < listed < layout.world_size:
        raise TraceError(f"{where}: its job has ranks 0 to {listed - 1}, but {said}; change a size")


def _judge(path: Path, layout: ParallelLayout | None) -> Analysis:
    if not path.exists():
        raise TraceError(f"{path}: there is nothing there; give {_FORMATS}")
    if path.is_dir():
        return _folder(path, layout)
    if not path.is_file():
        raise TraceError(f"{path}: is a FIFO, socket or device; copy what it holds into a file and give that")
    if is_parquet(path):
        return _operation_table(path, layout)
    if looks_like_ras(path):
        return _status([_answer(read_regular(path, MOST_BYTES), path)], path, layout)
    if looks_like_call_log(path):
        return _call_log([path], layout)
    if looks_like_training_log(path):
        return _training_log(path)
    if is_dump(path):
        raise TraceError(f"{path}: is the dump of one rank; give the folder with the dumps of all ranks")
    if encoding := utf16_encoding(path):
        raise TraceError(
            f"{path}: is text in UTF-16; give it in UTF-8: iconv -f {encoding} -t UTF-8 {path.name}"
        )
    lines = f"; lines of a training log that are known: {EXPECTED}" if is_text(path) else ""
    raise TraceError(f"{path}: is no trace that keepstep knows; give {_FORMATS}{lines}")


def _folder(path: Path, layout: ParallelLayout | None) -> Analysis:
    if (path / "run.json").exists():
        return _run(path, layout)
    files = sorted(entry for entry in path.iterdir() if entry.is_file())
    dumps = dumps_at_the_top(path)
    others = [entry for entry in files if entry not in dumps]
    calls = [entry for entry in others if looks_like_call_log(entry)]
    logs = [entry for entry in others if entry not in calls and looks_like_training_log(entry)]
    if dumps:
        left = [*_left(calls, "call log"), *_left(logs, "training log")]
        return _besides(_flight_recorder(dumps, layout), left)
    below = dumps_below(path)
    if calls or len(logs) == 1:
        folders = sorted({dump.parent for dump in below})
        left = [*_left(logs if calls else [], "training log"), *_left(folders, "flight-recorder dumps")]
        return _besides(_call_log(calls, layout) if calls else _training_log(logs[0]), left)
    if logs and not below:
        names = ", ".join(entry.name for entry in logs[:4])
        raise TraceError(f"{path}: holds {len(logs)} training logs ({names}, …); give one of them")
    if dumps := below or find_dumps(path):
        return _besides(_flight_recorder(dumps, layout), _left(logs, "training log"))
    raise TraceError(f"{path}: nothing in it is a trace that keepstep knows; give {_FORMATS}")


def _left(files: Sequence[Path], kind: str) -> list[str]:
    """A line that says which files of a folder were left, being of a kind that was not wanted."""
    if not files:
        return []
    names = ", ".join(entry.name for entry in files[:3]) + (", …" if len(files) > 3 else "")
    return [f"what is in {names} ({kind}), left aside; give it by itself"]


def _besides(read: Analysis, left: Sequence[str]) -> Analysis:
    """The analysis of one kind of trace, which says what was read and what was left, if anything was."""
    if not left:
        return read
    return replace(read, missing=(*read.missing, *(f"{line} (read: {read.source})" for line in left)))


def _run(path: Path, layout: ParallelLayout | None) -> Analysis:
    """The incidents that the controller wrote; if it wrote none into this folder, those in the logged iterations."""
    run = open_run(path)
    try:
        run.describe()
        unread: tuple[str, ...] = ()
    except RunError as error:
        unread = (str(error),)
    read = [_incident(file) for file in sorted((run.path / "incidents").glob("[0-9]*.json"))]
    if run.status() is not None or read:
        incidents = tuple(one for one in read if isinstance(one, Incident))
        missing = tuple(one for one in read if isinstance(one, str))
        world = max((incident.world_size for incident in incidents), default=0)
        _check(layout, path, world, world)
        return Analysis("keepstep run", incidents, missing + unread)
    broken: Counter[Path] = Counter()
    iterations = list(run.iterations(broken))
    _check(layout, path, max((one.rank for one in iterations), default=-1) + 1)
    elsewhere = f"{path}: what the controller wrote; it is in the run folder of node 0"
    lines = tuple(f"{file}: {count} lines cannot be read" for file, count in broken.items())
    return Analysis("keepstep run", tuple(slow_in_iterations(iterations)), (elsewhere, *unread, *lines))


def _incident(file: Path) -> Incident | str:
    """The incident in a file, or why it cannot be read."""
    try:
        return read_incident(file)
    except RunError as error:
        return str(error)


def _flight_recorder(files: Sequence[Path], layout: ParallelLayout | None) -> Analysis:
    dumps = read_dumps(files, layout.world_size if layout else 0)
    highest = max((state.rank for state in dumps.states), default=-1)
    last = next((path for path, rank in ranks_of(files).items() if rank == highest), files[0].parent)
    _check(layout, last, dumps.world_size, dumps.listed)
    nodes = dict.fromkeys(range(dumps.world_size), "")
    groups = dict(dumps.groups)
    if layout is not None:
        groups.update((name, _completed(groups[name], layout)) for name in dumps.inferred)
    evidence = Evidence(groups, nodes, states=dumps.states)
    missing = (*dumps.missing, "stacks and phases: a flight recorder has none")
    if not waits_seen(evidence):
        tells_ends = all(state.device is None for state in dumps.states)
        why = "all that was enqueued is done" if tells_ends else "all ranks have called as many"
        return Analysis("flight recorder", (), (*missing, f"an operation in flight: {why}"))
    diagnosis = locate_hang(evidence)
    if diagnosis.kind == "hang":
        hidden = hidden_waits(evidence)
        known = {one.rank for one in diagnosis.culprits if one.rank not in hidden}
        diagnosis = diagnosis.doubted(
            "what ranks wait for: the ends of their operations are not recorded", known
        )
    hang = Incident(1, diagnosis.kind, None, None, None, None, (), (), (), (), status="ended")
    hang = judged(hang, diagnosis, len(dumps.states), dumps.world_size)
    return Analysis("flight recorder", (hang,), missing)


def _completed(group: GroupInfo, layout: ParallelLayout) -> GroupInfo:
    """The group with all its members, where only one group of the layout holds the known ones."""
    if len(group.members) < 2:
        return group
    dimensions = [name for name in DIMENSIONS if layout.size(name) > 1]
    fitting = {layout.group_of(group.members[0], name) for name in dimensions}
    fitting = {members for members in fitting if set(group.members) <= set(members)}
    return replace(group, members=fitting.pop()) if len(fitting) == 1 else group


def _training_log(path: Path) -> Analysis:
    return Analysis("training log", *in_training_log(read_training_log(path), path.name))


def _call_log(paths: Sequence[Path], layout: ParallelLayout | None) -> Analysis:
    log = read_call_log(paths)
    _check(layout, paths[0] if len(paths) == 1 else paths[0].parent, max(log.calls, default=-1) + 1)
    return Analysis("call log", *slow_in_calls(log))


def _operation_table(path: Path, layout: ParallelLayout | None) -> Analysis:
    """The incident in an operation table: the rank or stage that accounts for most of the time that steps lose."""
    operations, missing = read_operation_table(path)
    graphs = step_graphs(operations)
    graph = graphs[0]
    if len(graphs) > 1:
        others = sum(len(other.steps) for other in graphs[1:])
        missing = (*missing, f"{path.name}: {others} steps with other operations than most, not looked at")
    _check(layout, path, max(graph.stage_of) + 1)
    if absent := _absent(graph.stage_of):
        missing = (*missing, f"{path.name}: operations of ranks {fold_ranks(absent)}")
    found = what_if(graph)
    if found.ideal_s <= 0:
        raise TraceError(f"{path}: its operations take no time, so none can be slow; the durations are lost")
    if found.slowdown < _SLOW:
        return Analysis("operation table", (), missing)
    culprits, told = _straggler(found, graph.stage_of)
    blamed = {culprit.rank for culprit in culprits}
    ideal = f"a step takes {found.actual_s:.3g} s, {found.ideal_s:.3g} s were all ranks alike"
    incident = Incident(
        number=1,
        kind="slow",
        onset_step=graph.steps[0],
        detected_step=None,
        relief_step=None,
        job_slowdown=found.slowdown,
        culprits=culprits,
        victims=tuple(sorted(set(graph.stage_of) - blamed)) if blamed else (),
        evidence=(ideal, *told),
        missing=() if culprits else ("one rank or stage that accounts for half of the lost time",),
        iteration_before_s=found.ideal_s,
        iteration_after_s=found.actual_s,
        ranks_reporting=len(graph.stage_of),
        world_size=len(graph.stage_of),
    )
    return Analysis("operation table", (incident,), missing)


def _absent(ranks: Collection[int]) -> list[int]:
    """Ranks missing in a table that should have every rank, or every n-th (one of each tensor-parallel group)."""
    ordered = sorted(ranks)
    step = min((b - a for a, b in pairwise(ordered)), default=1)
    if ordered[-1] // step > 2 * len(ordered):
        return []  # the ranks are not numbered like that
    return sorted(set(range(ordered[0] % step, ordered[-1], step)) - set(ordered))


def _straggler(found: WhatIf, stage_of: Mapping[int, int]) -> tuple[tuple[Culprit, ...], tuple[str, ...]]:
    """Culprits and evidence: a rank if it explains most of what its stage does, else a stage's ranks, or nobody."""
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
