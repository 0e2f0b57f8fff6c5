"""What a checkpoint in memory costs beside the plain copy of the same tensors, and beside torch's own ways.

    python -m benchmarks.checkpoint [--quick] [--json FILE]

Each rank holds 200 tensors of fp32 that an optimizer owns. Every save is paired with the plain copy (`Tensor.copy_`,
one thread, into memory that is there) of the same tensors, made just before it by as many processes at once. Overlapped
saves are made in steps: save, compute, optimizer step; of each pair of steps one has a save, in turn. Emulated compute
sleeps for three copies; real compute multiplies matrices for about as long. First saves are made by fresh processes,
one each. DLRover is a peer where it is installed (``pip install 'dlrover[torch]' grpcio``).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks.checkpoint import transfer
from benchmarks.checkpoint.served import served

FIRST_GOAL = "first save ≤ 1.3 × (after registration)"
WARM_GOAL = "warm synchronous blocking ≤ 1.0 × the single-thread copy"
BLOCKING_GOAL = "overlapped: blocking ≤ 0.05 ×"
STEP_GOAL = "the whole step's increase ≤ 0.3 × the copy with emulated compute"
RESTORE_GOAL = "restore from own cache ≤ 1.3 × copy"
TRANSFER_GOAL = "backup and fetch ≥ 0.8 × what a raw TCP stream gives in the same run"
TENSORS = 200
FIRSTS = 5  # fresh processes that make a first save
_FLASH = "DLRover flash checkpoint, memory"


# --- run in the worker processes -----------------------------------------------------------------------------------


def worker(mib: int, repetitions: int, peer_repetitions: int, folder: str) -> dict[str, Any]:
    """Seconds of everything; pairs are (ours, plain copy beside it)."""
    import torch
    import torch.distributed as dist

    from keepstep import checkpoint
    from keepstep.checkpoint import api as door
    from keepstep.checkpoint import native

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count = (mib << 20) // 4 // TENSORS
    parameters = [torch.nn.Parameter(torch.randn(count)) for _ in range(TENSORS)]
    state = {"weights": {f"layer.{i}": p.detach() for i, p in enumerate(parameters)}, "step": 0}
    copies = [torch.zeros_like(p) for p in parameters]
    found: dict[str, Any] = {"bytes": 4 * count * TENSORS}

    def plain_copy() -> None:
        with torch.no_grad():
            for target, source in zip(copies, parameters, strict=True):
                target.copy_(source)

    def paired(action: Callable[[], Any], repeat: int) -> list[list[float]]:
        pairs = []
        for _ in range(repeat):
            base = timed(plain_copy)
            pairs.append([timed(action), base])
        return pairs

    def timed(action: Callable[[], Any]) -> float:
        dist.barrier()
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    plain_copy()
    steps = iter(range(1, 1 << 40))

    def save(overlap: bool = False) -> None:
        checkpoint.save(state, next(steps), overlap=overlap)

    found["register"] = timed(lambda: checkpoint.register(state))
    snapshots = door._open[0]
    populating = snapshots._cache._populating
    found["populate"] = timed(lambda: populating.join() if populating else None)
    found["first"] = paired(save, 1)
    if not repetitions:
        return found
    found["warm"] = paired(save, repetitions)
    found["fused"] = fused(parameters, copies, plain_copy, native, timed, repetitions)

    optimizer = still_optimizer(parameters)
    optimizer.step()
    copy_s = statistics.median(pair[1] for pair in found["warm"])
    matrix = torch.randn(512, 512)

    computes = {"emulated": lambda: time.sleep(3 * copy_s), "real": real_of(matrix, 3 * copy_s)}
    for name, compute in computes.items():
        found[name] = overlapped(compute, optimizer, save, checkpoint.wait, plain_copy, timed, repetitions)

    checkpoint.wait()
    before = [native.checksum(p.detach().numpy().data) for p in parameters]
    for p in parameters:
        p.data.zero_()
    found["restore"] = paired(lambda: checkpoint.load(state), max(3, repetitions // 2))
    if before != [native.checksum(p.detach().numpy().data) for p in parameters]:
        raise RuntimeError("the restore gave other bytes than were saved")
    found["used"] = sum(slot.nbytes for slot in snapshots._cache.slots)
    found["peers"], found["missing"] = peers(state, Path(folder), paired, peer_repetitions, dist.get_rank())
    return found


def real_of(matrix: Any, seconds: float) -> Callable[[], None]:
    """Matrix products that take about ``seconds`` when nothing else runs."""
    began = time.perf_counter()
    for _ in range(20):
        matrix.matmul(matrix)
    times = max(1, round(seconds / ((time.perf_counter() - began) / 20)))

    def run() -> None:
        for _ in range(times):
            matrix.matmul(matrix)

    return run


def still_optimizer(parameters: list[Any]) -> Any:
    """An optimizer that owns the parameters and leaves them as they are: its step is only its hooks."""
    import torch

    class Still(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            return None

    return Still()


def fused(
    parameters: list[Any], copies: list[Any], plain_copy: Any, native: Any, timed: Any, repetitions: int
) -> list[list[float]]:
    """The native copy with its checksum, one thread, from and to the same memory as the plain copy."""
    from array import array

    plan, sources = array("Q"), []
    for source, target in zip(parameters, copies, strict=True):
        sources.append(source.detach().numpy())
        plan.append(0)
        plan.extend((target.data_ptr(), source.nbytes))
    rows = [(memoryview(s).cast("B"), plan[3 * i : 3 * i + 3]) for i, s in enumerate(sources)]

    def run() -> None:
        for source, row in rows:
            native.copy_out(source, row, 1)

    found = []
    for _ in range(repetitions):
        base = timed(plain_copy)
        found.append([timed(run), base])
    return found


def overlapped(
    compute: Any, optimizer: Any, save: Any, wait: Any, plain_copy: Any, timed: Any, repetitions: int
) -> dict[str, list[list[float]]]:
    """Pairs of (blocking of the save, copy) and (step with a save less one without, copy)."""
    blocking, increase = [], []
    blocked_s = 0.0

    def step(saving: bool) -> None:
        nonlocal blocked_s
        if saving:
            began = time.perf_counter()
            save(overlap=True)
            blocked_s = time.perf_counter() - began
        compute()
        optimizer.step()

    for number in range(repetitions):
        base = timed(plain_copy)
        pair = [0.0, 0.0]
        for saving in (True, False) if number % 2 else (False, True):
            pair[saving] = timed(lambda saving=saving: step(saving))
            wait()
        blocking.append([blocked_s, base])
        increase.append([pair[1] - pair[0], base])
    return {"blocking": blocking, "increase": increase}


def peers(
    state: dict[str, Any], folder: Path, paired: Any, repetitions: int, rank: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Blocking seconds of torch's own saves, paired like ours; and why one is missing."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    def torch_save() -> None:
        with (folder / f"torch-{rank}.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    pending: list[Any] = []

    def finish() -> None:
        while pending:
            answer = pending.pop()
            getattr(answer, "upload_completion", answer).result()

    # Every rank's own tensors: under names of its own, else DCP would keep one copy of them.
    own = {f"{rank}": state}
    cached = DefaultStager(StagingOptions(False, False, False, False))
    shared = DefaultStager(StagingOptions(False, True, False, False))
    ways: dict[str, Callable[[], Any]] = {
        "torch.save and fsync": torch_save,
        "DCP save": lambda: dcp.save(own, checkpoint_id=folder / "dcp"),
        "DCP async_save, thread, staging cached": lambda: pending.append(
            dcp.async_save(own, checkpoint_id=folder / "dcp", async_stager=cached)
        ),
        "DCP async_save, process, staging cached": lambda: pending.append(
            dcp.async_save(
                own,
                checkpoint_id=folder / "dcp",
                async_stager=shared,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
        ),
    }
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}

    def attempt(name: str, way: Callable[[], Any]) -> str:
        try:
            pairs = []
            for _ in range(repetitions + 1):
                pairs += paired(way, 1)
                finish()
            found[name] = pairs[1:]  # the first one allocates what is cached
        except Exception as error:  # a peer that does not run here is a line less, not the end of the bench
            return f"{type(error).__name__}: {error}"[:120]
        return ""

    for name, way in ways.items() if repetitions else ():
        why = attempt(name, way)
        if why:
            missing[name] = why
    if repetitions:
        try:
            with flash_checkpoint(state, folder) as save:
                why = attempt(_FLASH, save)
        except ImportError:
            why = "not installed: pip install 'dlrover[torch]' grpcio"
        if why:
            missing[_FLASH] = why
    return found, missing


@contextlib.contextmanager
def flash_checkpoint(state: dict[str, Any], folder: Path) -> Iterator[Callable[[], None]]:
    """DLRover's save into memory, with its saver's process beside the ranks as it is without its launcher."""
    import logging

    import torch.distributed as dist
    from dlrover.trainer.torch.flash_checkpoint import checkpointer as flash  # pyright: ignore[reportMissingImports]
    from dlrover.trainer.torch.flash_checkpoint import ddp  # pyright: ignore[reportMissingImports]

    logging.disable(logging.WARNING)
    ranks = dist.get_world_size()
    checkpointer = ddp.DdpCheckpointer(str(folder / "flash"), local_shard_num=ranks, global_shard_num=ranks)
    engine = checkpointer._engine
    steps = iter(range(1, 1 << 40))

    def save() -> None:
        step = next(steps)
        checkpointer.save_checkpoint(step, state, storage_type=flash.StorageType.MEMORY)
        if engine._cached_step != step:
            raise RuntimeError(f"it left step {step} out")

    try:
        yield save
    finally:
        dist.barrier()
        shared = engine._shm_handler.shared_memory
        if shared is not None:
            shared.unlink()
        if engine.saver_proc is not None:
            engine.saver_proc.kill()


# --- run here --------------------------------------------------------------------------------------------------------


def launch(ranks: int, mib: int, repetitions: int, peer_repetitions: int) -> list[dict[str, Any]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    Path(".cache").mkdir(exist_ok=True)  # on disk: the peers' files
    with served() as address, tempfile.TemporaryDirectory(dir=".cache") as folder:
        processes = []
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "KEEPSTEP_CACHE": address,
                "OMP_NUM_THREADS": "1",
            }
            arguments = [f"{folder}/{rank}.json", str(mib), str(repetitions), str(peer_repetitions), folder]
            command = [sys.executable, "-m", "benchmarks.checkpoint", "--worker", *arguments]
            processes.append(subprocess.Popen(command, env=environment))
        for process in processes:
            if process.wait() != 0:
                raise RuntimeError(f"a rank of the checkpoint bench ended with {process.returncode}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def ratio(results: list[dict[str, Any]], *keys: str) -> float:
    """Median ratio of ours to the copy beside it, of the slower rank."""
    worst = 0.0
    for result in results:
        pairs: Any = result
        for key in keys:
            pairs = pairs[key]
        worst = max(worst, statistics.median(ours / copy for ours, copy in pairs))
    return worst


def add_lines(report: Report, results: list[dict[str, Any]], title: str) -> None:
    size = f"{results[0]['bytes'] / 1e9:.2f} GB a rank"
    copy_s = statistics.median(copy for result in results for _, copy in result["warm"])
    copied = f"{size}; the copy takes {copy_s:.3f} s"
    peer_lines = {name: round(ratio(results, "peers", name), 2) for name in results[0]["peers"]}

    def line(name: str, value: float, goal: str | None, budget: float | None, **more: Any) -> None:
        met = None if budget is None else value <= budget
        report.add(Line(f"{title}: {name}", value, "× copy", goal, met, **more))

    samples = len(results[0]["first"])
    line("first save", ratio(results, "first"), FIRST_GOAL, 1.3, limit=f"{copied}; {samples} fresh processes")
    line("warm synchronous save", ratio(results, "warm"), WARM_GOAL, 1.0, peers=peer_lines, limit=copied)
    line("copy with its checksum, one thread", ratio(results, "fused"), None, None)
    for compute in ("emulated", "real"):
        judged = compute == "emulated"
        line(
            f"overlapped save, blocking, {compute} compute",
            ratio(results, compute, "blocking"),
            BLOCKING_GOAL if judged else None,
            0.05 if judged else None,
        )
        line(
            f"overlapped save, whole step's increase, {compute} compute",
            ratio(results, compute, "increase"),
            STEP_GOAL if judged else None,
            0.3 if judged else None,
            limit="compute emulated by sleeping"
            if judged
            else "matrix products on every core there is a rank for",
        )
    line(
        "restore from own cache",
        ratio(results, "restore"),
        RESTORE_GOAL,
        1.3,
        limit="into tensors that are there",
    )
    report.add(
        Line(
            f"{title}: memory of the cache",
            results[0]["used"] / results[0]["bytes"],
            "× state",
            limit="two slots",
        )
    )
    populate_s = max(result["populate"] for result in results)
    report.add(Line(f"{title}: giving the pages, in the background", populate_s, "s"))
    for result in results[:1]:
        for name, why in result["missing"].items():
            report.leave_out(f"{title}: {name}", why)


def add_transfers(report: Report, mib: int, repetitions: int) -> None:
    """A state of ``mib`` MiB between two processes over loopback."""
    found = transfer.pairs(mib, repetitions)
    size = found["bytes"] / 1e9
    for name, title in (
        ("backup", "backup on another node"),
        ("fetch", "fetch from another node"),
    ):
        value = statistics.median(raw / ours for ours, raw in found[name])
        raw_s = statistics.median(raw for _, raw in found[name])
        limit = (
            f"{size:.2f} GB over loopback, every byte verified; raw {size / raw_s:.2f} GB/s, one connection"
        )
        report.add(Line(title, value, "× raw TCP", TRANSFER_GOAL, value >= 0.8, limit=limit))


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        result, mib, repetitions, peer_repetitions, folder = sys.argv[2:]
        found = worker(int(mib), int(repetitions), int(peer_repetitions), folder)
        Path(result).write_text(json.dumps(found))
        os._exit(0)  # a bench's rank has nothing to tear down
    parser = bench_arguments("checkpoint", "What a checkpoint in memory costs beside the plain copy.")
    parser.add_argument(
        "--mib", type=int, default=2048, help="MiB of state of all ranks together (default 2048)"
    )
    parser.add_argument("--repetitions", type=int, help="pairs (default 20; 5 with --quick)")
    chosen = parser.parse_args()
    report = Report("checkpoint", quick=chosen.quick, packages=("keepstep", "numpy", "torch", "dlrover"))
    repetitions = chosen.repetitions or (5 if chosen.quick else 20)
    free = shutil.disk_usage(".").free
    for ranks in (1, 2):
        mib = chosen.mib // ranks
        peer_repetitions = (1 if chosen.quick else 3) if free > 8 * chosen.mib << 20 else 0
        found = launch(ranks, mib, repetitions, peer_repetitions)
        for _ in range(FIRSTS - 1):
            for one, more in zip(found, launch(ranks, mib, 0, 0), strict=True):
                one["first"] += more["first"]
        add_lines(report, found, f"{ranks} process{'es' * (ranks > 1)}")
    add_transfers(report, chosen.mib // 2, max(3, repetitions // 2))
    report.finish(chosen.json)


if __name__ == "__main__":
    main()
