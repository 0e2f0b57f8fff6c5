"""The checks of a node: what each finds, that they run side by side, and that none holds up the launcher."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from tests.unit.launch.local_runs import ToldRun

from keepstep.launch.node import node_checks
from keepstep.launch.node.checks import Found, Subject, kernel_log, resources


def subject(
    *folders: Path, port: int = 0, since_s: float = 0.0, fresh: bool = False, kernel_log: str = "/dev/null"
) -> Subject:
    return Subject("gpu-1", 2, folders, port, since_s, fresh, kernel_log)


def test_a_folder_that_can_be_written_or_made_is_well_and_left_as_it_was(tmp_path: Path) -> None:
    assert [one for one in resources.disk(subject(tmp_path, tmp_path / "not" / "yet")) if one.unfit] == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (found,) = resources.disk(subject(Path("/proc/1/runs")))
    assert found.unfit
    assert found.text.startswith("node gpu-1: /proc/1/runs cannot be written: ")
    (tmp_path / "file").touch()
    (found,) = resources.disk(subject(tmp_path / "file" / "run"))
    assert found.text.startswith(f"node gpu-1: {tmp_path}/file/run cannot be written: Not a directory")


def test_a_port_in_use_is_named_and_a_free_one_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (found,) = resources.ports(subject(port=port))
        assert found.unfit
        assert found.text.startswith(
            f"node gpu-1: port {port} cannot be used: Address already in use; give another"
        )
    assert list(resources.ports(subject(port=port))) == []
    assert list(resources.ports(subject())) == []


def test_shared_memory(tmp_path: Path) -> None:
    assert not any(one.unfit for one in resources.shared_memory(subject(), str(tmp_path)))
    (found,) = resources.shared_memory(subject(), str(tmp_path / "absent"))
    assert not found.unfit


def proc(folder: Path, available: int, full: float | None) -> Path:
    (folder / "meminfo").write_text(f"MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n")
    if full is not None:
        (folder / "pressure").mkdir()
        (folder / "pressure" / "memory").write_text(
            f"some avg10=99.00 avg60=0.00 avg300=0.00 total=1\nfull avg10={full:.2f} avg60=0.00 total=1\n"
        )
    return folder


@pytest.mark.parametrize(
    ("available", "full", "told"),
    [
        (500_000, None, ""),
        (500_000, 3.0, ""),
        (29_000, 0.0, "28 of 976 MiB are available"),
        (500_000, 41.5, "for 41.50 % of the last 10 s"),
    ],
)
def test_memory(tmp_path: Path, available: int, full: float | None, told: str) -> None:
    found = list(resources.memory(subject(), proc(tmp_path, available, full)))
    assert [told in one.text for one in found] == ([True] if told else [])


@pytest.mark.parametrize(("used_mib", "told"), [(900, False), (980, True)])
def test_memory_of_the_control_group(tmp_path: Path, used_mib: int, told: bool) -> None:
    proc(tmp_path, 500_000, None)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/job/step\n")
    (tmp_path / "self" / "mountinfo").write_text("30 24 0:26 / /cg rw - cgroup2 cgroup2 rw\n")
    group = tmp_path / "cg" / "job"
    (group / "step").mkdir(parents=True)
    (group / "memory.max").write_text(f"{1000 << 20}\n")
    (group / "memory.current").write_text(f"{used_mib << 20}\n")
    found = [one.text for one in resources.memory(subject(), tmp_path, tmp_path)]
    end = "end what else runs in it, or give the job a higher memory limit"
    text = f"node gpu-1: 20 of 1000 MiB are available in control group {group}; {end}"
    assert found == ([text] if told else [])


LOG = """6,1,1000000,-;usb 1-1: new device
3,2,2000000,-;NVRM: Xid (PCI:0000:0f:00): 13, Graphics Exception
3,3,3000000,-;NVRM: Xid (PCI:0000:0f:00): 79, GPU has fallen off the bus.
 SUBSYSTEM=pci
3,4,4000000,-;blk_update_request: I/O error, dev sr0, sector 0
3,5,5000000,-;blk_update_request: I/O error, dev nvme0n1, sector 8
"""


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "kmsg"
    path.write_text(LOG)
    return str(path)


@pytest.mark.parametrize(
    ("since_s", "told"),
    [(0.0, "dev nvme0n1, sector 8 (and 1 more)"), (4.5, "dev nvme0n1, sector 8;"), (6.0, "")],
)
def test_broken_hardware_in_the_kernel_log(log: str, since_s: float, told: str) -> None:
    found = list(kernel_log.look(subject(since_s=since_s, kernel_log=log)))
    assert [(told in one.text, one.unfit) for one in found] == ([(True, True)] if told else [])


def test_what_the_kernel_told_before_the_start_is_a_hint(log: str) -> None:
    assert [one.unfit for one in kernel_log.look(subject(fresh=True, kernel_log=log))] == [False]


def test_a_log_that_may_not_be_read_says_nothing() -> None:
    assert list(kernel_log.look(subject(kernel_log="/dev/no-such-log"))) == []


def test_a_check_that_hangs_or_fails_holds_nobody_up() -> None:
    never = threading.Event()
    looks = {
        "memory": lambda _: never.wait(60) or [],
        "disk": lambda _: [Found("full", unfit=True)],
        "ports": lambda _: 1 / 0,
    }
    found = node_checks.run(subject(), looks, patience_s=0.5)
    never.set()
    assert [one.text for one in found] == [
        "node gpu-1: check memory has not answered within 0.5 s",
        "full",
        "node gpu-1: check ports failed: ZeroDivisionError: division by zero",
    ]
    assert [one.unfit for one in found] == [False, True, False]


def test_all_of_them_run_here(tmp_path: Path) -> None:
    assert not any("check" in one.text for one in node_checks.run(subject(tmp_path), patience_s=60.0))


def test_what_the_launcher_finds_counts_until_workers_begin_again(tmp_path: Path) -> None:
    told = ToldRun(tmp_path, children=False)
    found = node_checks.NodeChecks(told)
    found.note(Found("a worker is stuck", unfit=True))
    found.note(Found("slow", unfit=False))
    assert (found.unfit(), told.said) == ("a worker is stuck", ["a worker is stuck", "slow"])
    found.began()
    assert found.unfit() == ""
