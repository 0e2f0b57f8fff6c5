"""What holds on a GPU, with NCCL and CUDA themselves: records, times, overhead, validation, checkpoint, recovery.

    python -m benchmarks.gpu [--quick] [--part PART ...] [--json FILE] [--cpu]

Every part has jobs of its own under `keepstep run`; one that fails, or has no time left, is left out with its reason.
Ends within 9 minutes (3 with ``--quick``); without a GPU at once. ``--cpu`` tries the bench itself on Gloo: then
nothing is judged. Nor is it on the stand-in GPU, where "gate", "snapshot", "validation" and "recovery" run as well
(tests/cuda/test_gpu_bench.py).

On one GPU a job has one rank, and NCCL launches nothing for its in-place all-reduces: the calls are there, the
transfers are not. A gather of one rank is a copy on the device, a mean of one rank a kernel of NCCL's: with these the
shim's times are compared. Then two ranks on the GPU, and real transfers: NCCL lets ranks share one from 2.30 on, before
that where they are told to be on two hosts, so over sockets.

Verdicts: the jobs and faults of the stand-in, on two ranks that share the GPU (benchmarks/gpu/verdicts.py).

Overhead: whole jobs in turns, one with everything that `keepstep run` does (probe, shim, plugin, agent, controller),
one with ``--no-watch``; the interval is over the pairs. And within a job: steps that the shim measures beside those
that it leaves out.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._intervals import interval
from benchmarks._report import Report, bench_arguments
from benchmarks.gpu.bench import Bench, Kind
from benchmarks.gpu.gate import gate
from benchmarks.gpu.judge import (
    TIMED,
    beside,
    collectives,
    goings_back,
    incomplete,
    last_words,
    measuring_adds,
)
from benchmarks.gpu.recovery import recovery
from benchmarks.gpu.snapshot import snapshot
from benchmarks.gpu.validation import validation
from benchmarks.gpu.verdicts import RANKS, SLOW, STUCK, Told, mps, play_all
from benchmarks.stand_in.device import is_stand_in

COMPLETE_GOAL = "events complete and ordered"
TIMES_GOAL = "GPU times within 2 % of the PyTorch profiler's"
STEP_GOAL = "iteration overhead ≤ 0.1 % with 95 % confidence interval (A/B alternating)"
GEMM_GOAL = "GEMM validation ≤ 0.5 s"
CHECKPOINT_GOAL = "memory checkpoint from GPU through pinned buffers with its GB/s against `cudaMemcpy`"
MEASURE_GOAL = "thinned by itself to ≤ 0.1 % of the step"
VERDICT_GOAL = "right rank and kind ≥ 97 %"
ERROR_GOAL = "iteration time within 0.5 % of the device's own clock"
ERROR_PERCENT, VERDICT_PERCENT = 0.5, 97.0
TIMES_PERCENT, STEP_PERCENT, GEMM_S = 2.0, 0.1, 0.5
ONE_RANK = "one rank: NCCL launches nothing for an in-place all-reduce"


# --- parts -----------------------------------------------------------------------------------------------------------


def events(bench: Bench, ranks: int = 1) -> None:
    """Records of a training, and times of single calls beside the profiler's."""
    found = bench.job("events", ranks=ranks)
    for rank, result in enumerate(found):
        who = "" if ranks == 1 else f"{ranks} ranks on one GPU: rank {rank}: "
        training, ring = result["training"], result["ring"]
        calls = collectives(training["calls"])
        wrong: dict[str, Any] = incomplete(calls, training["made"])
        wrong |= {what: count for what, count in ring.items() if count}
        wrong |= {"dropped (status.json)": result["dropped"]} if result.get("dropped") else {}
        back = goings_back(calls)
        made: dict[str, Any] = {"calls made": training["made"], **wrong}
        limit = ONE_RANK if ranks == 1 else None
        bench.add(f"{who}records", len(calls), "", goal=COMPLETE_GOAL, met=not wrong, peers=made, limit=limit)
        worst = {
            "timed": sum(bool(call.flags & TIMED) for call in calls),
            "worst (µs)": round(max(back, default=0) / 1e3, 1),
        }
        met = worst["timed"] > 0 and not back
        bench.add(f"{who}GPU times that go back", len(back), "", goal=COMPLETE_GOAL, met=met, peers=worst)
        plugin = {what: int(value) for what, value in result["plugin"].items()}
        count = plugin.pop("communicators")
        met = plugin["came"] == 1 and count > 0
        bench.add(f"{who}communicators that the plugin sees", count, "", met=met, peers=plugin)
        for batch in result["batches"]:
            times(bench, who, batch)


