"""``keepstep checkpoint plan``: how often to checkpoint, and what it costs."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from keepstep.checkpoint.storage.cost import Costs, Interval, Limits, ShardedModel, best_interval, save_gain
from keepstep.cli._parsing import Parser, print_json
from keepstep.core.errors import RunError, UsageError
from keepstep.traces import open_run

_DAY_S = 86_400.0
_COUNTS = (
    ("--data-parallel", 1, "replicas, with --parameters"),
    ("--nodes", 1, "nodes of the job"),
    ("--ranks-per-node", 8, "ranks on a node"),
)
_SIZES = (
    ("--state-size", "", "state of the rank that saves most, e.g. 38GB"),
    ("--parameters", "", "instead of --state-size, e.g. 175B: 2 + 12 bytes each, as ZeRO"),
    ("--memory-bandwidth", "5GB", "copy of one rank to its node's memory, a second (default: %(default)s)"),
    ("--backup-bandwidth", "2GB", "what a node may send its neighbour, a second (default: %(default)s)"),
    (
        "--storage-bandwidth",
        "5GB",
        "what the storage takes from the whole job, a second (default: %(default)s)",
    ),
)
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40, "PI": 2.0**50}

_ABOUT = (
    "Say after how many steps to save: to memory, and to storage. The default values are guesses: give yours."
)


def main(argv: Sequence[str]) -> int:
    """Print how often to save. Raises UsageError for values that cannot be used, RunError for a run without a step."""
    parser = Parser("checkpoint plan", _ABOUT)
    text = "a run whose measured step time is taken"
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help=text)
    text = "failures of the whole job in a day (m/d; default: %(default)g)"
    parser.add_number("--failures-per-day", 1.0, text, "N")
    text = "seconds from a failure to training again, lost work apart (s0; default: %(default)g)"
    parser.add_number("--recovery", 60.0, text)
    parser.add_number("--step-time", 0.0, "seconds of a training step (τ); default: measured in RUN")
    for flag, count, text in _COUNTS:
        parser.add_argument(flag, type=int, default=count, metavar="N", help=f"{text} (default: %(default)s)")
    for flag, size, text in _SIZES:
        metavar = "COUNT" if flag == "--parameters" else "BYTES"
        parser.add_argument(flag, default=size, metavar=metavar, help=text)
    text = "seconds that a checkpoint adds to its step, measured (k0; default: the whole copy)"
    parser.add_number("--step-increase", None, text)
    text = "largest share of training time for checkpoints (default: %(default)g)"
    parser.add_number("--max-slowdown", 0.05, text, "SHARE")
    parser.add_json("print all terms as JSON")
    given = parser.parse(argv)
    step_s, step_source = (given.step_time, "given") if given.step_time else measured_step(given.run)
    nodes, ranks_per_node = given.nodes, given.ranks_per_node
    model = None
    if given.parameters:
        model = _model(given.parameters, nodes, ranks_per_node, given.data_parallel)
    if (model is None) == (not given.state_size):
        raise UsageError("give either --state-size BYTES of a rank, or --parameters COUNT")
    rank_bytes = model.most_saved_bytes if model else quantity("--state-size", given.state_size)
    node_bytes = rank_bytes * ranks_per_node
    job_bytes = model.saved_bytes if model else node_bytes * nodes
    memory = quantity("--memory-bandwidth", given.memory_bandwidth)
    backup = quantity("--backup-bandwidth", given.backup_bandwidth)
    storage = quantity("--storage-bandwidth", given.storage_bandwidth)
    copy_s, backup_s, storage_s = rank_bytes / memory, node_bytes / backup, job_bytes / storage
    costs = Costs(
        period_s=_DAY_S,
        failures=given.failures_per_day,
        recovery_s=given.recovery,
        checkpoint_s=copy_s if given.step_increase is None else given.step_increase,
        step_s=step_s,
    )
    best = best_interval(costs, Limits(copy_s=copy_s, backup_s=backup_s, slowdown=given.max_slowdown))
    terms: dict[str, Any] = {
        "step_s": step_s,
        "step_source": step_source,
        "failures_per_day": costs.failures,
        "recovery_s": costs.recovery_s,
        "rank_bytes": rank_bytes,
        "node_bytes": node_bytes,
        "job_bytes": job_bytes,
        "copy_s": copy_s,
        "checkpoint_s": costs.checkpoint_s,
        "backup_s": backup_s,
        "storage_s": storage_s,
        "save_gain": save_gain(memory, storage / (nodes * ranks_per_node)),
        "load_s": model.load_s(memory, backup) if model else copy_s,
        "optimum_steps": best.optimum_steps,
        "interval_steps": best.steps,
        "decided_by": best.decided_by,
        "storage_steps": max(best.steps, -int(-storage_s // costs.step_s)),
        "saving_s": best.saving_s,
        "lost_s": best.lost_s,
        "total_s": best.total_s,
    }
    if given.json:
        print_json(terms)
    else:
        _print(terms, best, costs)
    return 0


def quantity(flag: str, text: str) -> float:
    """Bytes or counts such as ``38GB``, ``2GiB/s``, ``175B``. Raises UsageError naming the flag."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGTP]I?)?(B)?(?:/S)?", text.strip().upper())
    if not match or float(match[1]) <= 0:
        raise UsageError(f"{flag} {text}: give a number above 0 with a unit, e.g. 38GB or 2GiB")
    unit = match[2] or ""
    return float(match[1]) * (_BINARY[unit] if unit in _BINARY else _UNITS[unit])


