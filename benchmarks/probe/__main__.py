"""What the probe costs: per call, per training step, and at an import that is not watched.

    python -m benchmarks.probe [--quick] [--json FILE]

Per call: our own code around a Work that is complete at once; and on Gloo, the probe switched on and off in alternating
rounds within one process, in a group of one rank (where it shows) and of two (beside a real transfer).

Overhead: four ranks train a small transformer with DDP, compute emulated by sleeping so that two cores can carry four
ranks, each kept on one of them; probe on and off in alternating blocks of steps, switched by step number on all ranks
together. Off, torch's own functions are back in their places and the steps use a DDP model that was built unwatched:
nothing of the probe is left.
Several jobs, each of fresh processes: the interval is over the jobs.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._intervals import interval
from benchmarks._report import Line, Report, bench_arguments
from benchmarks.probe.nccl_shim import shim_lines

CALL_GOAL = "≤ 40 µs in Python, start and end of every operation"
STEP_GOAL = "≥ 300 pairs, 4 ranks: the interval's upper end ≤ 1 %"
IMPORT_GOAL = "< 1 ms more, nothing can fail"
CALL_BUDGET_US = 40.0
STEP_BUDGET_PERCENT = 1.0
IMPORT_BUDGET_MS = 1.0
PAIRS_WANTED = 300
PAIRS_A_BUILD = 10
WARM_UP_STEPS = 5


# --- run in the worker processes -----------------------------------------------------------------------------------


def start_watched() -> Any:
    """Put the probe in and join the group, as a launched worker would."""
    import torch
    import torch.distributed as dist

    from keepstep import capture

    torch.set_num_threads(1)
    capture.install()
    probe = capture.current()
    dist.init_process_group("gloo")
    assert probe is not None
    assert probe.recorder.writer is not None, "the ring could not be opened"
    return probe


def call_worker(rounds: int) -> dict[str, Any]:
    """Microseconds a call with the probe on and off, per operation; and our own part without any transfer."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    probe = start_watched()
    tensor = torch.ones(256)
    peer = 1 - dist.get_rank()
    world = dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert world is not None
    assert isinstance(alone, dist.ProcessGroup)

    def p2p() -> None:
        requests = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, tensor.clone(), peer)]
        )
        for request in requests:
            request.wait()

    found: dict[str, Any] = {"alone": {}, "two": {}}
    for key, group, count in (("alone", alone, 200), ("two", world, 40)):
        name = group.group_name
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda group=group: dist.all_reduce(tensor, group=group),
            "all_reduce, async": lambda group=group: dist.all_reduce(
                tensor, group=group, async_op=True
            ).wait(),  # pyright: ignore[reportOptionalMemberAccess] - an assertion would be measured, too
            "barrier": lambda group=group: dist.barrier(group),
            "functional all_reduce (C++)": lambda name=name: functional.wait_tensor(
                torch.ops._c10d_functional.all_reduce(tensor, "sum", name)
            ),
        }
        for title, call in calls.items():
            found[key][title] = alternate(probe, call, count, 1, rounds)
    found["two"]["isend and irecv"] = alternate(probe, p2p, 40, 2, rounds)
    probe.switch(True)
    found["own"] = own_cost(probe, world)
    dist.barrier()
    return found


def alternate(
    probe: Any, call: Callable[[], Any], count: int, operations: int, rounds: int
) -> list[list[float]]:
    """Wall microseconds per operation: pairs of (on, off) rounds of ``count`` calls."""
    import torch.distributed as dist

    pairs: list[list[float]] = []
    for number in range(rounds + 2):
        pair = [0.0, 0.0]
        for state in (0, 1) if number % 2 else (1, 0):
            probe.switch(state == 0)
            dist.barrier()
            began = time.perf_counter()
            for _ in range(count):
                call()
            pair[state] = (time.perf_counter() - began) / count / operations * 1e6
        pairs.append(pair)
    return pairs[2:]


