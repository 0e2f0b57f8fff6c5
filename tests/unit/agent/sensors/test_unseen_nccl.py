"""Why the shim and the plugin see nothing: told of real processes that have mapped what is named like the libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.agent.sensors.conftest import Start

from keepstep.agent.sensors.processes import ProcessId
from keepstep.agent.sensors.unseen_nccl import NcclRecords, UnseenNccl, why_unseen
from keepstep.core.events import NCCL_NOTE
from keepstep.ring.link_table import LIBRARY, PLUGIN

TORCH, NCCL, SHIM = "torch/lib/libtorch_cuda.so", "nvidia/lib/libnccl.so.2", "ring/libkeepstep_nccl.so"
GIVEN = {"KEEPSTEP_LINKS": "/proc/1/fd/3", PLUGIN: f"/some/where/{LIBRARY}"}
SEEN, UNSEEN = NcclRecords(calls=True, seen=True), NcclRecords(calls=True, seen=False)
BEGIN = "NCCL's calls are not seen, so a slow GPU is not told from a slow host: "


def told(process: ProcessId, records: NcclRecords) -> tuple[str, str]:
    shim, plugin = why_unseen(process, records)
    assert shim is not None
    return shim, plugin


def test_a_job_that_is_seen_or_has_no_nccl_is_not_spoken_of(start: Start) -> None:
    assert told(start(TORCH, NCCL, SHIM, **GIVEN), SEEN) == ("", "")
    assert told(start(NCCL), UNSEEN) == (
        "",
        "",
    )  # Gloo that is taken for NCCL has no CUDA build of torch
    assert told(start(TORCH, NCCL, **GIVEN, KEEPSTEP_NCCL_SHIM="0"), UNSEEN) == ("", "")


@pytest.mark.parametrize(
    ("libraries", "environ", "said"),
    [
        (
            (TORCH, NCCL),
            {},
            "keepstep's library is not in LD_PRELOAD, which sudo, env -i or a wrapper of the script",
        ),
        (
            (TORCH, SHIM),
            {},
            "NCCL is linked statically into torch (no libnccl.so is loaded): use a torch with",
        ),
        ((TORCH, NCCL, SHIM), {}, "they pass by the library in LD_PRELOAD, as after dlsym or RTLD_DEEPBIND"),
    ],
)
def test_why_the_shim_sees_nothing(
    start: Start, libraries: tuple[str, ...], environ: dict[str, str], said: str
) -> None:
    shim, plugin = told(start(*libraries, **GIVEN, **environ), UNSEEN)
    assert shim.startswith(BEGIN + said)
    assert plugin == ""


def test_a_preloaded_library_that_is_not_there_is_named(start: Start, tmp_path: Path) -> None:
    path = f"{tmp_path}/libkeepstep_nccl.so"
    shim, _ = told(start(TORCH, NCCL, **GIVEN, LD_PRELOAD=path), UNSEEN)
    assert (
        shim == f"{BEGIN}the library in LD_PRELOAD ({path}) is not there: make it readable in the container"
    )


def test_an_old_nccl_is_told_with_its_version(start: Start) -> None:
    notes = ("train.py:5", f"{NCCL_NOTE}version 2.14.3 is older than 2.18")
    shim, _ = told(start(TORCH, NCCL, SHIM, **GIVEN), NcclRecords(True, False, notes))
    assert shim == f"{BEGIN}version 2.14.3 is older than 2.18: use NCCL 2.18 or newer"


def test_a_plugin_slot_that_is_taken(start: Start, tmp_path: Path) -> None:
    def plugin(**environ: str) -> str:
        return told(start(TORCH, NCCL, SHIM, KEEPSTEP_LINKS="/proc/1/fd/3", **environ), SEEN)[1]

    begin = "a slow or cut link of NCCL is not told: "
    assert plugin(**{PLUGIN: "ncclprof"}) == (
        f"{begin}NCCL_PROFILER_PLUGIN=ncclprof has the place of keepstep's plugin: unset it"
    )
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_DEBUG=INFO\nNCCL_PROFILER_PLUGIN=other\n")
    assert plugin(NCCL_CONF_FILE=str(file)) == (
        f"{begin}NCCL_PROFILER_PLUGIN in {file} has the place of keepstep's plugin: unset it"
    )
    file.write_text("NCCL_DEBUG=INFO\n")
    assert plugin(NCCL_CONF_FILE=str(file)) == ""


def test_a_process_is_looked_at_after_some_seconds(start: Start) -> None:
    sensor, asked = UnseenNccl(), []

    def records(rank: int) -> NcclRecords:
        asked.append(rank)
        return SEEN if rank == 2 else UNSEEN

    processes = {rank: start(TORCH, NCCL, **GIVEN) for rank in range(3)}
    lines = [sensor.lines(second, "one", processes, records) for second in range(100)]
    assert lines[5] == []
    assert len(lines[-1]) == 1
    assert lines[-1][0].startswith(f"ranks 0-1 on one: {BEGIN}keepstep's library is not in LD_PRELOAD")
    assert asked == [0, 1, 2]
    assert sensor.lines(200, "one", {}, records) == []


def test_a_job_that_is_slow_to_make_its_first_communicator_is_not_said_to_be_unseen(start: Start) -> None:
    sensor, process = UnseenNccl(), {0: start(TORCH, NCCL, SHIM, **GIVEN)}
    early = NcclRecords(calls=False, seen=False)
    asked: list[int] = []
    for second in range(100):
        assert sensor.lines(second, "one", process, lambda rank: asked.append(rank) or early) == []
    assert len(asked) == 3, "after 10, 30 and 70 s"
    lines = [sensor.lines(second, "one", process, lambda _: UNSEEN) for second in range(100, 160)]
    assert lines[-1][0].startswith(f"rank 0 on one: {BEGIN}they pass by")


def test_a_plugin_slot_that_is_taken_is_told_before_the_first_communicator(start: Start) -> None:
    process = start(TORCH, NCCL, SHIM, KEEPSTEP_LINKS="/proc/1/fd/3", **{PLUGIN: "ncclprof"})
    early = NcclRecords(calls=False, seen=False)
    shim, plugin = why_unseen(process, early)
    assert shim is None
    sensor = UnseenNccl()
    lines = [sensor.lines(second, "one", {0: process}, lambda _: early) for second in range(20)]
    assert lines[-1] == [f"rank 0 on one: {plugin}"]
