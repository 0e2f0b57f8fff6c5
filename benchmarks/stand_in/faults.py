"""What goes wrong in a job on the stand-in: a list of faults, handed to the ranks in a variable.

Fault("slow", rank=1, step=20, value=1.3)          the kernels of rank 1 take 1.3 times as long from step 20 on
Fault("hang", rank=2, step=20, where="backward")   its host never comes out of the backward pass

Where STAND_IN_NOTES names a folder, each rank writes there what it begins to do wrong and when: ``truth-RANK.jsonl``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from benchmarks.stand_in.device import ECC, ILLEGAL_ADDRESS, Device

if TYPE_CHECKING:
    from benchmarks.gpu.device import RealDevice

VARIABLE = "STAND_IN_FAULTS"
Phase = Literal["data", "forward", "backward", "reduce", "optimizer", "checkpoint"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint")
What = Literal[
    "slow",  # the kernels of `rank` take `value` times as long, from `step` to before `until`
    "hot",  # the kernels of `rank` do, because its driver holds the GPU's clock down for its temperature
    "slow-host",  # its host works `value` seconds more in phase `where` of each of these steps
    "slow-pair",  # what goes from `rank` to `peer` takes `value` percent longer
    "cut",  # nothing goes from `rank` to `peer`; in phase "optimizer": from there to the next step only
    "hang",  # its host never comes out of phase `where`
    "hold",  # the same, in C code that holds the interpreter's lock: no other thread of Python runs there any more
    "never-ends",  # a kernel that it launches in phase `where` never ends
    "skip",  # it leaves out the step's own all-reduce
    "order",  # it calls a broadcast instead
    "illegal-address",  # a kernel in phase `where` fails
    "ecc",  # the same, by the memory's fault
    "die",  # it is killed in phase `where`
    "lose-links",  # its links fail when its device comes to what is launched in phase `where`; nobody dies
    "raise",  # its script raises an error in phase `where`
    "save",  # it writes a checkpoint for `value` seconds in phase `where`
    "evaluate",  # it evaluates another model for `value` seconds
]
FOR_GOOD_S = 100_000
CARDS = "STAND_IN_NVML"
"""The variable that names a folder with a file for each GPU, which its driver is to tell (`nvml.cpp`)."""
_USUAL_MHZ, _COOL, _HOT, _THERMAL_SLOWDOWN = 1980, 60, 92, 0x40
_NOTES = "STAND_IN_NOTES"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; ``until`` and ``value`` where its kind has them."""

    what: What
    rank: int
    step: int
    where: Phase = "forward"
    value: float = 0.0
    peer: int = -1
    until: int = 1 << 30

    def is_on(self, step: int) -> bool:
        return self.step <= step < self.until


def write_card(folder: Path, number: int, process: int = 0, factor: float = 1.0) -> None:
    """Have the driver say that a GPU computes for this process, its clock held down by ``factor`` if that is not 1."""
    folder.mkdir(parents=True, exist_ok=True)
    state = (_COOL, 0) if factor == 1.0 else (_HOT, _THERMAL_SLOWDOWN)
    whole = folder / f"new-{number}"
    whole.write_text(f"{_USUAL_MHZ / factor:.0f} {state[0]} 99 {process} {state[1]}\n")
    whole.rename(folder / f"card-{number}")


def to_text(faults: Iterable[Fault]) -> str:
    return json.dumps([asdict(fault) for fault in faults])


