"""What ``/metrics`` tells of ranks: distributions over all of them, and single ranks by name."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from keepstep.core.layout import ParallelLayout
from keepstep.view.metric_rows import MetricRows, escaped, label_value
from keepstep.view.metric_table import (
    METRICS,
    MOST_INCIDENTS,
    MOST_RANKS_EACH,
    MOST_WORST,
    PERCENTILES,
    SLOW_RATIO,
)
from keepstep.view.named_series import NamedSeries
from keepstep.view.run_snapshot import RankTable, RunSnapshot
from keepstep.view.samples import SampleStore

_Floats = npt.NDArray[np.float32]
_MOST_STAGES = 256
_LEAST_COLUMNS = 8  # of samples, before a run has a usual pace
_SINGLE = (
    "keepstep_rank_own_ratio",
    "keepstep_rank_own_seconds",
    "keepstep_rank_lag_steps",
    "keepstep_rank_info",
)


def pace_s(ranks: RankTable | None) -> float:
    """Duration of the last iteration, the median over the ranks that have finished one; NaN if none has."""
    return (
        float(np.median(taken)) if ranks is not None and len(taken := _known(ranks.iteration_s)) else np.nan
    )


def usual_pace_s(samples: SampleStore) -> float:
    """Duration of an iteration that three quarters of the run were slower than; NaN while little is known."""
    taken = samples.series().iteration_s
    taken = taken[taken > 0]
    return float(np.percentile(taken, 25)) if len(taken) >= _LEAST_COLUMNS else np.nan


def put_ranks(rows: MetricRows, ranks: RankTable | None) -> None:
    """Counts of ranks, and distributions over them."""
    if ranks is None:
        return
    for condition, count in (
        ("heard", len(ranks)),
        ("dead", np.count_nonzero(~ranks.is_alive)),
        ("unwatched", np.count_nonzero(~ranks.is_watched)),
        ("overdue", np.count_nonzero(ranks.overdue_s > 0)),
    ):
        rows.put("keepstep_ranks", int(count), condition)
    for name, values in (
        ("keepstep_ranks_own_seconds", _known(ranks.self_s)),
        ("keepstep_ranks_iteration_seconds", _known(ranks.iteration_s)),
        ("keepstep_ranks_idle_seconds", _finite(ranks.idle_s)),
        ("keepstep_ranks_lag_steps", _lag(ranks)),
    ):
        if len(values):
            for percentile, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
                rows.put(name, round(float(value), 6), str(percentile))


def single_ranks(snapshot: RunSnapshot, named: NamedSeries, now_s: float) -> bytes:
    """The series of single ranks as text: of every rank of a small job, of the worst ranks of a large one.

    A text at once, as prometheus-client takes 17 µs for each of what may be 16,000 series.
    """
    ranks = snapshot.ranks
    if ranks is None or not len(ranks):
        return b""
    lag, ratio = _lag(ranks), own_ratio(snapshot, ranks)
    shows_all = len(ranks) <= MOST_RANKS_EACH
    chosen = np.arange(len(ranks)) if shows_all else _notable(snapshot, ranks, ratio, lag)
    columns = [one[chosen].tolist() for one in (ranks.rank, ranks.node, ratio, _finite(ranks.self_s), lag)]
    names = {node: label_value(name) for node, name in snapshot.node_names(columns[1]).items()}
    run = escaped(label_value(snapshot.name))
    values: dict[str, list[str]] = {name: [] for name in _SINGLE}
    for rank, node, own, own_s, behind, gpu in zip(*columns, _places(ranks.node, chosen), strict=True):
        name = names.get(node, "")
        if not named.admits((str(rank), name), now_s):
            if not shows_all:
                continue
            name = ""  # it has moved too often: without a node its series stays one
        labels = f'node="{escaped(name)}",rank="{rank}",run="{run}"'
        if own == own:
            values["keepstep_rank_own_ratio"].append(f"{{{labels}}} {own:.6g}")
        values["keepstep_rank_own_seconds"].append(f"{{{labels}}} {own_s:.6g}")
        values["keepstep_rank_lag_steps"].append(f"{{{labels}}} {behind:.0f}")
        values["keepstep_rank_info"].append(f'{{gpu="{gpu if name else ""}",{labels}}} 1')
    lines: list[str] = []
    for metric in map(METRICS.__getitem__, _SINGLE):
        lines += [f"# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {metric.kind}"]
        lines += [metric.name + value for value in values[metric.name]]
    return ("\n".join(lines) + "\n").encode()


def own_ratio(snapshot: RunSnapshot, ranks: RankTable) -> _Floats:
    """Each rank's own time over the median of its peers: the ranks of its pipeline stage, or all. NaN: not known."""
    own_s = _finite(ranks.self_s)
    own_s[own_s <= 0] = np.nan
    stage = np.zeros(len(ranks), np.int64)
    layout = snapshot.layout
    if layout is not None and 1 < layout.pp <= _MOST_STAGES and len(ranks) and ranks.rank.min() >= 0:
        stages = _stages(layout)
        if int(ranks.rank.max()) < len(stages):
            stage = stages[ranks.rank]
    ratio = np.full(len(ranks), np.nan, np.float32)
    for one in range(int(stage.max(initial=0)) + 1):
        peers = np.flatnonzero((stage == one) & ~np.isnan(own_s))
        if len(peers):
            ratio[peers] = own_s[peers] / np.median(own_s[peers])
    return ratio


def _notable(snapshot: RunSnapshot, ranks: RankTable, ratio: _Floats, lag: _Floats) -> npt.NDArray[np.int64]:
    """Rows of the ranks with the longest own times, those furthest behind, as far as that is unusual, and culprits."""
    own = np.nan_to_num(ratio, nan=0.0)
    slow, behind = _largest(own), _largest(lag)
    blamed = [
        one.rank
        for incident in snapshot.open_incidents[-MOST_INCIDENTS:]
        for one in incident.culprits[:MOST_WORST]
        if one.rank is not None
    ]
    culprits = np.flatnonzero(np.isin(ranks.rank, blamed))
    return np.unique(np.concatenate([slow[own[slow] >= SLOW_RATIO], behind[lag[behind] > 1], culprits]))


def _largest(values: _Floats) -> npt.NDArray[np.intp]:
    return np.argpartition(values, -MOST_WORST)[-MOST_WORST:]


def _places(nodes: npt.NDArray[np.int32], chosen: npt.NDArray[np.int64]) -> list[int]:
    """For each chosen row its place among the rows of its node."""
    order = np.argsort(nodes, kind="stable")
    place = np.empty(len(nodes), np.int64)
    place[order] = np.arange(len(nodes))
    return (place[chosen] - np.searchsorted(nodes, nodes[chosen], sorter=order)).tolist()


@lru_cache(maxsize=4)
def _stages(layout: ParallelLayout) -> npt.NDArray[np.int64]:
    return layout.all_coordinates()["pp"]


def _lag(ranks: RankTable) -> _Floats:
    return (ranks.step.max(initial=-1) - ranks.step).astype(np.float32)


def _finite(values: npt.NDArray[np.float32]) -> _Floats:
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def _known(values: npt.NDArray[np.float32]) -> _Floats:
    finite = _finite(values)
    return finite[finite > 0]
