"""What goes wrong in a job on the stand-in: a list of faults, handed to the ranks in a variable.

Fault("slow", rank=1, step=20, value=1.3)          the kernels of rank 1 take 1.3 times as long from step 20 on
Fault("hang", rank=2, step=20, where="backward")   its host never comes out of the backward pass
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from benchmarks.stand_in.device import ECC, ILLEGAL_ADDRESS, Device

if TYPE_CHECKING:
    from benchmarks.gpu.device import RealDevice

VARIABLE = "STAND_IN_FAULTS"
Phase = Literal["data", "forward", "backward", "reduce", "optimizer", "checkpoint"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "reduce", "optimizer", "checkpoint")
What = Literal[
    "slow",  # the kernels of `rank` take `value` times as long, from `step` to before `until`
    "slow-host",  # its host works `value` seconds more in phase `where` of each of these steps
    "slow-pair",  # what goes from `rank` to `peer` takes `value` percent longer
    "cut",  # nothing goes from `rank` to `peer`
    "hang",  # its host never comes out of phase `where`
    "never-ends",  # a kernel that it launches in phase `where` never ends
    "skip",  # it leaves out the step's own all-reduce
    "order",  # it calls a broadcast instead
    "illegal-address",  # a kernel in phase `where` fails
    "ecc",  # the same, by the memory's fault
    "die",  # it is killed in phase `where`
]
FOR_GOOD_S = 100_000


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


def to_text(faults: Iterable[Fault]) -> str:
    return json.dumps([asdict(fault) for fault in faults])


class Script:
    """The faults of this rank, played by its job as it goes."""

    def __init__(self, device: Device | RealDevice, rank: int, faults: Iterable[Fault]) -> None:
        self.device = device
        self.faults = [fault for fault in faults if fault.rank == rank]
        self._is_virtual = os.environ.get("STAND_IN_CLOCK") == "virtual"

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
            if fault.what == "slow" and fault.is_on(step):
                factor *= fault.value
            if fault.what in ("cut", "slow-pair") and step in (fault.step, fault.until):
                begins = step == fault.step
                if fault.what == "cut":
                    self.device.cut(stream, fault.rank, fault.peer, begins)
                else:
                    self.device.slow_pair(stream, fault.rank, fault.peer, int(fault.value) if begins else 0)
        self.device.slow_down(factor)

    def at(self, step: int, where: Phase) -> None:
        """Call at the beginning of each phase, or within it."""
        for fault in self.faults:
            if fault.where != where:
                continue
            if fault.what == "slow-host" and fault.is_on(step):
                self.device.host_works(fault.value) if self._is_virtual else time.sleep(fault.value)
            if step != fault.step:
                continue
            if fault.what == "hang":
                time.sleep(FOR_GOOD_S)
            elif fault.what == "never-ends":
                self.device.hang_next()
            elif fault.what == "illegal-address":
                self.device.fail_next(ILLEGAL_ADDRESS)
            elif fault.what == "ecc":
                self.device.fail_next(ECC)
            elif fault.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)

    def says(self, what: What, step: int) -> bool:
        """Whether a fault that the job itself has to play is due in this step."""
        return any(fault.what == what and fault.step == step for fault in self.faults)
