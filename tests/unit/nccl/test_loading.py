"""How the shim is loaded and finds NCCL; who is not watched; and that it never stands in the way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.unit.nccl.shim import COMPILER, NATIVE, Built, command

from keepstep.core.events import NCCL_NOTE, Kind, Op
from keepstep.ring import RingReader, RingWriter

ONE_CALL = """
comm = init(make_id(), 1, 0)
assert all_reduce(comm, 1.0) == [1.0]
"""

LOOKED_UP = """
loaded = ctypes.CDLL(None)
real = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
shim = ctypes.CDLL(os.environ["LD_PRELOAD"], mode=os.RTLD_NOLOAD)
has = lambda library, name: hasattr(library, name)
assert has(loaded, "ncclAllReduce") == (mode == "RTLD_GLOBAL")
assert has(real, "ncclAllReduce")
assert not any(has(library, "ncclAlltoAll") for library in (loaded, real, shim))
assert not has(shim, "ncclAllReduce")
comm = init(make_id(), 1, 0)
data = floats(1)
for _ in range(2):
    assert nccl.caller_ncclAlltoAll(data, data, size(1), FLOAT32, comm, STREAM) == 5
assert all_reduce(comm, 1.0) == [1.0]
"""

FORKS = """
comm = init(make_id(), 1, 0)
child = os.fork()
if child == 0:
    os._exit(0 if all_reduce(comm, 1.0) == [1.0] and all_reduce(init(make_id(), 1, 0), 2.0) == [2.0] else 1)
assert os.waitpid(child, 0)[1] == 0
all_reduce(comm, 3.0, 4.0)
"""

WITH_THE_PROBE = """
from keepstep.ring import RingWriter
def open_ring():
    where, incarnation = os.environ["KEEPSTEP_RING"], int(os.environ.get("KEEPSTEP_INCARNATION", 0))
    return RingWriter(where, rank=0, world_size=1, incarnation=incarnation, join=True)
late, again = sys.argv[3] == "late", sys.argv[4]
comm = init(make_id(), 1, 0) if late else None
writer = open_ring()
group = writer.group("gloo", [0], "cpu:gloo", "")
writer.start(1, 1, group, -1, 5, 0, writer.site("train.py:1"))()
comm = comm or init(make_id(), 1, 0)
all_reduce(comm, 1.0)
writer.start(1, 1, group, -1, 6, 0, 0)()
writer.close()
all_reduce(comm, 2.0)
init(make_id(), 1, 0)  # the same ring: it stays closed
del writer
os.environ.update(KEEPSTEP_RING=again, KEEPSTEP_INCARNATION="1")
comm = init(make_id(), 1, 0)
writer = open_ring()
all_reduce(comm, 1.0, 1.0)
"""


def calls(ring: int) -> list[tuple[int, ...]]:
    records = RingReader(ring).snapshot()
    return records[records["kind"] == Kind.COLLECTIVE][["op", "bytes", "group"]].tolist()


@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_who_looks_a_function_up_is_told_the_truth(built: Built, rings: list[int], mode: str) -> None:
    _, stderr = built.run(LOOKED_UP, built.environment(rings[0]), mode=mode)
    assert stderr == (
        "keepstep: ncclAlltoAll was called, but the loaded NCCL has no such function (ncclInvalidUsage)\n"
    )
    assert calls(rings[0]) == [(Op.ALLREDUCE, 4, 0)]


def test_a_program_that_is_linked_to_nccl(built: Built, rings: list[int], tmp_path: Path) -> None:
    program = tmp_path / "program"
    libraries = (built.folder / "libnccl.so.2", f"-Wl,-rpath,{built.folder}", "-pthread")
    command(COMPILER, "-std=c++17", NATIVE / "tests/nccl_program.cpp", "-o", program, *libraries)
    done = subprocess.run([program, "5"], env=built.environment(rings[0]), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(calls(rings[0])) == 4 * 5 * 3


def test_a_forked_child_calls_unrecorded(built: Built, rings: list[int]) -> None:
    _, stderr = built.run(FORKS, built.environment(rings[0]))
    assert stderr == ""
    assert calls(rings[0]) == [(Op.ALLREDUCE, 8, 0)]
    assert len(RingReader(rings[0]).groups()) == 1


@pytest.mark.parametrize("which", ["early", "late"])
def test_the_probe_and_the_shim_write_one_ring_and_follow_to_the_next(
    built: Built, rings: list[int], which: str
) -> None:
    again = f"/proc/{os.getpid()}/fd/{rings[1]}"
    _, stderr = built.run(WITH_THE_PROBE, built.environment(rings[0]), which, again)
    assert stderr == ""
    reader = RingReader(rings[0])
    gloo, nccl = (1, 0) if which == "late" else (0, 1)
    assert calls(rings[0]) == [(Op.ALLREDUCE, 5, gloo), (Op.ALLREDUCE, 4, nccl), (Op.ALLREDUCE, 6, gloo)]
    assert [one.backend for one in reader.groups()] == (
        ["nccl", "cpu:gloo"] if which == "late" else ["cpu:gloo", "nccl"]
    )
    assert {"train.py:1", "ncclAllReduce float32 sum stream 0x10"} <= {*reader.sites()}
    assert reader.streams()[["group", "started", "completed"]].tolist() == (
        [(0, 1, 1), (1, 2, 2)] if which == "late" else [(0, 2, 2), (1, 1, 1)]
    )
    assert reader.header.closed
    assert calls(rings[1]) == [(Op.ALLREDUCE, 8, 0)]
    assert RingReader(rings[1]).header.incarnation == 1


def test_nobody_is_told_of_where_nobody_watches(built: Built) -> None:
    assert built.run(ONE_CALL, built.environment(None)) == ("", "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"STAND_IN_VERSION": ""}, "the loaded NCCL does not tell its version"),
        ({"KEEPSTEP_RING": "/dev/null"}, "not a regular file, so not a ring"),
    ],
)
def test_who_cannot_be_watched_says_so_once(
    built: Built, rings: list[int], more: dict[str, str], said: str
) -> None:
    _, stderr = built.run(ONE_CALL * 2, {**built.environment(rings[0]), **more})
    assert stderr == f"keepstep: the NCCL calls of this process are not recorded: {said}\n"
    assert RingReader(rings[0]).header.pid == 0


@pytest.mark.parametrize(("version", "told"), [(21403, "2.14.3"), (2804, "2.8.4")])
def test_an_old_nccl_is_called_and_the_ring_says_why_it_has_no_calls(
    built: Built, rings: list[int], version: int, told: str
) -> None:
    said = built.run(ONE_CALL * 2, {**built.environment(rings[0]), "STAND_IN_VERSION": str(version)})
    assert said == ("", "")
    ring = RingReader(rings[0])
    assert ring.groups() == []
    assert ring.sites()[1:] == [f"{NCCL_NOTE}version {told} is older than 2.18"]


def test_the_ring_of_another_process_is_left_alone(built: Built, rings: list[int]) -> None:
    ours = RingWriter(rings[0], rank=0, world_size=1)
    _, stderr = built.run(ONE_CALL, built.environment(rings[0]))
    assert f"claimed by process {os.getpid()}, which still runs" in stderr
    assert ours.writable


def test_the_shim_brings_no_library_with_it(built: Built) -> None:
    found = subprocess.run(["ldd", str(built.shim)], capture_output=True, text=True).stdout
    assert not any(name in found for name in ("libstdc++", "libgcc", "libpython", "nccl.so", "cuda"))
