"""Time on the stand-in's device is exact, whatever the machine does meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import TRAIN, run

STEPS, FROM = 12, 6
KERNEL_US = 100


def test_a_slow_device_makes_the_computing_part_of_a_step_so_much_longer(tmp_path: Path) -> None:
    """DDP of two ranks under ``keepstep run``: 1.3 on one of them makes both 0.3 of its kernels' time slower."""
    done = run(
        TRAIN,
        ["--layout", "ddp", "--steps", str(STEPS)],
        tmp_path,
        ranks=2,
        faults=[Fault("slow", rank=1, step=FROM, value=1.3)],
        clock="virtual",
        kernel_us=KERNEL_US,
    )
    assert done.exit_code == 0, done.console
    for device in done.devices:
        periods = device.periods_ns()
        assert len(periods) == STEPS - 1
        healthy, slow = set(periods[1 : FROM - 1]), set(periods[FROM:])
        assert len(healthy) == len(slow) == 1  # to the nanosecond, all alike
        computing = (slow.pop() - healthy.pop()) / 0.3
        kernels = computing / (KERNEL_US * 1000)
        assert kernels == pytest.approx(round(kernels), abs=1e-6)
        assert kernels > 20
