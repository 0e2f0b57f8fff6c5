"""Real injection inside a training process: the script calls the hooks, the faults of its rank happen.

Where no sentence names this rank, every hook returns at once. Each fault that strikes is logged as a JSON line in the
file named by ``KEEPSTEP_FAULT_LOG``, which keepstep's own judgement never reads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from keepstep.core.errors import FaultError
from keepstep.faults.grammar import (
    PLACES,
    Delay,
    Fault,
    Hang,
    Kill,
    Raise,
    RankFault,
    Skip,
    Slow,
    SlowData,
    Stop,
)

_FOREVER_S = 10 * 365 * 86400.0

# This program runs in its own process: a stopped process cannot wake itself. It ends when the target ends.
_STOPPER = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
try:
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(0.05, max(0.0, end - time.monotonic())))
        os.kill(pid, 0)
    os.kill(pid, signal.SIGCONT)
except ProcessLookupError:
    pass
"""


class InjectedError(RuntimeError):
    """What ``raise in rank ...`` raises. It stands for an error of the user, so it is none of keepstep's own errors."""


class Injector:
    """Carries out the faults of one rank.

    The script calls :meth:`begin_step` when a step begins, :meth:`at` each time it enters a phase (``forward``,
    ``backward``, ``optimizer``, ``data``), :meth:`fetch` inside its data loader, and asks :meth:`compute_factor` how
    much longer its compute is to take.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        rank: int,
        *,
        sleep: Callable[[float], None] = time.sleep,
        send_signal: Callable[[int, int], None] = os.kill,
        log_path: str | None = None,
    ) -> None:
        """Take from ``faults`` those of this rank.

        Raises:
            FaultError: a link fault, which no training process can carry out (see :mod:`keepstep.faults.link`).
        """
        mine: list[RankFault] = []
        for fault in faults:
            if not isinstance(fault, RankFault):
                raise FaultError(
                    f'fault "{fault}": a training process cannot change its host\'s links; '
                    "inject it from outside with keepstep.faults.link"
                )
            if fault.rank == rank:
                mine.append(fault)
        self.rank = rank
        self.step = -1
        self._faults = tuple(mine)
        self._done: set[RankFault] = set()
        self._factor = 1.0
        self._entries = dict.fromkeys(PLACES, 0)  # how often each phase was entered in this step
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._sleep, self._signal = sleep, send_signal
        self._log_path = log_path if log_path is not None else os.environ.get("KEEPSTEP_FAULT_LOG")

    def begin_step(self, step: int) -> None:
        """Note that ``step`` begins: stop, kill and raise strike here; slowness starts and ends here.

        Raises:
            InjectedError: on ``raise in rank ...``.
        """
        self.step = step
        self._entries = dict.fromkeys(PLACES, 0)
        factor = 1.0
        for fault in self._faults:
            if isinstance(fault, Slow) and self._covers(fault.step, fault.steps):
                factor *= fault.factor
            elif isinstance(fault, Stop | Kill | Raise) and fault.step == step and self._begins(fault):
                self._strike(fault)
        if factor != self._factor:
            self._log(f"compute factor {factor:g}")
        self._factor = factor

    def at(self, phase: str) -> None:
        """Note that the script enters ``phase``: hangs in that phase, and delays of it, strike here."""
        if phase not in PLACES:
            raise FaultError(f'no such phase: "{phase}"; expected one of {", ".join(PLACES)}')
        step, entry = self.step, self._entries[phase]
        self._entries[phase] += 1
        for fault in self._faults:
            if isinstance(fault, Delay):
                if (fault.place, fault.entry) == (phase, entry) and self._covers(fault.step, fault.steps):
                    self._begins(fault)
                    self._sleep(fault.seconds)
            elif (
                isinstance(fault, Hang) and (fault.place, fault.step) == (phase, step) and self._begins(fault)
            ):
                self._sleep(_FOREVER_S if fault.seconds is None else fault.seconds)

    def fetch(self) -> None:
        """Note that the data loader makes a batch: where the loader is to be slow, this sleeps."""
        for fault in self._faults:
            if isinstance(fault, SlowData) and self._covers(fault.step, fault.steps):
                self._begins(fault)
                self._sleep(fault.seconds)

    def skips(self) -> bool:
        """Whether the script shall leave out the collective that it is about to call; True once."""
        return any(
            isinstance(fault, Skip) and self.step >= fault.step and self._begins(fault)
            for fault in self._faults
        )

    def compute_factor(self) -> float:
        """How many times its healthy time this rank's compute takes in the present step; 1.0 when healthy."""
        return self._factor

    def _covers(self, first: int, steps: int | None) -> bool:
        return self.step >= first and (steps is None or self.step < first + steps)

    def _begins(self, fault: RankFault) -> bool:
        """Log a fault that strikes for the first time; False if it has struck before."""
        if fault in self._done:
            return False
        self._done.add(fault)
        self._log(str(fault))
        return True

    def _strike(self, fault: Stop | Kill | Raise) -> None:
        if isinstance(fault, Raise):
            raise InjectedError(f"injected: {fault}")
        if isinstance(fault, Kill):
            self._signal(os.getpid(), signal.SIGKILL)
        elif fault.seconds is None:
            self._signal(os.getpid(), signal.SIGSTOP)
        else:
            self._helpers.append(stop_for(os.getpid(), fault.seconds))

    def _log(self, what: str) -> None:
        if not self._log_path:
            return
        line = {"unix_s": round(time.time(), 6), "rank": self.rank, "step": self.step, "did": what}
        with open(self._log_path, "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


def stop_for(pid: int, seconds: float) -> subprocess.Popen[bytes]:
    """Stop process ``pid`` (SIGSTOP) for ``seconds``; returns the helper that stops and wakes it (SIGCONT)."""
    command = [sys.executable, "-I", "-S", "-c", _STOPPER, str(pid), str(seconds)]
    return subprocess.Popen(command, start_new_session=True, close_fds=True)
