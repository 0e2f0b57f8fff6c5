"""Runs a job on the stand-in GPU, under ``keepstep run`` or alone.

    done = run(TRAIN, ["--layout", "ddp"], folder, ranks=4, faults=[Fault("slow", rank=1, step=20, value=1.3)])
    done.exit_code, done.console, done.devices[1].marks

    with start(TRAIN, [], folder, ranks=4, watched=False, faults=[Fault("cut", rank=2, peer=1, step=20)]) as job:
        job.wait_until_stuck()  # each rank's operations of NCCL: (enqueued, started, completed)

``make cuda`` builds the environment, ``.venv-cuda`` or what ``STAND_IN_VENV`` names.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from benchmarks.stand_in.build import DRIVER, OPERATORS, build
from benchmarks.stand_in.device import CONTROL_BYTES, Control, Progress
from benchmarks.stand_in.faults import CARDS, VARIABLE, Fault, to_text, write_card
from keepstep.core.own_address import ANYWHERE, address_towards

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("STAND_IN_VENV", ROOT / ".venv-cuda")).resolve()
TRAIN = Path(__file__).with_name("jobs") / "train.py"
PYTHON = VENV / "bin" / "python"


@cache
def is_installed(module: str) -> bool:
    """Whether jobs on the stand-in can import it; they see all that ``.venv`` has, too."""
    code = f"import sys; from importlib.util import find_spec; sys.exit(find_spec({module!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


@dataclass(frozen=True, slots=True)
class DeviceLog:
    """What a rank's device wrote down."""

    marks: dict[int, int] = field(default_factory=dict)
    """Device time in nanoseconds by tag; the jobs here mark the end of each step."""
    lines: tuple[str, ...] = ()
    """All else."""

    def periods_ns(self) -> list[int]:
        """From mark to mark, in the order of their tags."""
        times = [self.marks[tag] for tag in sorted(self.marks)]
        return [after - before for before, after in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Done:
    """A job that is over."""

    exit_code: int | None
    """The first that is not 0; None: stopped when its time was over."""
    console: str
    devices: list[DeviceLog]
    folder: Path
    """Has ``run``, the run folder of keepstep, ``control``, ``devices``, and the console, or each node's or rank's."""
    wall_s: float
    exit_codes: tuple[int | None, ...] = ()
    """Of each process that was started: one a node, or one a rank."""


def environment(
    folder: Path,
    *,
    faults: Iterable[Fault] = (),
    clock: Literal["real", "virtual"] = "real",
    kernel_us: float | str = 100,
    values: bool = False,
    nvml: bool = False,
    settings: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables with which a process is on the stand-in; all ranks of a job get the same.

    ``folder`` gets the job's ``control`` file and its devices' logs. ``kernel_us`` is a number or
    ``"gemm=300,optimizer=50"``. With ``values`` operators compute, in jobs that ask for it. ``nvml``: its driver can be
    asked. ``settings`` has more, ``STAND_IN_...`` of docs/design/stand-in-gpu.md among them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    devices = folder / "devices"
    devices.mkdir(exist_ok=True)
    (folder / "control").write_bytes(bytes(CONTROL_BYTES))
    libraries, before = build(VENV), os.environ.get("LD_LIBRARY_PATH")
    faults = list(faults)
    nvml = nvml or any(one.what == "hot" for one in faults)
    searched = [libraries, *([libraries / DRIVER] if nvml else [])]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join([*map(str, searched), *([before] if before else [])]),
        "STAND_IN_VALUES": str(libraries / OPERATORS) if values else "",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "STAND_IN_CONTROL": str(folder / "control"),
        "STAND_IN_LOG": str(devices),
        CARDS: str(folder / "cards"),
        "STAND_IN_CLOCK": clock,
        "STAND_IN_KERNEL_US": str(kernel_us),
        VARIABLE: to_text(faults),
        **(settings or {}),
    }


def read_log(path: Path) -> DeviceLog:
    """Empty where the rank never used its device."""
    marks: dict[int, int] = {}
    lines: list[str] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        word, _, rest = line.partition(" ")
        if word == "mark":
            tag, at = rest.split()
            marks[int(tag)] = int(at)
        else:
            lines.append(line)
    return DeviceLog(marks, tuple(lines))


class Job:
    """A job that runs, until ``finish`` or the end of a ``with`` block; then all its processes are gone."""

    def __init__(self, folder: Path, ranks: int, started: Sequence[subprocess.Popen[bytes]]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.control = Control(folder / "control")
        self._started = started
        self._began = time.monotonic()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish(0)

    @property
    def launcher(self) -> int:
        """The process of keepstep's launcher, or of the first rank."""
        return self._started[0].pid

    def is_over(self) -> bool:
        # Each is asked: whoever is over is reaped at once.
        return None not in [one.poll() for one in self._started]

    def progress(self) -> list[Progress]:
        """By rank."""
        return [self.control.progress(rank) for rank in range(self.ranks)]

    def wait_until_stuck(self, still_s: float = 3, timeout_s: float = 120) -> list[Progress]:
        """The ranks' progress once all have begun and nothing has moved for ``still_s``.

        Raises ``TimeoutError`` when that does not come, or the job ends.
        """
        until = time.monotonic() + timeout_s
        before, since = self.progress(), time.monotonic()
        while time.monotonic() < until and not self.is_over():
            time.sleep(0.05)
            now = self.progress()
            if now != before or not all(one.completed for one in now):
                before, since = now, time.monotonic()
            elif time.monotonic() - since > still_s:
                return now
        raise TimeoutError(f"the job was not stuck: {self.progress()}\n{self.console()[-3000:]}")

    def console(self) -> str:
        """Of the launcher, or of all nodes or ranks one after the other."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("console*")))

    def finish(self, timeout_s: float) -> Done:
        """Wait for its end, ``timeout_s`` at most; then everything is killed."""
        until = time.monotonic() + timeout_s
        while not self.is_over() and time.monotonic() < until:
            time.sleep(0.02)
        codes = [one.poll() for one in self._started]
        for one in self._started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        return Done(
            exit_code=None if None in codes else next((code for code in codes if code != 0), 0),
            console=self.console(),
            devices=[read_log(self.folder / "devices" / f"rank-{rank}") for rank in range(self.ranks)],
            folder=self.folder,
            wall_s=round(time.monotonic() - self._began, 2),
            exit_codes=tuple(codes),
        )


def start(
    script: Path | str,
    arguments: Sequence[str],
    folder: Path,
    *,
    ranks: int,
    nodes: int = 1,
    spares: int = 0,
    on_node: Callable[[int, Sequence[str]], Sequence[str]] = lambda node, words: words,
    watched: bool = True,
    flags: Sequence[str] = (),
    faults: Iterable[Fault] = (),
    clock: Literal["real", "virtual"] = "real",
    kernel_us: float | str = 100,
    values: bool = False,
    nvml: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Job:
    """Start ``script`` on ``ranks`` ranks: under ``keepstep run`` with ``flags``, or its ranks as they are.

    With several ``nodes``, or ``spares`` besides them, each node has a launcher of its own and is called ``node-0`` and
    so on; ``on_node`` gives the words that start a command there.
    """
    for rank in range(ranks):
        write_card(folder / "cards", rank)
    variables = environment(
        folder, faults=faults, clock=clock, kernel_us=kernel_us, values=values, nvml=nvml, settings=settings
    )
    words = [str(PYTHON), str(script), *arguments]
    if watched:
        keepstep = [words[0], "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), *flags]
        keepstep += ["--nproc-per-node", str(ranks // nodes)]
        if nodes + spares == 1:
            started = [_started([*keepstep, *words[1:]], variables, folder / "console")]
        else:
            keepstep += ["--nnodes", str(nodes), "--rdzv-id", "nodes"]
            # Not a loopback one: at that no node gives states to others.
            keepstep += ["--master-addr", address_towards(ANYWHERE)]
            keepstep += ["--master-port", str(_free_port())]
            started = [
                _started(
                    on_node(node, [*keepstep, "--node-rank", str(node), *words[1:]]),
                    {**variables, "KEEPSTEP_NODE_NAME": f"node-{node}"},
                    folder / f"console-{node:02d}",
                )
                for node in range(nodes + spares)
            ]
    else:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
        started = [
            _started(
                words,
                {**variables, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                folder / f"console-{rank:02d}",
            )
            for rank in range(ranks)
        ]
    return Job(folder, ranks, started)


def run(
    script: Path | str, arguments: Sequence[str], folder: Path, *, timeout_s: float = 120, **options: Any
) -> Done:
    """What ``start`` starts, to its end, ``timeout_s`` at most; ``options`` are those of ``start``."""
    return start(script, arguments, folder, **options).finish(timeout_s)


def _started(words: Sequence[str], variables: Mapping[str, str], console: Path) -> subprocess.Popen[bytes]:
    with open(console, "wb") as out:
        return subprocess.Popen(
            words, env=dict(variables), stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