def own_cost(probe: Any, group: Any) -> dict[str, float]:
    """Microseconds of our own code alone: the recorded form of methods that return a finished Work at once."""
    import torch
    import torch.distributed as dist

    from keepstep.capture.internals import hidden
    from keepstep.capture.methods import METHODS
    from keepstep.capture.operations import Caller

    finished = dist.all_reduce(torch.ones(1), async_op=True)
    assert finished is not None
    finished.wait()
    finished = getattr(finished, "native", finished)
    tensor = torch.ones(256)

    def immediate(_group: Any, *_: Any) -> Any:
        return finished

    recorded: Callable[..., Any] = probe._operations.recorded
    collective = hidden(recorded(immediate, METHODS["allreduce"], Caller.PYTHON))
    p2p = hidden(recorded(immediate, METHODS["send"], Caller.PYTHON))
    waiting, asynchronous = dist.AllreduceOptions(), dist.AllreduceOptions()
    waiting.asyncOp, asynchronous.asyncOp = False, True
    writer = probe.recorder.writer
    plain = fastest(lambda: immediate(group, [tensor], waiting).wait())
    return {
        "sync": fastest(lambda: collective(group, [tensor], waiting).wait()) - plain,
        "async": fastest(lambda: collective(group, [tensor], asynchronous).wait()) - plain,
        "p2p": fastest(lambda: p2p(group, [tensor], 0, 0).wait()) - plain,
        "ring": fastest(lambda: writer.start(1, 1, 0, -1, 64, 0, 0)()),
    }


def fastest(call: Callable[[], Any], count: int = 5000) -> float:
    """Microseconds a call, the best of seven rounds."""
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - began) / count * 1e6)
    return best


