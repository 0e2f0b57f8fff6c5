"""keepstep's validation of a running job on one GPU: seconds, memory, the verdict; also beside another's load."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.bench import Bench, Running
from benchmarks.gpu.driver_looks import looks
from benchmarks.stand_in.launch import TRAIN

from keepstep import wire
from keepstep.cli._asking import ask
from keepstep.core.errors import RunError
from keepstep.core.validation import Validation

HOLD_S = 10.0
_STEPS = "1000000"
_PACE_S, _LAYER_US = "0.02", "300"
_ANSWER_S, _BEGINS_S, _PAUSE_S = 60.0, 90.0, 1.0
LOAD = Path(__file__).with_name("load.py")
_NO_PEERS = "one rank: it has no peers that it could be slower than"
_SHARED = "two ranks take turns on one GPU; their link is one of NCCL's over sockets"


class Told(NamedTuple):
    """One validation: what came of it, seconds until the answer; the GPU's free bytes before, at least, and after."""

    outcome: Validation
    took_s: float
    free: tuple[int, int, int] | None  # None: the driver did not tell


def validation(bench: Bench) -> None:
    """A job of one rank, healthy and loaded; then one of two ranks, which has a link."""
    folder, count = bench.room("validation"), 1 if bench.quick else 3
    whole_s = bench.left_s()
    until_s = bench.until_s() - whole_s / 3  # the last third is for two ranks
    with job(bench, folder / "one", 1) as running:
        healthy = several(bench, running, "healthy", count, until_s)
        shown(bench, "a healthy GPU", healthy, _NO_PEERS)
        with load():
            loaded = several(bench, running, "loaded", count, until_s)
        usual = speeds([told.outcome for told in healthy])
        shown(bench, "a GPU that another process loads", loaded, _NO_PEERS, usual)
    try:
        with job(bench, folder / "two", 2) as running:
            shared = several(bench, running, "two ranks", count, bench.until_s())
            shown(bench, "two ranks on a GPU", shared, _SHARED)
            links(bench, shared)
    except RuntimeError as error:
        bench.report.leave_out("validation of a link", f"not shown on one GPU: {error}")


@contextmanager
def job(bench: Bench, folder: Path, ranks: int) -> Iterator[Running]:
    """A training that nobody validates but us."""
    words = [TRAIN, "--layout", "ddp", "--steps", _STEPS, "--pace-s", _PACE_S]
    words += ["--real", "--layer-us", _LAYER_US] if bench.judged else []
    (folder.parent / f"{folder.name}-devices").mkdir()
    settings = {"STAND_IN_LOG": str(folder.parent / f"{folder.name}-devices"), "OMP_NUM_THREADS": "1"}
    with bench.running(words, folder, ranks=ranks, flags=("--no-validate",), settings=settings) as running:
        iterations = folder / "run" / "nodes" / "0" / "iterations.jsonl"
        running.wait_for(
            lambda: iterations.exists() and iterations.stat().st_size > 0,
            "a step",
            time.monotonic() + _BEGINS_S,
        )
        yield running


@contextmanager
def load() -> Iterator[None]:
    """Another process that keeps the GPU busy."""
    with subprocess.Popen(
        [sys.executable, str(LOAD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=Bench.environment()
    ) as other:
        assert other.stdout is not None
        try:
            if other.stdout.readline() != b"busy\n":
                raise RuntimeError("the process that loads the GPU did not begin")
            yield
        finally:
            other.kill()


def several(bench: Bench, running: Running, what: str, count: int, until_s: float) -> list[Told]:
    """Some validations, one at least; those for which there is no time are told."""
    found = [validated(running)]
    while len(found) < count and time.monotonic() < until_s:
        found.append(validated(running))
    if len(found) < count:
        bench.report.leave_out(f"validation, {what}", f"{count - len(found)} of {count}: no time left")
    return found


def validated(running: Running) -> Told:
    """Have all ranks validated; asks again where that is refused. Raises RuntimeError where it is not to be had."""
    refused, began_s = "", time.monotonic()
    while time.monotonic() - began_s < _ANSWER_S:
        with looks() as found:
            asked_s = time.monotonic()
            try:
                answer = ask(
                    str(running.folder / "run"),
                    wire.Validate((), HOLD_S),
                    wire.Validated,
                    _ANSWER_S,
                    only="not running",
                    gone="gone",
                )
            except RunError as error:
                raise RuntimeError(str(error)) from error
            took_s = time.monotonic() - asked_s
        if answer.outcome is not None:
            free = [look.free for look in found if look.free >= 0]
            return Told(answer.outcome, took_s, (free[0], min(free), free[-1]) if free else None)
        refused = answer.refused
        time.sleep(_PAUSE_S)
    raise RuntimeError(f"no validation: refused: {refused}")


def speeds(outcomes: Sequence[Validation]) -> dict[str, float]:
    """The median figure of each test of the device, over all ranks."""
    found: dict[str, list[float]] = {}
    for figure in (one for outcome in outcomes for rank in outcome.figures for one in rank.devices):
        found.setdefault(figure.test, []).append(figure.value)
    return {test: statistics.median(values) for test, values in found.items()}


def shown(
    bench: Bench, what: str, told: Sequence[Told], limit: str, usual: dict[str, float] | None = None
) -> None:
    """Seconds, memory, figures and verdict of some validations. ``usual``: figures to lay beside them."""
    outcomes = [one.outcome for one in told]
    free = [one.free for one in told if one.free]
    peers: dict[str, Any] = {"asked to answered (s)": round(statistics.median(one.took_s for one in told), 2)}
    if free:  # torch keeps what it has taken once
        peers["taken on the GPU (MiB)"] = max(before - least for before, least, _ in free) >> 20
        peers["of that kept (MiB)"] = max(before - after for before, _, after in free) >> 20
    for test, value in speeds(outcomes).items():
        peers[f"{test} (TFLOP/s)"] = round(value, 1)
        if usual and usual.get(test):
            peers[f"{test}, part of the unloaded (%)"] = round(100 * value / usual[test], 1)
    name = f"validation of {what}"
    held_s = statistics.median(one.held_s for one in outcomes)
    bench.add(f"{name}: the job is held", held_s, "s", peers=peers, limit=limit)
    named = [
        *(f"GPU of rank {slow.figure.rank}" for outcome in outcomes for slow in outcome.devices),
        *(f"link {slow.source}-{slow.target}" for outcome in outcomes for slow in outcome.links),
    ]
    missing = sorted({text for outcome in outcomes for text in outcome.missing})
    verdict = ", ".join(named) or "nobody named"
    peers = {"validations": len(told), **({"missing": "; ".join(missing)} if missing else {})}
    bench.add(f"{name}: verdict", verdict, "", met=not named, peers=peers, limit=limit)


def links(bench: Bench, told: Sequence[Told]) -> None:
    """How the link between the ranks was tested, and its speed."""
    figures = [one for each in told for rank in each.outcome.figures for one in rank.links]
    if not figures:
        bench.report.leave_out("validation of a link", "no link was tested")
        return
    transports = " and ".join(sorted({one.transport for one in figures}))
    best = max(one.bytes_per_s for one in figures) / 1e9
    peers = {"best (GB/s)": round(best, 3), "figures": len(figures)}
    bench.add(
        "validation of a link: tested over",
        transports,
        "",
        met=transports == "nccl",
        peers=peers,
        limit=_SHARED,
    )
