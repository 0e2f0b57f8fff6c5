"""What the agent makes of NVIDIA's driver: its own Python binding, over a stand-in for the driver's library."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.node import NodeAgent
from keepstep.agent.sensors.gpus import Gpus
from keepstep.launch.node.checks import Subject, gpu_health
from keepstep.ring import RingWriter, create

CARDS = 2
NATIVE = Path(__file__).parents[4] / "native" / "tests"


class Card(ctypes.Structure):
    _fields_ = (
        ("clock", ctypes.c_uint),
        ("celsius", ctypes.c_uint),
        ("busy_percent", ctypes.c_uint),
        ("pid", ctypes.c_uint),
        ("reasons", ctypes.c_ulonglong),
        ("memory_errors", ctypes.c_ulonglong),
        ("replays", ctypes.c_ulonglong),
        ("xid", ctypes.c_ulonglong),
        ("recoveries", ctypes.c_ulonglong),
        ("crc_flits", ctypes.c_ulonglong),
        ("crc_data", ctypes.c_ulonglong),
        ("inactive", ctypes.c_uint),
        ("remap_pending", ctypes.c_uint),
        ("remap_failed", ctypes.c_uint),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Loaded under the name by which the binding looks for the driver's."""
    pytest.importorskip("pynvml")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler (set CXX)")
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a driver: its library would be found")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    flags = ["-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(path)]
    subprocess.run([compiler, str(NATIVE / "stand_in_gpu" / "nvml.cpp"), *flags], check=True)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture
def cards(library: ctypes.CDLL) -> Iterator[Any]:
    """Two GPUs that compute at full clock; the second for this process."""
    found = (Card * CARDS).in_dll(library, "cards")
    for number in range(CARDS):
        found[number] = Card(1980, 60, 99, os.getpid() if number == 1 else 0)
    yield found
    ctypes.memset(found, 0, ctypes.sizeof(found))


@pytest.fixture
def gpus(cards: Any) -> Iterator[Gpus]:
    yield from started()


def started() -> Generator[Gpus]:
    made = Gpus(every_s=0.005)
    made.start()
    yield made
    made.close()


def until(found: Callable[[], Any]) -> Any:
    give_up_s = time.monotonic() + 30
    while not (result := found()):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    return result


def test_a_gpu_that_is_held_down_is_told_by_its_rank(gpus: Gpus, cards: Any) -> None:
    ranks = {4: 1, 5: os.getpid()}
    assert gpus.causes(ranks) == ()
    cards[1].clock, cards[1].celsius, cards[1].reasons = 990, 92, 0x40
    (cause,) = until(lambda: [one for one in gpus.causes(ranks) if one.share > 0.45])
    assert (cause.rank, cause.cause) == (5, "GPU clock")
    assert cause.detail == "GPU 1: 990 MHz, usually 1980: hardware thermal slowdown, 92 °C"
    cards[1].clock = 1980
    until(lambda: not gpus.causes(ranks))


def test_without_processes_to_be_seen_ranks_have_the_gpus_in_their_order(gpus: Gpus, cards: Any) -> None:
    cards[1].pid = 0
    cards[0].clock, cards[0].reasons = 990, 0x08
    (cause,) = until(lambda: gpus.causes({6: 101, 7: 102}))
    assert cause.rank == 6
    assert gpus.causes({6: 101}) == ()  # which GPU it has, nobody can say


def test_at_the_power_cap_from_the_start_is_usual(cards: Any) -> None:
    for card in cards:
        card.clock, card.reasons = 1500, 0x04
    for gpus in started():
        time.sleep(0.2)
        assert gpus.causes({0: 1, 1: 2}) == ()


def test_errors_and_xids_are_logged(gpus: Gpus, cards: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "keepstep.agent")
    time.sleep(0.2)  # what was there before the job is not news
    assert not caplog.messages
    cards[0].memory_errors, cards[1].replays, cards[1].xid = 3, 7, 79
    cards[0].recoveries, cards[0].crc_flits, cards[1].crc_data, cards[1].inactive = 1, 9, 5, 1
    until(lambda: len(caplog.messages) >= 7)
    assert set(caplog.messages) == {
        "GPU 0: 3 more uncorrected memory errors (3)",
        "GPU 0: 1 more NVLink recoveries (1)",
        "GPU 0: 9 more NVLink CRC errors in flits (9)",
        "GPU 1: 7 more NVLink replays (7)",
        "GPU 1: 5 more NVLink CRC errors in data (5)",
        "GPU 1: 1 more NVLinks inactive (1)",
        "GPU 1: XID 79",
    }