def step_worker(pairs: int, block: int, emulate_ms: float) -> dict[str, Any]:
    """Seconds (wall, CPU) of alternating blocks of steps with the probe on and off: pairs of (on, off)."""
    import torch
    import torch.distributed as dist
    from torch import nn

    # Ranks that wander between cores make a block's time vary by 3 %, for seconds on end; kept apart, by 2 %.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    probe = start_watched()

    class Emulated(torch.autograd.Function):
        """An emulated accelerator: sleeps in forward and twice as long in backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(emulate_ms / 1e3)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            time.sleep(2 * emulate_ms / 1e3)
            return gradients[0]

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(Emulated.apply(x))
            return x

    def build(on: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        probe.switch(on)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Layers(), bucket_cap_mb=0.2)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    batch = torch.randn(4, 16, 64)
    jobs: dict[bool, tuple[nn.Module, torch.optim.Optimizer]] = {}
    watched = 0

    def steps(on: bool, count: int) -> tuple[float, float]:
        nonlocal watched
        probe.switch(on)
        watched += on * count
        model, optimizer = jobs[on]
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
        return time.perf_counter() - began, time.process_time() - began_cpu

    found: list[list[float]] = []
    cpu: list[list[float]] = []
    for number in range(pairs):
        if number % PAIRS_A_BUILD == 0:
            # Where a model lies in memory changes its steps by a per cent or two: new ones, the other one first.
            for on in (True, False) if number // PAIRS_A_BUILD % 2 else (False, True):
                jobs[on] = build(on)
            for on in (True, False):
                steps(on, WARM_UP_STEPS)
        order = (True, False) if number % 2 else (False, True)
        times = {on: steps(on, block) for on in order}
        found.append([times[True][0], times[False][0]])
        cpu.append([times[True][1], times[False][1]])
    writer_dropped = probe.recorder.writer.dropped
    probe.switch(True)
    dist.barrier()
    return {"pairs": found, "cpu": cpu, "dropped": writer_dropped, "watched": watched}


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {"call": call_worker, "step": step_worker}


# --- run in the bench ----------------------------------------------------------------------------------------------


def launch(worker: str, world: int, arguments: list[float]) -> tuple[list[dict[str, Any]], list[int]]:
    """Run a worker of this file as ``world`` ranks with a ring each: results, and records written per rank."""
    from keepstep import ring

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    descriptors = [ring.create(65536) for _ in range(world)]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, f"{rank}.json") for rank in range(world)]
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(world):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "KEEPSTEP_RING": f"/proc/{os.getpid()}/fd/{descriptors[rank]}",
            }
            command = [sys.executable, "-m", "benchmarks.probe", "--worker", worker, str(results[rank])]
            processes.append(
                subprocess.Popen([*command, *(str(value) for value in arguments)], env=environment)
            )
        for process in processes:
            if process.wait() != 0:
                raise RuntimeError(f"a rank of the {worker} bench ended with {process.returncode}")
        found = [json.loads(path.read_text()) for path in results]
    written = [ring.RingReader(descriptor).header.written for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return found, written


def call_lines(report: Report, rounds: int) -> None:
    results, _ = launch("call", 2, [rounds])
    own = results[0]["own"]
    titles = (
        ("sync", "own code, synchronous collective"),
        ("async", "own code, asynchronous collective"),
        ("p2p", "own code, send or receive"),
    )
    for key, title in titles:
        worst = max(result["own"][key] for result in results)
        report.add(
            Line(
                title,
                worst,
                "µs",
                CALL_GOAL,
                worst <= CALL_BUDGET_US,
                limit="around a Work that is complete at once; fastest round of the slower rank",
            )
        )
    report.add(Line("ring write, start and end", own["ring"] * 1e3, "ns"))
    for title in results[0]["alone"]:
        added, base = paired(results[0]["alone"][title])
        limit = "a group of one rank: no transfer; median of paired rounds of wall time"
        report.add(
            Line(
                f"added to {title}",
                added,
                "µs",
                CALL_GOAL,
                added <= CALL_BUDGET_US,
                {"unwatched": base},
                limit,
            )
        )
    for title in results[0]["two"]:
        added, base = paired(results[0]["two"][title])
        limit = "two ranks over loopback: the transfer's jitter is in it, so not judged"
        report.add(Line(f"added to {title}, 2 ranks", added, "µs", peers={"unwatched": base}, limit=limit))


def paired(pairs: list[list[float]]) -> tuple[float, float]:
    """Median difference of (on, off) pairs, and the median of off."""
    return statistics.median(on - off for on, off in pairs), round(
        statistics.median(off for _, off in pairs), 1
    )


@dataclass(frozen=True, slots=True)
class StepRun:
    """What one job of four ranks showed."""

    added_percent: list[float]  # one per pair
    unwatched_ms: float
    records: float  # a watched step and rank
    cpu_us: float  # added to a step and rank, mean
    dropped: int


def step_run(pairs: int, block: int, emulate_ms: float) -> StepRun:
    """Start a job of four ranks and measure in it."""
    results, written = launch("step", 4, [pairs, block, emulate_ms])
    # One number a pair for the job: its ranks step together, so the slowest is the job's time.
    blocks = [
        [max(result["pairs"][i][state] for result in results) for state in (0, 1)] for i in range(pairs)
    ]
    return StepRun(
        [(on - off) / off * 100 for on, off in blocks],
        statistics.median(off for _, off in blocks) / block * 1e3,
        written[0] / results[0]["watched"],
        statistics.fmean((on - off) / block * 1e6 for result in results for on, off in result["cpu"]),
        sum(result["dropped"] for result in results),
    )


def step_lines(report: Report, runs: int, pairs: int, block: int, emulate_ms: float) -> None:
    """Fresh jobs: one job's pairs agree better with each other than with another job's."""
    found = [step_run(pairs, block, emulate_ms) for _ in range(runs)]
    mean, low, high = interval([statistics.fmean(run.added_percent) for run in found])
    limit = (
        f"{runs} jobs of {pairs} pairs of {block}-step blocks, Student's t interval of the jobs' means; "
        "compute emulated by sleeping, 4 ranks on this machine's cores, each kept on one"
    )
    total = runs * pairs
    judged = None if total < PAIRS_WANTED else high <= STEP_BUDGET_PERCENT
    report.add(Line("step time added, mean", mean, "%", limit=limit))
    report.add(Line("step time added, 95 % interval from", low, "%", limit=limit))
    report.add(Line("step time added, 95 % interval to", high, "%", STEP_GOAL, judged, limit=limit))
    for number, run in enumerate(found, 1):
        error = statistics.stdev(run.added_percent) / pairs**0.5
        figures = {
            "standard error": round(error, 3),
            "unwatched step (ms)": round(run.unwatched_ms, 1),
            "CPU added a step (µs)": round(run.cpu_us),
        }
        report.add(
            Line(f"step time added, job {number}", statistics.fmean(run.added_percent), "%", peers=figures)
        )
    report.add(Line("step time unwatched", statistics.median(run.unwatched_ms for run in found), "ms"))
    records = statistics.fmean(run.records for run in found)
    _, cpu_low, cpu_high = interval([run.cpu_us for run in found])
    report.add(Line("records a watched step", records, "records"))
    report.add(Line("CPU time added a record, 95 % interval from", cpu_low / records, "µs"))
    report.add(Line("CPU time added a record, 95 % interval to", cpu_high / records, "µs"))
    report.add(Line("records dropped", sum(run.dropped for run in found), "records"))
    if judged is None:
        report.leave_out("overhead against its goal", f"{total} pairs, the goal wants {PAIRS_WANTED}")


IMPORT = "import time, os; b = time.perf_counter(); import torch; print(time.perf_counter() - b)"
ENTRY_POINT = (
    "import sys, time, torch\n"
    "for name in [n for n in sys.modules if n.split('.')[0] == 'keepstep']: del sys.modules[name]\n"
    "b = time.perf_counter()\n"
    "from keepstep._autoload import activate\n"
    "activate()\n"
    "print(time.perf_counter() - b)"
)


def import_lines(report: Report, repetitions: int) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP")}

    def seconds(code: str, **more: str) -> float:
        ran = subprocess.run(
            [sys.executable, "-c", code], env=clean | more, capture_output=True, text=True, check=True
        )
        return float(ran.stdout)

    own_ms = statistics.median(seconds(ENTRY_POINT) for _ in range(max(3, repetitions // 3))) * 1e3
    report.add(
        Line(
            "own entry point at import torch, inactive",
            own_ms,
            "ms",
            IMPORT_GOAL,
            own_ms < IMPORT_BUDGET_MS,
            limit="loading keepstep and keepstep._autoload and calling it",
        )
    )
    with_us, without = [], []
    for _ in range(repetitions):
        with_us.append(seconds(IMPORT))
        without.append(seconds(IMPORT, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    difference = statistics.median(a - b for a, b in zip(with_us, without, strict=True)) * 1e3
    report.add(
        Line(
            "import torch with autoload on, less off",
            difference,
            "ms",
            limit=f"{repetitions} pairs; holds torch's own search for entry points, and an import's jitter",
            peers={"import torch (ms)": round(statistics.median(without) * 1e3)},
        )
    )


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker, result, *arguments = sys.argv[2:]
        numbers = [float(value) if "." in value else int(value) for value in arguments]
        found = WORKERS[worker](*numbers)
        Path(result).write_text(json.dumps(found))
        os._exit(0)  # a bench's rank has nothing to tear down
    parser = bench_arguments("probe", "What the probe costs per call, per step and per import.")
    parser.add_argument("--runs", type=int, help="jobs, at least 2 (default 8; 2 with --quick)")
    parser.add_argument("--pairs", type=int, help="pairs of blocks a job (default 100; 30 with --quick)")
    chosen = parser.parse_args()
    runs, pairs = chosen.runs or (2 if chosen.quick else 8), chosen.pairs or (30 if chosen.quick else 100)
    if runs < 2 or pairs < 2:
        parser.error(f"--runs {runs} --pairs {pairs}: an interval needs at least 2 of each")
    report = Report("probe", quick=chosen.quick)
    call_lines(report, 12 if chosen.quick else 60)
    shim_lines(report, 3 if chosen.quick else 11, 200_000, 2 if chosen.quick else 20)
    import_lines(report, 5 if chosen.quick else 15)
    # Long blocks: the steps after a switch run slower than those of a job that never switches, on and off alike.
    step_lines(report, runs, pairs, 3 if chosen.quick else 10, 8.0)
    report.finish(chosen.json)


if __name__ == "__main__":
    main()
