"""The layouts that megatron-core and DeepSpeed make train on the stand-in, and a slow rank is named in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.campaign.trial import read_incidents
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import TRAIN, is_installed, run

pytestmark = pytest.mark.cuda
LAYOUTS = [("megatron", "megatron.core", 4, 1600), ("deepspeed", "deepspeed", 2, 2800)]


@pytest.mark.parametrize(("layout", "module", "ranks", "kernel_us"), LAYOUTS, ids=lambda one: str(one))
def test_a_slow_rank_is_named(layout: str, module: str, ranks: int, kernel_us: float, tmp_path: Path) -> None:
    if not is_installed(module):
        pytest.skip(f"{module} is not installed: make frameworks")
    done = run(
        TRAIN,
        ["--layout", layout, "--steps", "56", "--pace-s", "0.25"],
        tmp_path,
        ranks=ranks,
        faults=[Fault("slow", rank=1, step=36, value=2)],
        clock="virtual",
        kernel_us=kernel_us,
        values=True,
    )
    assert done.exit_code == 0, done.console
    assert all(len(device.marks) == 56 for device in done.devices)
    (incident,) = read_incidents(tmp_path / "run")
    (culprit,) = incident["culprits"]
    assert (incident["kind"], culprit["rank"], culprit["cause"]) == ("slow", 1, "compute on the GPU")