def times(bench: Bench, who: str, batch: dict[str, Any]) -> None:
    """One batch of equal calls. The profiler's own durations are what the GPU did between the shim's two events."""
    how = "" if batch["queued"] else ", host waited for"
    name = f"{who}GPU time, {batch['name']} of {batch['mib']} MiB{how}"
    try:
        pairs = beside(collectives(batch["calls"]), batch["profiler"], batch["made"])
    except ValueError as error:
        bench.report.leave_out(name, str(error))
        return
    off = [(ours - theirs) / theirs * 100 for ours, theirs, _ in pairs]
    peers: dict[str, float | int | str] = {
        "profiler (µs)": round(statistics.median(theirs for _, theirs, _ in pairs) / 1e3, 1),
        "difference (µs)": round(statistics.median(ours - theirs for ours, theirs, _ in pairs) / 1e3, 2),
        "worst (%)": round(max(off, key=abs), 2),
        "starts later by (µs)": round(statistics.median(later for *_, later in pairs) / 1e3, 1),
    }
    judged: dict[str, Any] = {"goal": TIMES_GOAL, "met": max(map(abs, off)) <= TIMES_PERCENT}
    if not batch["queued"]:
        judged = {
            "limit": "the GPU idles between the shim's event and the call: the host has not enqueued it yet"
        }
    bench.add(name, statistics.median(off), "%", peers=peers, **judged)


def shared(bench: Bench) -> None:
    """The same with two ranks on the GPU."""
    events(bench, 2)


def gemm(bench: Bench) -> None:
    """The device's tests in the middle of a training."""
    (found,) = bench.job("gemm")
    first, again = found["seconds"][0], statistics.median(found["seconds"][1:])
    peers = {
        "again": round(again, 3),
        **{f"{test} (TFLOP/s)": value for test, value in found["figures"].items()},
    }
    limit = "the first in the process, which loads its kernels"
    bench.add("GEMM validation", first, "s", goal=GEMM_GOAL, met=first <= GEMM_S, peers=peers, limit=limit)
    for text in found["failed"]:
        bench.report.leave_out("GEMM validation", text)


def memory_checkpoint(bench: Bench) -> None:
    """GB/s of a state on the GPU into the node's cache."""
    (found,) = bench.job("checkpoint")
    size = found["bytes"] / 1e9
    speeds = {name: round(size / seconds, 2) for name, seconds in found["seconds"].items()}
    save = speeds.pop("save")
    speeds |= {name: round(size / found[name], 2) for name in ("first", "restore")}
    limit = f"{size:.2f} GB of fp32, through a ring of page-locked memory; restored by torch's own copy"
    bench.add("memory checkpoint from the GPU", save, "GB/s", goal=CHECKPOINT_GOAL, peers=speeds, limit=limit)
    bench.add("restored bytes are those saved", "yes" if found["same"] else "no", "", met=found["same"])


def slow_ranks(bench: Bench) -> None:
    """Who is named: the stand-in's jobs and their slow ranks, here."""
    folder = bench.room("slow")
    with mps(folder / "mps") as shared_by:
        found = play_all(SLOW[:4] if bench.quick else SLOW, folder, {**bench.environment(), **shared_by})
    how = "they share the GPU by MPS" if shared_by else "no MPS: they take turns on the GPU"
    told_of(bench, "slow ranks", found, how)
    errors = [told.error for told in found if told.error is not None]
    error = 100 * max(errors, default=float("nan"))
    bench.add("error of an iteration", error, "%", goal=ERROR_GOAL, met=error <= ERROR_PERCENT, limit=how)


