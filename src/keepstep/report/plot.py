"""A plot of step times and incidents (PNG or SVG), which needs the extra ``plot``."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from keepstep.core.errors import UsageError
from keepstep.core.incident import Incident

# Colours that can be told apart without colour vision.
_INK, _BAND, _LINE, _MARK = "#333333", "#9ecae1", "#08519c", "#d95f02"


def plot_step_times(
    points: Iterable[tuple[int, int, float]], incidents: Sequence[Incident], out: Path, *, title: str = ""
) -> Path:
    """Draw the iteration time over the steps into ``out`` (.png or .svg) and its data beside it (.csv).

    ``points`` are (rank, step, seconds). The line is the median over ranks, the band their range. Returns the CSV.
    Raises UsageError for another suffix or when matplotlib is absent.
    """
    if out.suffix not in (".png", ".svg"):
        raise UsageError(f"{out}: plots are written as .png or .svg; name the file so")
    pyplot = _pyplot()
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for _, step, seconds in points:
        steps[step].append(seconds)
    if not steps:
        raise UsageError(f"{out}: nothing to plot, no finished step was recorded")
    table = [(step, min(v), sorted(v)[len(v) // 2], max(v)) for step, v in sorted(steps.items())]
    data = out.with_suffix(".csv")
    with data.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "fastest_rank_s", "median_s", "slowest_rank_s"])
        writer.writerows(table)

    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    x = [row[0] for row in table]
    fastest, slowest = [r[1] for r in table], [r[3] for r in table]
    axes.fill_between(x, fastest, slowest, color=_BAND, alpha=0.6, lw=0, label="range over ranks")
    axes.plot(x, [r[2] for r in table], color=_LINE, lw=1.2, label="median over ranks")
    for incident in incidents:
        _draw_incident(axes, incident, x[-1])
    axes.set_xlabel("step")
    axes.set_ylabel("iteration time (s)")
    axes.set_ylim(bottom=0, top=1.25 * max(r[3] for r in table[min(2, len(table) - 1) :]))
    axes.set_title(title, color=_INK, loc="left", fontsize=10)
    axes.legend(loc="upper right", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)
    return data


def _draw_incident(axes: Any, incident: Incident, last_step: int) -> None:
    onset = incident.onset_step
    if onset is None:
        return
    end = incident.relief_step if incident.relief_step is not None else last_step
    axes.axvspan(onset, max(end, onset), color=_MARK, alpha=0.10, lw=0)
    axes.axvline(onset, color=_MARK, lw=1, ls="--")
    if incident.relief_step is not None:
        axes.axvline(incident.relief_step, color=_MARK, lw=1, ls=":")
    text = f"{incident.number:04d} {incident.kind}"
    at: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate(text, (onset, 1.0), xytext=(3, -10), fontsize=8, color=_INK, **at)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install 'keepstep[plot]'") from error
    mpl.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot
