"""The NCCL profiler plugin in a stand-in for NCCL (native/tests/profiler_host.cpp: no GPU, no network, not NCCL), for
each version of the interface: it counts what happened, whatever the order, the thread or the moment of death."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.link_counters import FOREIGN, LinkSnapshot
from keepstep.detect.link_flow import Flow, judge
from keepstep.ring.link_reader import LinkReader
from keepstep.ring.link_table import create

NATIVE = Path(__file__).parents[3] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
ABIS = (3, 4, 5, 6, 7)
CHUNK = 65536
LIBRARY = "libkeepstep_nccl_profiler.so"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (set CXX)")

Build = tuple[Path, Path]  # the host, the plugin


def build(where: Path, *flags: str) -> Build:
    host, library = where / "profiler_host", where / LIBRARY
    both = [str(COMPILER), "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    plain = ["-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
    linked = ["-Wl,--as-needed", "-Wl,-z,nodelete"]
    for command in (
        [*both, str(NATIVE / "tests" / "profiler_host.cpp"), "-o", str(host), "-ldl"],
        [*both, *plain, str(NATIVE / "nccl_profiler.cpp"), "-o", str(library), *linked],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 and "san" in done.stderr and flags:
            pytest.skip(f"this compiler has no {' '.join(flags)}")
        assert done.returncode == 0, done.stderr
    return host, library


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return build(tmp_path_factory.mktemp("profiler"))


@contextmanager
def table(links: int = 64) -> Iterator[int]:
    descriptor = create(links)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def running(built: Build, descriptor: int | None, abi: int, *mode: object) -> Iterator[subprocess.Popen[str]]:
    environment = {k: v for k, v in os.environ.items() if k != "KEEPSTEP_LINKS"}
    if descriptor is not None:
        environment["KEEPSTEP_LINKS"] = f"/proc/{os.getpid()}/fd/{descriptor}"
    command = [str(built[0]), str(built[1]), str(abi), *map(str, mode)]
    pipe = subprocess.PIPE
    host = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True)
    try:
        yield host
    finally:
        host.kill()
        host.communicate()


def ready(host: subprocess.Popen[str]) -> list[str]:
    """What the host says before it waits."""
    assert host.stdout is not None
    said: list[str] = []
    for line in host.stdout:
        if line.strip() == "ready":
            return said
        said.append(line.strip())
    _, error = host.communicate()
    if "unexpected memory mapping" in error:
        pytest.skip("ThreadSanitizer does not run with this kernel's address layout")
    raise AssertionError(error)


def ended(host: subprocess.Popen[str]) -> None:
    _, error = host.communicate(timeout=120)
    assert host.returncode == 0, error


def rows(snapshot: LinkSnapshot) -> dict[tuple[int, int, int, bool], Any]:
    return {(int(r["comm"]), int(r["peer"]), int(r["channel"]), bool(r["send"])): r for r in snapshot.links}


STAGES = ("started", "ready", "posted", "completed", "finished")


@pytest.mark.parametrize("abi", ABIS)
def test_what_a_training_does_is_counted(built: Build, abi: int) -> None:
    with table() as descriptor, running(built, descriptor, abi, "orders") as host:
        ready(host)
        reader = LinkReader(descriptor)
        seen = reader.snapshot()
        assert (seen.abi, seen.pid, seen.unsound) == (abi, host.pid, 0)
        found = rows(seen)
        moved = {(0, 2, 0, True), (0, 2, 1, True), (0, 0, 0, False), (0, 0, 1, False)}
        assert set(found) == moved | {(FOREIGN, 9, 1, True)}
        for key in moved:
            assert [int(found[key][stage]) for stage in STAGES] == [60] * 5
            assert found[key]["bytes"] == 60 * CHUNK
        assert int(found[FOREIGN, 9, 1, True]["completed"]) == 4
        assert seen.losses.foreign == 1
        windows = seen.windows[[tuple(r)[:4] == (0, 0, True, 2) for r in seen.links]][0]
        assert [int(n) for n in windows["bytes"]] == [0] * 5 + [CHUNK] * 60

        group, split, aborted = seen.communicators
        assert (group.id, group.name, group.rank, group.is_open) == (0xABCDEF, "dp group", 1, True)
        assert (group.size, group.nodes) == ((0, 0) if abi == 3 else (4, 2))
        assert (group.collectives, group.p2ps, group.enqueued) == (3, 1, 4)
        assert group.last is not None
        assert (group.last.kind, group.last.function, group.last.datatype) == ("p2p", "Send", "Float32")
        assert (group.last.count, group.last.other) == (77, 3)
        assert split.last is not None
        called = (split.last.function, split.last.algorithm, split.last.protocol, split.last.datatype)
        assert called == ("AllReduce", "RING", "SIMPLE", "Bfloat16")
        assert (split.last.count, split.last.warps, split.last.channels) == (1 << 20, 16, 2)
        assert not split.is_open
        assert not aborted.is_open
        assert seen.losses.stale > 0  # what came after an abort
        ended(host)
        after = reader.snapshot()
        assert [c.is_open for c in after.communicators] == [False] * 3


@pytest.mark.parametrize("abi", ABIS)
def test_where_each_link_is_held_up_is_told_apart(built: Build, abi: int) -> None:
    with table() as descriptor, running(built, descriptor, abi, "hold") as host:
        ready(host)
        reader = LinkReader(descriptor)

        def flows(later_s: float) -> dict[int, Flow]:
            seen = reader.snapshot(time.monotonic_ns() + int(later_s * 1e9))
            assert all(c.last is not None and c.last.seq == 41 for c in seen.communicators)
            return {
                int(link["peer"]): Flow(int(j["flow"]))
                for link, j in zip(seen.links, judge(seen), strict=True)
            }

        held = {0: Flow.GPU, 1: Flow.PEER, 2: Flow.STALLED, 3: Flow.WAITING, 4: Flow.GPU, 5: Flow.IDLE}
        assert flows(10) == held
        host.kill()  # what a dead process had under way is still there
        host.wait()
        assert flows(10) == held
        assert [int(n) for n in reader.snapshot().links["abandoned"]] == [0] * 6


@pytest.mark.parametrize("abi", [3, 7])
def test_many_threads_lose_nothing(built: Build, abi: int) -> None:
    count_all(built, abi, 4, 2_000)


def count_all(built: Build, abi: int, threads: int, operations: int) -> None:
    with table(256) as descriptor, running(built, descriptor, abi, "threads", threads, operations) as host:
        reader = LinkReader(descriptor)
        looks = 0
        while host.poll() is None and not reader.snapshot().communicators:
            pass
        while host.poll() is None and sum(c.is_open for c in reader.snapshot().communicators) > 1:
            judge(reader.snapshot())
            looks += 1
        (steps,) = ready(host)
        seen = reader.snapshot()
        shared = seen.links[seen.links["comm"] == 0]
        assert [int(shared[stage].sum()) for stage in STAGES] == [int(steps)] * 5
        assert seen.unsound == 0
        assert (seen.losses.operations, seen.losses.stale, shared["abandoned"].sum()) == (0, 0, 0)
        for row, window in zip(seen.links, seen.windows, strict=True):
            assert (window["time_ns"] > 0).sum() == min(int(row["completed"]), len(window))
        ended(host)


@pytest.mark.parametrize("abi", [3, 7])
def test_killed_at_any_moment_it_leaves_a_right_table(built: Build, abi: int) -> None:
    chance = random.Random(abi)
    with table(256) as descriptor:
        reader = LinkReader(descriptor)
        for _ in range(12):  # each takes over from the dead one before
            with running(built, descriptor, abi, "for_ever", 4) as host:
                while reader.snapshot().pid != host.pid or not len(reader.snapshot().links):
                    assert host.poll() is None
                until = time.monotonic() + chance.uniform(0.001, 0.05)
                while time.monotonic() < until:
                    judge(reader.snapshot())
                host.kill()
                host.wait()
            seen = reader.snapshot()
            assert seen.unsound == 0
            assert len(seen.links) > 0
            assert len(judge(seen)) == len(seen.links)


@pytest.mark.parametrize("abi", ABIS)
def test_what_only_some_builds_and_settings_tell_of(
    built: Build, monkeypatch: pytest.MonkeyPatch, abi: int
) -> None:
    monkeypatch.setenv("KEEPSTEP_NCCL_KERNELS_EVERY", "3")
    with table() as descriptor, running(built, descriptor, abi, "extras") as host:
        ready(host)
        seen = LinkReader(descriptor).snapshot()
        (link,), (group,) = seen.links, seen.communicators
        assert [int(link[name]) for name in ("net_posted", "net_completed", "net_bytes")] == [3, 2, 1024]
        assert group.kernels == 2  # of six collectives every third
        assert group.kernel_ns == 1000 if abi > 3 else group.kernel_ns < 1_000_000_000
        assert group.last is not None
        kind, function = ("copy-engine", "AllGather") if abi >= 6 else ("collective", "AllReduce")
        assert (group.last.kind, group.last.function) == (kind, function)
        assert group.collectives == (7 if abi >= 6 else 6)
        ended(host)


def test_a_living_process_keeps_its_table(built: Build) -> None:
    with table() as descriptor, running(built, descriptor, 5, "hold") as first:
        ready(first)
        with running(built, descriptor, 5, "orders") as second:
            ready(second)
            seen = LinkReader(descriptor).snapshot()
            assert seen.pid == first.pid
            assert [c.name for c in seen.communicators] == ["held"]
            ended(second)


def test_the_calls_of_a_forked_child_count_for_nobody(built: Build) -> None:
    with table() as descriptor, running(built, descriptor, 6, "fork") as host:
        ready(host)
        seen = LinkReader(descriptor).snapshot()
        assert [c.name for c in seen.communicators] == ["parent"]
        assert [int(seen.links[stage].sum()) for stage in STAGES] == [4] * 5
        ended(host)


@pytest.mark.parametrize("path", [None, "", "/nonexistent", "/dev/zero", "/dev/null", "/"])
def test_without_a_table_nothing_is_asked_for_and_nothing_fails(
    built: Build, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    with running(built, None, 4, "orders") as host:
        ready(host)
        ended(host)
    if path is not None:
        monkeypatch.setenv("KEEPSTEP_LINKS", path)
        done = subprocess.run(
            [*map(str, built), "7", "orders"], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_a_table_too_small_loses_links_and_says_so(built: Build) -> None:
    with table(16) as descriptor, running(built, descriptor, 7, "threads", 3, 200) as host:
        ready(host)
        seen = LinkReader(descriptor).snapshot()
        assert len(seen.links) <= 16
        assert seen.unsound == 0
        ended(host)


@pytest.mark.parametrize("abi", ABIS)
def test_events_without_sense_do_no_harm(built: Build, abi: int) -> None:
    with table() as descriptor, running(built, descriptor, abi, "storm", 3, 20_000) as host:
        ready(host)
        assert LinkReader(descriptor).snapshot().losses.stale > 0
        ended(host)


@pytest.mark.long
def test_memory_and_undefined_behaviour(tmp_path: Path) -> None:
    checked = build(tmp_path, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    for mode in (("orders",), ("hold",), ("storm", 2, 5_000)):
        for abi in (3, 7):
            with table() as descriptor, running(checked, descriptor, abi, *mode) as host:
                ready(host)
                ended(host)


@pytest.mark.long
def test_many_threads_under_the_thread_sanitizer(tmp_path: Path) -> None:
    checked = build(tmp_path, "-fsanitize=thread")
    count_all(checked, 7, 3, 300)
    with table() as descriptor, running(checked, descriptor, 3, "storm", 3, 2_000) as host:
        ready(host)
        ended(host)


def test_the_plugin_needs_nothing_but_the_c_library(built: Build) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")
    told = subprocess.run([readelf, "-dW", str(built[1])], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]\n ") for line in told.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libpthread.so.0"}
    assert "NODELETE" in told  # NCCL unloads it with the last communicator
    symbols = subprocess.run(
        [readelf, "--dyn-syms", "-W", str(built[1])], capture_output=True, text=True, check=True
    )
    exported = {
        line.split()[-1]
        for line in symbols.stdout.splitlines()
        if " DEFAULT " in line and " UND " not in line
    }
    assert exported == {f"ncclProfiler_v{abi}" for abi in ABIS}