def hangs(bench: Bench) -> None:
    """The same for jobs that hang or die."""
    found = play_all(STUCK[:4] if bench.quick else STUCK, bench.room("stuck"), bench.environment())
    told_of(bench, "hangs and crashes", found, "they take turns on the GPU")


def told_of(bench: Bench, what: str, found: Sequence[Told], how: str) -> None:
    limit = f"{RANKS} ranks on one GPU, {how}; a layer's time is that of a kernel that spins"
    for told in found:
        right = "right" if told.is_right else "wrong"
        bench.add(told.case.name, right, "", met=told.is_right, peers=told.summary())
        if told.exit_code not in (0, None) and not told.named:
            bench.report.leave_out(told.case.name, last_words(told.console))
    right = sum(told.is_right for told in found)
    met = 100 * right >= VERDICT_PERCENT * len(found)
    bench.add(f"{what}: right", f"{right} of {len(found)}", "", goal=VERDICT_GOAL, met=met, limit=limit)
    wrong = sum(told.is_wrong_for_sure for told in found)
    bench.add(f"{what}: wrong with confidence high", wrong, "", goal="0", met=wrong == 0, limit=limit)


def overhead(bench: Bench) -> None:
    """Pairs of whole jobs for as long as there is time, the watched one first in every other."""
    jobs: list[dict[bool, dict[str, Any]]] = []
    longest_s, fewest = 0.0, 2
    while len(jobs) < fewest or bench.left_s() > longest_s:
        begun_s = time.monotonic()
        order = (True, False) if len(jobs) % 2 else (False, True)
        jobs.append({watch: bench.job("steps", watch=watch)[0] for watch in order})
        longest_s = max(longest_s, time.monotonic() - begun_s)
    for size, title in (("large", "GPU-bound"), ("small", "host-bound")):
        for kind, of in (("median", statistics.median), ("mean", statistics.fmean)):
            pairs = [(of(pair[True][size]), of(pair[False][size])) for pair in jobs]
            mean, low, high = interval([(on - off) / off * 100 for on, off in pairs])
            name = f"step time added, {title}, {kind} of a job"
            base_ms = round(statistics.median(off for _, off in pairs) * 1e3, 3)
            peers = {"pairs": len(pairs), "from": round(low, 3), "unwatched step (ms)": base_ms}
            limit = f"95 % interval over pairs of jobs (Student's t); {ONE_RANK}"
            bench.add(f"{name}: mean", mean, "%", peers=peers, limit=limit)
            judged = {"goal": STEP_GOAL, "met": high <= STEP_PERCENT}
            more: dict[str, Any] = judged if (size, kind) == ("large", "median") else {}
            bench.add(f"{name}: interval to", high, "%", limit=limit, **more)
        measuring(bench, title, size, [pair[True] for pair in jobs])


def measuring(bench: Bench, title: str, size: str, jobs: Sequence[dict[str, Any]]) -> None:
    """What the events of measured steps add, by blocks of them and those beside them: the same job, the same minute."""
    added: list[float] = []
    steps = count = 0
    for job in jobs:
        numbers, first = set(job["measured"]), job[f"{size}, from"] + 1
        measured = [number in numbers for number in range(first, first + len(job[size]))]
        added += measuring_adds(job[size], measured)
        steps, count = steps + len(measured), count + sum(measured)
    if len(added) < 2:
        bench.report.leave_out(f"measuring, {title}", f"{len(added)} blocks of measured steps")
        return
    share = count / steps
    mean, low, high = (100 * share * value for value in interval(added))
    peers = {"blocks": len(added), "from": round(low, 4), "share measured (%)": round(100 * share, 1)}
    limit = "95 % interval over blocks of measured steps beside others of the same job, times their share"
    name = f"step time added by measuring, {title}"
    bench.add(f"{name}: mean", mean, "%", peers=peers, limit=limit)
    bench.add(f"{name}: interval to", high, "%", goal=MEASURE_GOAL, met=high <= STEP_PERCENT, limit=limit)


