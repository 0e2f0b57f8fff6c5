"""What a process can have of its node's memory, by the limits of all control groups around it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint.memory.cache import default_limit_bytes
from keepstep.core.control_groups import folders
from keepstep.core.node_memory import available_bytes, bounds, total_bytes

MIB = 1 << 20
NONE_V1 = 9223372036854771712
V2 = "0::/system.slice/job/step", "30 24 0:26 / /cg rw - cgroup2 cgroup2 rw"
V1 = "4:memory:/slurm/job_7/step_0", "35 31 0:32 / /cg rw - cgroup cgroup rw,memory"


def node(folder: Path, version: tuple[str, str], files: dict[str, object]) -> tuple[int, int, str]:
    """Total, available, and the group that leaves least, in MiB on a machine with 64 GiB of which 48 are available."""
    (folder / "self").mkdir()
    (folder / "self" / "cgroup").write_text(f"{version[0]}\n")
    (folder / "self" / "mountinfo").write_text(f"{version[1]}\n")
    (folder / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n")
    for name, content in files.items():
        (folder / "cg" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cg" / name).write_text(f"{content}\n")
    found = bounds(folder, folder)
    tightest = min(found, key=lambda bound: bound.available_bytes)
    group = f"/{tightest.group.relative_to(folder / 'cg')}" if tightest.group else ""
    return (
        min(bound.total_bytes for bound in found) // MIB,
        min(bound.available_bytes for bound in found) // MIB,
        group,
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (65536, 49152, "")),
        ({"system.slice/job/step/memory.max": "max", "memory.max": "max"}, (65536, 49152, "")),
        (
            {"system.slice/job/step/memory.max": 8192 * MIB, "system.slice/memory.max": "max"},
            (8192, 8192, "/system.slice/job/step"),
        ),
        # A limit of a group around it holds, too; what its other members use counts.
        (
            {
                "system.slice/job/step/memory.max": 8192 * MIB,
                "system.slice/job/step/memory.current": 1024 * MIB,
                "system.slice/job/memory.max": 6144 * MIB,
                "system.slice/job/memory.current": 5120 * MIB,
            },
            (6144, 1024, "/system.slice/job"),
        ),
        # Cached files can go; above ``high`` a group hardly runs; a folder may lack the controller.
        (
            {
                "system.slice/memory.max": 8192 * MIB,
                "system.slice/memory.high": 4096 * MIB,
                "system.slice/memory.current": 3072 * MIB,
                "system.slice/memory.stat": f"anon 5\ninactive_file {1000 * MIB}\nactive_file {24 * MIB}\nshmem 9",
            },
            (4096, 2048, "/system.slice"),
        ),
        ({"system.slice/memory.high": 4096 * MIB, "system.slice/memory.max": "max"}, (4096, 4096, "/system.slice")),
        (
            {"system.slice/memory.max": 4096 * MIB, "system.slice/memory.current": 5000 * MIB},
            (4096, 0, "/system.slice"),
        ),
        ({"system.slice/memory.max": 999999 * MIB}, (65536, 49152, "")),
    ],
)  # fmt: skip
def test_version_2(tmp_path: Path, files: dict[str, object], expected: tuple[int, int, str]) -> None:
    assert node(tmp_path, V2, files) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.limit_in_bytes": NONE_V1, "slurm/memory.limit_in_bytes": NONE_V1}, (65536, 49152, "")),
        # The root group's limit was believed, and the job was killed for want of memory.
        (
            {
                "memory.limit_in_bytes": NONE_V1,
                "slurm/memory.limit_in_bytes": NONE_V1,
                "slurm/job_7/memory.limit_in_bytes": 16384 * MIB,
                "slurm/job_7/memory.usage_in_bytes": 12288 * MIB,
                "slurm/job_7/memory.stat": f"inactive_file 3\ntotal_inactive_file {512 * MIB}\ntotal_active_file 0",
                "slurm/job_7/step_0/memory.limit_in_bytes": NONE_V1,
            },
            (16384, 4608, "/slurm/job_7"),
        ),
        # Without a hierarchy a group does not account for those inside.
        (
            {
                "slurm/memory.limit_in_bytes": 1024 * MIB,
                "slurm/memory.use_hierarchy": 0,
                "slurm/job_7/memory.limit_in_bytes": 16384 * MIB,
                "slurm/job_7/memory.use_hierarchy": 1,
                "slurm/job_7/step_0/memory.use_hierarchy": 0,
            },
            (16384, 16384, "/slurm/job_7"),
        ),
    ],
)  # fmt: skip
def test_version_1(tmp_path: Path, files: dict[str, object], expected: tuple[int, int, str]) -> None:
    assert node(tmp_path, V1, files) == expected


def test_of_this_machine() -> None:
    assert 0 < available_bytes() <= total_bytes() < 1 << 60
    assert default_limit_bytes() == total_bytes() // 2


@pytest.fixture
def nested() -> Iterator[Path]:
    """A real group in a real group that has a limit of 256 MiB; below this process's own one."""
    own = [upwards[0] for upwards in folders("memory") if (upwards[0] / "memory.limit_in_bytes").exists()]
    if not own or not os.access(own[0], os.W_OK):
        pytest.skip("no control group of version 1 in which this user can make others")
    outer = own[0] / f"keepstep-test-{os.getpid()}"
    inner = outer / "step"
    try:
        outer.mkdir()
        (outer / "memory.limit_in_bytes").write_text(str(256 * MIB))
        inner.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    else:
        yield inner
    finally:
        for folder in (inner, outer):
            if folder.exists():
                folder.rmdir()


def test_a_real_nested_group(nested: Path) -> None:
    script = """
        import os, sys
        open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
        from keepstep.checkpoint.memory.cache import default_limit_bytes
        from keepstep.core.node_memory import available_bytes
        before = available_bytes()
        held = bytearray(os.urandom(1 << 20) * 64)
        print(default_limit_bytes(), before, available_bytes())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(nested)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    limit, before, after = map(int, done.stdout.split())
    assert limit == 128 * MIB
    assert before <= 256 * MIB
    assert after <= before - 60 * MIB
