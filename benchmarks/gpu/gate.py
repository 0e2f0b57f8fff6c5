"""The gate before the optimizer's step: what it costs, what goes on behind it, and an abort that it stands before."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.judge import added

PAIRS = "95 % interval over pairs by turns in one job (Student's t)"
STUCK = "abort of an all-reduce that never ends, under load"
_GIB = 1 << 30


def gate(bench: Bench) -> None:
    """All of it, an abort last: two ranks on a GPU may be refused, or end the job."""
    bench.room("gate")
    (found,) = bench.job("stall")
    bench.add("the gate stands", "yes" if found["stands"] else "no", "", met=found["stands"])
    if not found["stands"]:
        return
    for name, pairs in (("GPU", found["kernel"]), ("host", found["host"])):
        in_us(bench, f"a gate on a stream with work in it, {name}", pairs, len(pairs))
    for size, title in (("large", "GPU-bound"), ("small", "host-bound")):
        in_us(bench, f"step time added by the gate, {title}", found[size], len(found[size]))
    (found,) = bench.job("held")
    behind(bench, found)
    try:
        aborted, _ = bench.job("abort", ranks=2)
    except RuntimeError as error:
        bench.report.leave_out(STUCK, f"not shown on one GPU: {error}")
    else:
        abort(bench, aborted["tries"])


def in_us(bench: Bench, name: str, pairs: Sequence[Sequence[float]], count: int) -> None:
    """What is added by something, of seconds with it and without."""
    mean, low, high = (1e6 * value for value in added([(one, other) for one, other in pairs]))
    without = 1e6 * statistics.median(other for _, other in pairs)
    peers = {"from": round(low, 2), "to": round(high, 2), "without (µs)": round(without, 1), "pairs": count}
    bench.add(name, mean, "µs", peers=peers, limit=PAIRS)


def behind(bench: Bench, found: dict[str, Any]) -> None:
    """Whether copies and memory are to be had while the compute stream is held."""
    closed = [one for one in found["tries"] if one["closed"]]
    opened = [one for one in found["tries"] if not one["closed"]]
    if not closed:
        bench.report.leave_out("what goes on behind the gate", "no gate stands")
        return
    sizes = {"copy": found["copied"], "malloc": found["wanted"]}
    titles = {"copy": "a copy to pinned memory on another stream", "malloc": "cudaMalloc"}
    for what, title in titles.items():
        held = sum(one[f"{what}_held"] for one in closed)
        times = {
            name: round(1e3 * statistics.median(one[f"{what}_s"] for one in tries), 3)
            for name, tries in (("gate closed (ms)", closed), ("open (ms)", opened))
        }
        peers = {**times, "GiB": round(sizes[what] / _GIB, 3)}
        name = f"{title} while the gate holds the compute stream: done meanwhile"
        bench.add(name, f"{held} of {len(closed)}", "", met=held == len(closed), peers=peers)
    stepped = sum(one["stepped"] for one in closed)
    bench.add(
        "the held step is made once the gate opens",
        f"{stepped} of {len(closed)}",
        "",
        met=stepped == len(closed),
    )


def abort(bench: Bench, tries: Sequence[dict[str, Any]]) -> None:
    """How long an abort takes, and whether the step behind it is fed."""
    came = [one for one in tries if one["abort_s"] is not None]
    if not came:
        bench.report.leave_out(STUCK, "no abort returned within 20 s")
        return
    took = [one["abort_s"] for one in came]
    peers = {
        "from": round(min(took), 3),
        "to": round(max(took), 3),
        "gate open to step made, median (s)": round(statistics.median(one["let_go_s"] for one in came), 3),
        "GPU still busy with the load": f"{sum(one['under_load'] for one in tries)} of {len(tries)}",
    }
    limit = "two ranks on one GPU, over sockets; the gate opens 0.4 s after the abort began, at the latest"
    bench.add(STUCK, statistics.median(took), "s", peers=peers, limit=limit)
    fed = sum(one["fed"] for one in tries)
    bench.add(f"{STUCK}: steps fed while the gate was closed", f"{fed} of {len(tries)}", "", met=fed == 0)