class Part(NamedTuple):
    """A part of the bench, and the seconds that those before it leave it, of the whole bench's."""

    run: Callable[[Bench], None]
    share_s: float
    on_stand_in: bool = False


PARTS = {
    "records and GPU times": Part(events, 20),
    "two ranks on one GPU": Part(shared, 30),
    "GEMM validation": Part(gemm, 15),
    "memory checkpoint": Part(memory_checkpoint, 15),
    "slow ranks": Part(slow_ranks, 55),
    "hangs and crashes": Part(hangs, 95),
    "gate": Part(gate, 45, on_stand_in=True),
    "snapshot": Part(snapshot, 35, on_stand_in=True),
    "validation": Part(validation, 35, on_stand_in=True),
    "recovery": Part(recovery, 60, on_stand_in=True),
    "iteration overhead": Part(overhead, 75),
}
WHOLE_S, QUICK_S, STAND_IN_S = 490.0, 150.0, 1200.0
"""Of the bench: whole, quick, or tried without a GPU."""
_LATE_S = 10  # after that what a part waits for is given up: the whole bench ends within nine minutes
_ENOUGH = 0.75  # the part of its share with which a part begins; with less it is left out


def run_parts(bench: Bench, names: Sequence[str], seconds: float) -> None:
    """Run parts one after the other. Each may take what is left, but for the shares of those after it."""
    scale = seconds / WHOLE_S
    for place, name in enumerate(names):
        part = PARTS[name]
        bench.begin(scale * sum(PARTS[later].share_s for later in names[place + 1 :]))
        least_s = scale * part.share_s * _ENOUGH
        if bench.device == "stand-in" and not part.on_stand_in:
            bench.report.leave_out(name, "it needs a GPU; the stand-in is none")
        elif bench.judged and (left_s := bench.left_s()) < least_s:
            bench.report.leave_out(name, f"{left_s:.0f} s are left for it, less than {least_s:.0f}")
        else:
            try:
                part.run(bench)
            except Exception as error:
                bench.report.leave_out(name, f"{type(error).__name__}: {error}")
            print(f"{name}: done, {bench.left_s():.0f} s left", file=sys.stderr, flush=True)


class TimeOverError(Exception):
    """The time of the whole bench is over."""


def _give_up(*_: object) -> None:
    raise TimeOverError("the time of the whole bench is over")


def no_gpu() -> str:
    """Why nothing can be measured; empty when there is a GPU."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "no GPU that CUDA can use"


def main() -> None:
    parser = bench_arguments("gpu", "What holds on a GPU, with NCCL and CUDA themselves.")
    parser.add_argument("--cpu", action="store_true", help="try the bench on Gloo; nothing is judged")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (repeatable)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the jobs' folders in DIR, which is there"
    )
    chosen = parser.parse_args()
    device: Kind = "cpu" if chosen.cpu else "stand-in" if is_stand_in() else "cuda"
    report = Report("gpu" if device == "cuda" else f"gpu, {device}", quick=chosen.quick)
    why = "" if chosen.cpu else no_gpu()
    if why:
        report.leave_out("everything", why)
    else:
        seconds = STAND_IN_S if device == "stand-in" else QUICK_S if chosen.quick else WHOLE_S
        with nullcontext(chosen.keep) if chosen.keep else tempfile.TemporaryDirectory() as folder:
            bench = Bench(report, Path(folder), device=device, quick=chosen.quick, seconds=seconds)
            if device == "cuda":
                signal.signal(signal.SIGALRM, _give_up)
                signal.alarm(int(seconds) + _LATE_S)
            run_parts(bench, chosen.part or list(PARTS), seconds)
            signal.alarm(0)
    report.finish(chosen.json)


if __name__ == "__main__":
    main()
