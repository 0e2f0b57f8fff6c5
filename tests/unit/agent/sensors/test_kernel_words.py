"""What the kernel says is told with the rank that it names; without its log others tell some of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.sensors.gpus import GpuMemoryError, Gpus, Xid
from keepstep.agent.sensors.kernel_sensor import KernelSensor, Killings, rank_of
from keepstep.agent.sensors.late_rows import LateRows


@pytest.fixture(scope="module")
def rows() -> LateRows:
    made = LateRows()
    made.get(wait=True)
    return made


class Log:
    """A file in the place of the kernel's log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text("3,1,1000000,-;NVRM: Xid (PCI:0000:0f:00): 79, GPU has fallen off the bus.\n")
        self._count = 1

    def say(self, *lines: str) -> None:
        with self.path.open("a") as file:
            for line in lines:
                self._count += 1
                file.write(f"3,{self._count},{self._count}000000,-;{line}\n DEVICE=x\n")


def test_only_what_is_said_from_now_on_is_told(tmp_path: Path, rows: LateRows) -> None:
    log = Log(tmp_path / "kmsg")
    kernel = KernelSensor(str(log.path), rows)
    assert kernel.look(1.0, {}) == []
    log.say(
        "usb 1-1: new device",
        f"NVRM: Xid (PCI:0000:3b:00): 31, pid={os.getpid()}, name=python3, Ch 00000008",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        "Memory cgroup out of memory: Killed process 999999999 (python3) total-vm:9kB, anon-rss:8kB",
        "mlx5_core 0000:5e:00.0 ens1f0: Link down",
    )
    found = kernel.look(1.1, {3: os.getpid()})
    assert [(rank, told.row.kind) for rank, told in found][:1] == [(3, "gpu-memory-fault")]
    assert [rank for rank, _ in found[1:]] == [-1] * (len(found) - 1)
    assert {told.row.kind for _, told in found} >= {"gpu-memory-fault", "host-oom", "link-down"}
    assert {told.source for _, told in found} == {"kernel"}
    assert found[0][1].places["pci"] == "0000:3b:00"
    assert kernel.look(1.2, {}) == []
    log.say("mlx5_core 0000:5e:00.0 ens1f0: Link down")
    assert kernel.look(2.0, {}) == []
    log.say("mlx5_core 0000:5e:00.0 ens1f0: Link down")
    assert len(kernel.look(90.0, {})) == 1
    kernel.close()


def test_a_child_of_a_rank_is_the_ranks() -> None:
    code = (
        "import os, sys\nif os.fork() == 0: print(os.getpid(), flush=True); sys.stdin.read()\nelse: os.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        assert rank_of(rank.pid, {7: rank.pid}) == 7
        assert rank_of(child, {6: 1, 7: rank.pid}) == 7
        assert rank_of(child, {8: child, 7: rank.pid}) == 8
        assert rank_of(child, {}) == -1
        rank.communicate()
    assert rank_of(child, {6: 1}) == -1


@pytest.mark.parametrize("name", ["memory.events", "memory.oom_control"])
def test_killings_are_counted_by_the_control_group(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    killings = Killings((tmp_path / "absent", file))
    assert killings.is_there
    assert killings.look(1.0) == ""
    file.write_text("oom 9\noom_kill 4\noom_group_kill 0\n")
    assert killings.look(1.5) == ""  # it is looked at once a second
    group = f"killed for want of memory in control group {tmp_path}"
    assert killings.look(2.1) == f"oom_kill event: a process was {group}"
    file.write_text("oom_kill 6\n")
    assert killings.look(2.2, now=True) == f"oom_kill event: 2 processes were {group}"
    file.unlink()
    assert killings.look(9.0) == ""
    assert not Killings((file,)).is_there


class DrivenGpus(Gpus):
    def __init__(self, *xids: Xid) -> None:
        super().__init__()
        self.left = list(xids)
        self.errors: list[GpuMemoryError] = []

    def new_xids(self, processes: Any) -> list[Xid]:
        left, self.left = self.left, []
        return left

    def new_memory_errors(self, processes: Any) -> list[GpuMemoryError]:
        told, self.errors = self.errors, []
        return told


def test_without_the_log_group_and_driver_tell_some_of_it(
    tmp_path: Path, rows: LateRows, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keepstep.agent")
    gpus = DrivenGpus(Xid(79, 1, "0000:3b:00", 5), Xid(99999, 0), Xid(48, 2))
    kernel = KernelSensor(str(tmp_path / "absent"), rows, gpus)
    assert (
        len([line for line in caplog.messages if "may not be read (No such file or directory)" in line]) == 1
    )
    file = tmp_path / "memory.events"
    file.write_text("oom_kill 0\n")
    kernel._killings = Killings((file,))
    file.write_text("oom_kill 1\n")
    found = kernel.look(5.0, {})
    assert [(rank, told.row.name, told.source, told.places) for rank, told in found] == [
        (5, "xid-79", "NVML", {"pci": "0000:3b:00"}),
        (-1, "xid-48", "NVML", {}),
        (-1, "oom-killer", "control group", {}),
    ]
    assert kernel.look(7.0, {}) == []
    assert len(caplog.messages) == 1


def test_where_the_log_is_read_the_driver_says_nothing_new(tmp_path: Path, rows: LateRows) -> None:
    log = Log(tmp_path / "kmsg")
    kernel = KernelSensor(str(log.path), rows, DrivenGpus(Xid(79, 1)))
    assert kernel.look(5.0, {}) == []
    kernel.close()


@pytest.mark.parametrize("has_log", [True, False])
def test_errors_of_gpu_memory_are_told_with_and_without_the_log(
    has_log: bool, tmp_path: Path, rows: LateRows
) -> None:
    log = Log(tmp_path / "kmsg")
    gpus = DrivenGpus()
    kernel = KernelSensor(str(log.path if has_log else tmp_path / "absent"), rows, gpus)
    at = "NVML: GPU 1 (PCI:0000:9b:00): "
    gpus.errors = [
        GpuMemoryError(f"{at}2 more uncorrected memory errors (2)", 5),
        GpuMemoryError(f"{at}a row of memory could not be remapped", -1),
        GpuMemoryError("NVML: GPU 0: a row of memory is to be remapped at the next reset", -1),
    ]
    found = kernel.look(1.0, {})
    assert [(rank, told.row.name, told.source, told.places) for rank, told in found] == [
        (5, "nvml-uncorrected", "NVML", {"pci": "0000:9b:00"}),
        (-1, "nvml-remap-failed", "NVML", {"pci": "0000:9b:00"}),
        (-1, "nvml-remap-pending", "NVML", {}),
    ]
    assert {told.row.cause_class for _, told in found} == {"node"}
    assert kernel.look(1.1, {}) == []
    kernel.close()
