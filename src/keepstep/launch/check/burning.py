"""Burn-in of all devices of this node at once, each in a process of its own: a driver may hang, and torch is heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from keepstep.core.node_row import Burnt
from keepstep.launch.command.job import gpu_count, interpreter

_MARGIN_S = 120.0  # Importing torch and opening the device may take so long beside the burn-in.
_MOST_BYTES = 1 << 16  # most that is read of a program's answer
_FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_MODULE = "keepstep.validate.burn_in"


def patience_s(seconds: float) -> float:
    """How long a burn-in of so many seconds may take in all."""
    return seconds + _MARGIN_S


def burn_in_all(seconds: float, environ: Mapping[str, str]) -> tuple[Burnt, ...]:
    """Keep every GPU that a program sees here busy for so long; the CPU, where there is none."""
    devices = [f"cuda:{number}" for number in range(gpu_count(environ))] or ["cpu"]
    return run_all(devices, seconds, [interpreter(environ), "-m", _MODULE], patience_s(seconds))


def run_all(
    devices: Sequence[str], seconds: float, command: Sequence[str], most_s: float
) -> tuple[Burnt, ...]:
    """The outcome of ``command DEVICE SECONDS`` for each device; all run at once, for ``most_s`` at most."""
    found: dict[str, Burnt] = {}

    def run(device: str) -> None:
        found[device] = _run(device, seconds, command, most_s)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in devices]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + most_s + 5.0
    for thread in threads:
        thread.join(max(until_s - time.monotonic(), 0.0))
    stuck = "its burn-in is stuck in the kernel, even when killed: the driver hangs"
    return tuple(found.get(one) or Burnt(_name(one), errors=(stuck,)) for one in devices)


def _run(device: str, seconds: float, command: Sequence[str], most_s: float) -> Burnt:
    name = _name(device)
    listening, lifeline = os.pipe()  # the program ends when this process does
    try:
        return _outcome(name, [*command, device, f"{seconds:g}"], seconds, most_s, listening)
    finally:
        os.close(listening)
        os.close(lifeline)


def _outcome(name: str, command: Sequence[str], seconds: float, most_s: float, stdin: int) -> Burnt:
    try:
        child = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Burnt(name, missing=(f"its burn-in cannot be started: {error.strerror}",))
    try:
        out, err = child.communicate(timeout=most_s)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=2.0)
        late = f"its burn-in of {seconds:g} s has not ended after {most_s:g} s"
        # A CPU is only too busy; a device that does not end hangs.
        if name == "CPU":
            return Burnt(name, missing=(late,))
        return Burnt(name, errors=(f"{late}: the device hangs",))
    return outcome(name, child.returncode, out, err)


def outcome(name: str, code: int, out: bytes, err: bytes) -> Burnt:
    """What a burn-in's program said about the device of this name, or how it ended where it said nothing."""
    import msgspec

    if code == 0 and len(out) <= _MOST_BYTES:
        with suppress(msgspec.DecodeError, ValueError):
            return msgspec.json.decode(out, type=Burnt)
    said = err[-_MOST_BYTES:].decode(errors="replace").strip().splitlines()
    last = f": {said[-1][:200]}" if said else ""
    if -code in _FAULTS:
        return Burnt(name, errors=(f"its burn-in was ended by {signal.Signals(-code).name}{last}",))
    # The program catches what a device does; what ends it otherwise, as SIGKILL, is its surroundings.
    return Burnt(name, missing=(f"its burn-in ended with exit code {code} and no answer{last}",))


def _name(device: str) -> str:
    return f"GPU {device.partition(':')[2]}" if device.startswith("cuda") else "CPU"