def _model(text: str, nodes: int, ranks_per_node: int, data_parallel: int) -> ShardedModel:
    # In a number of parameters, B is not the unit of bytes but a billion, as in 175B.
    billions = re.fullmatch(r"(\d+(?:\.\d*)?)\s*[bB]", text.strip())
    count = float(billions[1]) * 1e9 if billions else quantity("--parameters", text)
    return ShardedModel(count, nodes, data_parallel, ranks_per_node)


def measured_step(name: str) -> tuple[float, str]:
    """The median step time of a run in seconds, and where it is from. Raises UsageError or RunError without one."""
    if not name:
        raise UsageError("no step time: give --step-time SECONDS, or a run that has finished steps")
    durations = [one.duration_s for one in open_run(name).iterations() if one.duration_s > 0]
    if not durations:
        raise RunError(f"{name}: no finished step in it; give --step-time SECONDS")
    return statistics.median(durations), f"median of {len(durations)} iterations in {name}"


def _print(terms: dict[str, Any], best: Interval, costs: Costs) -> None:
    every_s = best.steps * costs.step_s
    print(f"memory    every {_steps(best.steps)} ({time_text(every_s)}), decided by: {_WHY[best.decided_by]}")
    apart_s = terms["storage_steps"] * costs.step_s
    print(f"storage   at most every {_steps(terms['storage_steps'])} ({time_text(apart_s)})")
    print(
        f"costs     {best.total_s / costs.period_s:.2%} of the time: {time_text(best.saving_s)} a day for checkpoints, "
        f"{time_text(best.lost_s)} of work done twice, {time_text(best.recovery_s)} of recovery"
    )
    print()
    sizes = [bytes_text(terms[name]) for name in ("rank_bytes", "node_bytes", "job_bytes")]
    gain = terms["save_gain"]
    rows = [
        ("step time τ", time_text(costs.step_s), terms["step_source"]),
        ("failures m/d", f"{costs.failures:g} a day", ""),
        ("recovery s0", time_text(costs.recovery_s), "without lost work"),
        ("checkpoint k0", time_text(costs.checkpoint_s), "what one adds to the training's time"),
        ("optimum t*", f"{best.optimum_steps:.1f} steps", "sqrt(2·d·k0/m)/τ, without limits"),
        ("copy", time_text(terms["copy_s"]), f"{sizes[0]} of the rank that saves most"),
        ("backup", time_text(terms["backup_s"]), f"{sizes[1]} of a node to its neighbour"),
        (
            "storage k1",
            time_text(terms["storage_s"]),
            f"{sizes[2]} of the job, {gain:.0f} times slower than memory",
        ),
        ("load", time_text(terms["load_s"]), "from the nodes' caches"),
    ]
    for name, value, note in rows:
        print(f"{name:<14}  {value:<12}  {note}".rstrip())


_WHY = {
    "optimum": "least total cost",
    "step": "it costs nothing",
    "copy": "the copy lasts that long",
    "backup": "the backup lasts that long",
    "slowdown": "--max-slowdown",
}


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def time_text(seconds: float) -> str:
    """A duration in the unit that reads best: ``1.5 s``, ``22 min``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def bytes_text(count: float) -> str:
    """A size in the largest unit that leaves a number above 1: ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"