def test_xids_are_told_once_with_the_rank_of_their_gpu(gpus: Gpus, cards: Any) -> None:
    time.sleep(0.1)
    ranks = {4: 1, 5: os.getpid()}
    cards[1].xid = 31
    (xid,) = until(lambda: gpus.new_xids(ranks))
    assert (xid.number, xid.gpu, xid.rank) == (31, 1, 5)
    assert gpus.new_xids(ranks) == []


def test_errors_of_memory_are_told_once_with_the_rank_of_their_gpu(cards: Any) -> None:
    ranks = {4: 1, 5: os.getpid()}
    cards[0].remap_failed, cards[0].memory_errors = 1, 9
    running = started()
    gpus = next(running)
    time.sleep(0.2)  # what was there before the job is not news
    assert gpus.new_memory_errors(ranks) == []
    cards[1].memory_errors = 2
    (error,) = until(lambda: gpus.new_memory_errors(ranks))
    assert error.line == "NVML: GPU 1 (PCI:0000:9b:00): 2 more uncorrected memory errors (2)"
    assert error.rank == 5
    cards[1].remap_failed = 1
    found = until(lambda: gpus.new_memory_errors(ranks))
    cards[1].remap_pending = 1
    found += until(lambda: gpus.new_memory_errors(ranks))
    assert [one.line.rpartition(": ")[2] for one in found] == [
        "a row of memory could not be remapped",
        "a row of memory is to be remapped at the next reset",
    ]
    cards[1].pid, cards[0].memory_errors = 0, 10
    (error,) = until(lambda: gpus.new_memory_errors({4: 1}))
    assert error.rank == -1  # which GPU it has, nobody can say
    assert gpus.new_memory_errors(ranks) == []
    running.close()


def test_a_driver_that_refuses_is_said_once(
    library: ctypes.CDLL, cards: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "keepstep.agent")
    result = ctypes.c_int.in_dll(library, "init_result")
    result.value = 18  # library and driver differ
    try:
        made = Gpus()
        made.start()
        until(lambda: caplog.messages)
    finally:
        result.value = 0
    assert [text.partition(":")[0] for text in caplog.messages] == [
        "the GPUs' clocks and errors are not watched"
    ]
    assert made.causes({0: 1}) == ()


def test_without_a_driver_nothing_is_loaded() -> None:
    code = (
        "import sys; from keepstep.agent.sensors.gpus import Gpus; Gpus(library='libno-driver.so').start(); "
        "print(sorted(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "keepstep.agent.sensors.gpus" in said
    assert "pynvml" not in said


def test_without_the_binding_its_name_is_told(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    Gpus().start()
    assert caplog.messages == ["the GPUs' clocks and errors are not watched: pip install 'keepstep[gpu]'"]


def test_the_agent_sends_it_with_its_heartbeat(gpus: Gpus, cards: Any, tmp_path: Path) -> None:
    ring = create(64)
    RingWriter(ring, rank=0, world_size=1).group("world", (0,), "nccl", "default")
    agent = NodeAgent(
        {0: f"/proc/{os.getpid()}/fd/{ring}"}, "here", 0, tmp_path, lambda message: None, gpus=gpus
    )
    cards[1].clock, cards[1].reasons = 990, 0x40
    try:
        agent.poll(time.monotonic_ns())
        until(lambda: agent.heartbeat(time.monotonic_ns()).causes or agent.poll(time.monotonic_ns()))
    finally:
        agent.close()
        os.close(ring)


def healthy() -> list[tuple[str, bool]]:
    return [(one.text, one.unfit) for one in gpu_health.health(Subject("gpu-1", 2))]


def test_the_check_of_a_node_finds_memory_that_failed(cards: Any) -> None:
    assert healthy() == []
    cards[0].memory_errors = 3
    cards[1].remap_pending = 1
    assert healthy() == [
        (
            "node gpu-1: GPU 0: 3 memory errors that were not corrected since its driver was loaded; reset it",
            False,
        ),
        (
            "node gpu-1: GPU 1: rows of its memory wait to be remapped; reset it when nothing runs on it",
            False,
        ),
    ]
    cards[0].memory_errors, cards[1].remap_failed = 0, 1
    text = "node gpu-1: GPU 1: a row of its memory failed and could not be remapped; have the GPU replaced"
    assert healthy() == [(text, True)]


@pytest.mark.parametrize(("result", "told"), [(9, ""), (18, "restart the node"), (999, "look at the driver")])
def test_the_check_of_a_node_whose_driver_does_not_start(
    library: ctypes.CDLL, result: int, told: str
) -> None:
    answer = ctypes.c_int.in_dll(library, "init_result")
    answer.value = result
    try:
        assert [(told in text, unfit) for text, unfit in healthy()] == ([(True, True)] if told else [])
    finally:
        answer.value = 0


def test_without_the_drivers_library_nothing_is_found() -> None:
    assert list(gpu_health.health(Subject("gpu-1", 2), "libno-such-driver.so.1")) == []
