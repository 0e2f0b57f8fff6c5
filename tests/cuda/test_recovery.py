"""keepstep on the real ProcessGroupNCCL: deaths are told and the job is started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.late_memory import WAITS
from benchmarks.stand_in.launch import TRAIN, run

STEPS = 30


def test_a_killed_rank_is_named_and_the_job_is_started_again(tmp_path: Path) -> None:
    done = run(
        TRAIN,
        ["--layout", "fsdp2", "--steps", str(STEPS)],
        tmp_path,
        ranks=2,
        flags=["--max-restarts", "1"],
        faults=[Fault("die", rank=1, step=10, where="optimizer")],
        kernel_us=500,
    )
    assert done.exit_code == 0, done.console
    assert "rank 1 died (killed by SIGKILL)" in done.console
    assert all(f"rank {rank} is done" in done.console for rank in range(2))
    assert all(set(device.marks) == set(range(STEPS)) for device in done.devices)


@pytest.mark.long
def test_successors_wait_until_a_full_devices_memory_is_free(tmp_path: Path) -> None:
    done = run(
        TRAIN,
        ["--steps", str(STEPS), "--memory-gb", "0.75"],
        tmp_path,
        ranks=2,
        flags=["--max-restarts", "3"],
        faults=[Fault("die", rank=1, step=10, where="backward")],
        kernel_us=500,
        nvml=True,
        settings={"STAND_IN_MEMORY_GB": "1", "STAND_IN_FREED_AFTER_MS": "2000"},
    )
    assert done.exit_code == 0, done.console
    assert "OutOfMemory" not in done.console
    assert len(WAITS.findall(done.console)) == 1, done.console
    assert "restart 1 of 3" in done.console
    assert "restart 2 of 3" not in done.console
    assert all(set(device.marks) == set(range(STEPS)) for device in done.devices)
