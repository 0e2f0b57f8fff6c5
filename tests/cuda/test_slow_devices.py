"""Slow GPUs under hosts that run ahead: ``keepstep run`` names them by what the shim measures, on the stand-in GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import TRAIN, Done, run

from keepstep.core.events import Device, Kind
from keepstep.ring import RingReader

STEPS, ONSET, RANKS = 70, 40, 2


def train(folder: Path, layout: str, factor: float = 1.0, **settings: str) -> Done:
    slow = [Fault("slow", rank=1, step=ONSET, value=factor)] if factor > 1 else []
    done = run(
        TRAIN,
        ["--layout", layout, "--steps", str(STEPS), "--pace-s", "0.1"],
        folder,
        ranks=RANKS,
        faults=slow,
        clock="virtual",
        kernel_us=2000,
        settings=settings,
    )
    assert done.exit_code == 0, done.console
    return done


def measured(done: Done, rank: int) -> dict[int, int]:
    """The period of each iteration in ns, by its number, as the ring of this rank has it."""
    rows = RingReader(done.folder / "run" / "rings" / f"rank-{rank:05d}.ring").snapshot()
    rows = rows[(rows["kind"] == int(Kind.DEVICE)) & (rows["op"] == int(Device.ITERATION))]
    periods = rows["end_ns"] - rows["wait_ns"]
    return dict(zip((rows["peer"] - 1).tolist(), periods.tolist(), strict=True))


def synchronizations(done: Done) -> list[int]:
    """How often each rank's host has waited for its device, the ranks in any order."""
    counts = [json.loads(one) for one in re.findall(r"is done, its process called ({.*})", done.console)]
    return sorted(one["synchronizations"] for one in counts)


@pytest.mark.parametrize(
    ("layout", "factor"), [("ddp", 1.3), pytest.param("fsdp2", 2.0, marks=pytest.mark.long)]
)
def test_a_slow_device_is_named_after_three_iterations(tmp_path: Path, layout: str, factor: float) -> None:
    done = train(tmp_path, layout, factor)
    incident = json.loads((done.folder / "run" / "incidents" / "0001.json").read_text())
    (culprit,) = incident["culprits"]
    assert (culprit["rank"], culprit["cause"]) == (1, "compute on the GPU")
    assert culprit["confidence"] == "high"
    assert abs(incident["onset_step"] - ONSET) <= 1
    assert incident["detected_step"] - ONSET < 3
    for rank, device in enumerate(done.devices):
        found = measured(done, rank)
        truth = {
            step: device.marks[step] - device.marks[step - 1] for step in found if step - 1 in device.marks
        }
        assert len(truth) > STEPS // 2
        assert {step: found[step] for step in truth} == pytest.approx(truth, rel=0.005)


@pytest.mark.long
def test_a_gpu_whose_clock_is_held_down_is_named_with_the_reason(tmp_path: Path) -> None:
    """The driver's clock is read once a second, so that the reason comes after the verdict."""
    pytest.importorskip("pynvml")
    words = ["--layout", "ddp", "--steps", "90", "--pace-s", "0.25"]
    hot = Fault("hot", rank=1, step=ONSET, value=2.0)
    done = run(TRAIN, words, tmp_path, ranks=RANKS, faults=[hot], clock="virtual", kernel_us=8000)
    assert done.exit_code == 0, done.console
    incident = json.loads((tmp_path / "run" / "incidents" / "0001.json").read_text())
    (culprit,) = incident["culprits"]
    assert (culprit["rank"], culprit["cause"], culprit["confidence"]) == (1, "GPU clock", "high")
    assert "GPU 1: 990 MHz, usually 1980: hardware thermal slowdown, 92 °C" in culprit["detail"]
    assert "at a closer look" in done.console


def test_nothing_is_synchronized_for_it(tmp_path: Path) -> None:
    watched = train(tmp_path / "watched", "ddp")
    alone = train(tmp_path / "alone", "ddp", KEEPSTEP_DEVICE_TIMES="0")
    assert len(measured(watched, 0)) > STEPS // 2
    assert not measured(alone, 0)
    assert synchronizations(watched) == synchronizations(alone)
    assert len(synchronizations(alone)) == RANKS
    assert not list((watched.folder / "run" / "incidents").glob("*.json"))