class Script:
    """The faults of this rank, played by its job as it goes."""

    def __init__(self, device: Device | RealDevice, rank: int, faults: Iterable[Fault]) -> None:
        self.device = device
        self.faults = [fault for fault in faults if fault.rank == rank]
        self._rank, self._notes, self._noted = rank, os.environ.get(_NOTES, ""), set[Fault]()
        self._stream = 0
        self._is_virtual = os.environ.get("STAND_IN_CLOCK") == "virtual"
        self._tell_clock(1.0)

    @classmethod
    def from_environment(cls, device: Device | RealDevice, rank: int) -> Script:
        """What the variable says, in the first incarnation; later ones are healthy."""
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        faults = [] if again else json.loads(os.environ.get(VARIABLE, "[]"))
        return cls(device, rank, [Fault(**one) for one in faults])

    def begin(self, step: int, stream: int) -> None:
        """Call first in a step; ``stream``: the handle of that on which the rank computes."""
        factor = 1.0
        for fault in self.faults:
            if fault.what in ("slow", "hot") and fault.is_on(step):
                factor *= fault.value
                self._note(fault)
            if fault.what == "hot" and step in (fault.step, fault.until):
                self._tell_clock(fault.value if step == fault.step else 1.0)
            if fault.what == "cut" and fault.where == "optimizer":
                if fault.step < step <= fault.until:
                    self.device.cut(stream, fault.rank, fault.peer, False)
            elif fault.what in ("cut", "slow-pair") and step in (fault.step, fault.until):
                begins = step == fault.step
                self._note(fault)
                if fault.what == "cut":
                    self.device.cut(stream, fault.rank, fault.peer, begins)
                else:
                    self.device.slow_pair(stream, fault.rank, fault.peer, int(fault.value) if begins else 0)
        self.device.slow_down(factor)
        self._stream = stream

    def _tell_clock(self, factor: float) -> None:
        if cards := os.environ.get(CARDS):
            write_card(Path(cards), self._rank, os.getpid(), factor)

    def at(self, step: int, where: Phase) -> None:
        """Call at the beginning of each phase, or within it."""
        for fault in self.faults:
            if fault.where != where:
                continue
            if fault.what == "cut" and where == "optimizer" and fault.is_on(step):
                self._note(fault)
                self.device.cut(self._stream, fault.rank, fault.peer)
            if fault.what == "slow-host" and fault.is_on(step):
                self._note(fault)
                self.device.host_works(fault.value) if self._is_virtual else time.sleep(fault.value)
            if step != fault.step:
                continue
            self._note(fault)
            if fault.what == "hang":
                time.sleep(FOR_GOOD_S)
            elif fault.what == "hold":
                ctypes.PyDLL(None).sleep(FOR_GOOD_S)
            elif fault.what == "never-ends":
                self.device.hang_next()
            elif fault.what == "illegal-address":
                self.device.fail_next(ILLEGAL_ADDRESS)
            elif fault.what == "ecc":
                self.device.fail_next(ECC)
            elif fault.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.what == "lose-links":
                self.device.fail_links(self._stream, self._rank)
            elif fault.what == "raise":
                raise ValueError("this batch has no label")
            elif fault.what == "save":
                _save(fault.value)
            elif fault.what == "evaluate":
                _evaluate(fault.value)

    def obey(self, order: Path, step: int) -> None:
        """Play in this step, or a later one, the fault that the file ``order`` tells, as ``what where [step]``.

        The file goes.
        """
        if order.exists() and (words := order.read_text().split()):
            what, where, at = words if len(words) == 3 else (*words, str(step))
            order.unlink()
            self.faults.append(Fault(cast("What", what), self._rank, int(at), cast("Phase", where)))

    def says(self, what: What, step: int) -> bool:
        """Whether a fault that the job itself has to play is due in this step."""
        due = [fault for fault in self.faults if fault.what == what and fault.step == step]
        for fault in due:
            self._note(fault)
        return bool(due)

    def _note(self, fault: Fault) -> None:
        """Tell once that the fault begins."""
        if not self._notes or fault in self._noted:
            return
        self._noted.add(fault)
        with open(os.path.join(self._notes, f"truth-{self._rank}.jsonl"), "a") as file:
            file.write(json.dumps({"rank": self._rank, "unix_s": time.time(), **asdict(fault)}) + "\n")


class _Slow:
    """An object that takes long to be written."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getstate__(self) -> dict[str, float]:
        time.sleep(self.seconds)
        return {}


def _save(seconds: float) -> None:
    import torch

    torch.save(_Slow(seconds), os.devnull)


def _evaluate(seconds: float) -> None:
    """Evaluate a model of the host's, so that it needs nothing of other ranks."""
    import torch

    aside = torch.nn.Linear(8, 1)
    aside.eval()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        aside(torch.randn(8, 8))
        time.sleep(0.1)
