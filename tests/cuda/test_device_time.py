"""Time on the stand-in's device is exact, whatever the machine does meanwhile: all of this is to the nanosecond."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import TRAIN, run

STEPS, FROM = 12, 6
KERNEL_US = 100


def periods(folder: Path, fault: Fault, ranks: int = 2, watched: bool = False) -> tuple[int, int]:
    """Of a step of DDP in nanoseconds, before the fault and with it; the ranks agree, and so do the steps."""
    done = run(
        TRAIN,
        ["--layout", "ddp", "--steps", str(STEPS)],
        folder,
        ranks=ranks,
        watched=watched,
        faults=[fault],
        clock="virtual",
        kernel_us=KERNEL_US,
    )
    assert done.exit_code == 0, done.console
    by_rank = [device.periods_ns() for device in done.devices]
    assert [len(one) for one in by_rank] == [STEPS - 1] * ranks
    [healthy] = {period for one in by_rank for period in one[1 : FROM - 1]}
    [faulty] = {period for one in by_rank for period in one[FROM:]}
    return healthy, faulty


def test_a_slow_device_makes_the_computing_part_of_a_step_so_much_longer(tmp_path: Path) -> None:
    """Under ``keepstep run``: 1.3 on one rank makes both slower by 0.3 of its kernels' time."""
    healthy, slow = periods(tmp_path, Fault("slow", rank=1, step=FROM, value=1.3), watched=True)
    kernels, rest = divmod(slow - healthy, int(0.3 * KERNEL_US * 1000))
    assert rest == 0
    assert kernels > 20
    assert 0 < healthy - kernels * KERNEL_US * 1000 < 50_000  # what is not computing: two all-reduces


@pytest.mark.long
def test_a_slow_pair_makes_communication_longer_on_all_ranks_alike(tmp_path: Path) -> None:
    healthy, slow = periods(tmp_path, Fault("slow-pair", rank=2, peer=1, step=FROM, value=10_000), ranks=3)
    computing = healthy // (KERNEL_US * 1000) * KERNEL_US * 1000
    # The all-reduces that nothing overlaps take a hundred times as long again; those that were hidden show, too.
    assert slow - healthy >= 100 * (healthy - computing)


@pytest.mark.long
def test_a_slow_host_decides_how_long_a_step_takes(tmp_path: Path) -> None:
    _, slow = periods(tmp_path, Fault("slow-host", rank=1, step=FROM, where="data", value=0.02))
    assert slow == 20_000_000
