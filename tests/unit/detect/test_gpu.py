from __future__ import annotations

import pytest

from keepstep.detect.host_causes import GpuSample, low_clock, usual_clock

HOT, POWER, IDLE = 0x20, 0x04, 0x01


def looks(*clocks: int, reasons: int = HOT, busy: bool = True) -> list[GpuSample]:
    return [GpuSample(float(at), clock, reasons, 91, busy) for at, clock in enumerate(clocks)]


def test_a_clock_that_is_held_down_is_told_with_its_reasons() -> None:
    low = low_clock(looks(1000, 980, 990, reasons=HOT | POWER), 1980)
    assert low is not None
    assert low.share == pytest.approx(0.5)
    assert low.detail == "990 MHz, usually 1980: thermal slowdown, power cap, 91 °C"


@pytest.mark.parametrize(
    ("samples", "usual"),
    [
        (looks(1500, 1500, 1500, reasons=POWER), 1500.0),  # at its power cap, as always
        (looks(1450, 1450, 1450), 1500.0),  # too little to matter
        (looks(345, 345, 345, reasons=IDLE), 1980.0),
        (looks(345, 345, 345, busy=False), 1980.0),
        (looks(1000, 1000), 1980.0),  # too few
        (looks(1000, 1000, 1000, 1980, 1980, 1980, 1980), 1980.0),  # for less than half of the time
        (looks(1000, 1000, 1000, reasons=0), 1980.0),  # the driver names no reason
        (looks(1000, 1000, 1000), 0.0),  # nobody knows what is usual
        ([], 1980.0),
    ],
)
def test_other_clocks_are_not(samples: list[GpuSample], usual: float) -> None:
    assert low_clock(samples, usual) is None


def test_what_is_usual_is_the_clock_of_a_gpu_that_computes() -> None:
    assert usual_clock(looks(1980, 1965, 1980) + looks(345, 345, 345, 345, busy=False)) == 1980
    assert usual_clock(looks(345, busy=False)) == 0
