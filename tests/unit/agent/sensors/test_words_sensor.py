"""What ranks write is followed in memory and in files, within bounds, and told once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.agent.sensors import words_sensor as sensor
from keepstep.agent.sensors.late_rows import LateRows
from keepstep.agent.sensors.words_sensor import LAG_BYTES, RANK_BYTES, WordsSensor
from keepstep.detect.failure_rows import RowMatcher, shipped_rows
from keepstep.launch.workers.kept_words import Console, KeptWords, can_be_kept, new_memory
from keepstep.launch.workers.rings import path_of

FULL = b"OSError: [Errno 28] No space left on device: '/data/a'\n"
STEP = b"[2026-01-01 10:00:00] iteration 17 loss 2.3456 tokens/s 9017\n"


@pytest.fixture(scope="module")
def rows() -> LateRows:
    made = LateRows(lambda: RowMatcher(shipped_rows()))
    made.get(wait=True)
    return made


class Memory:
    """A stream of a rank as the launcher makes it."""

    def __init__(self, folder: Path) -> None:
        self.memory, self.reader, self.writer = new_memory()
        self._console = os.open(os.devnull, os.O_WRONLY)
        self.kept = KeptWords(
            self.memory, self.reader, Console(self._console), "rank 0", folder / "head", folder / "end"
        )

    @property
    def path(self) -> str:
        return path_of(self.reader)

    def write(self, data: bytes) -> None:
        os.write(self.writer, data)

    def close(self) -> None:
        self.kept.close()
        os.close(self.writer)
        os.close(self._console)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    if not can_be_kept():
        pytest.skip("no memfd that can be freed in part")
    made = Memory(tmp_path)
    yield made
    made.close()


Make = Callable[..., WordsSensor]


@pytest.fixture
def make(rows: LateRows) -> Iterator[Make]:
    made: list[WordsSensor] = []

    def begin(*paths: str, **more: Callable[[], float]) -> WordsSensor:
        streams = {rank: [("stderr", 0, path)] for rank, path in enumerate(paths)}
        made.append(WordsSensor(streams, rows, **more))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def told(words: WordsSensor, now_s: float = 1.0, *, last: bool = False) -> list[tuple[int, str]]:
    return [(rank, one.line) for rank, one in words.look(now_s, last=last)]


def test_a_line_is_told_once_when_it_is_whole(memory: Memory, make: Make) -> None:
    words = make(memory.path)
    assert told(words) == []
    memory.write(STEP + FULL[:20])
    assert told(words) == []
    memory.write(FULL[20:])
    assert told(words) == [(0, FULL.decode().strip())]
    assert told(words) == []
    memory.write(b"RuntimeError: odd")
    assert told(words) == []
    assert told(words, last=True) == [(0, "RuntimeError: odd")]


def test_the_keeper_goes_on_where_it_was(memory: Memory, make: Make) -> None:
    words = make(memory.path)
    memory.write(STEP * 10)
    words.look(1.0)
    assert [os.lseek(one, 0, os.SEEK_CUR) for one in (memory.memory, memory.reader)] == [0, 0]


def test_who_lags_goes_on_near_the_end(memory: Memory, make: Make) -> None:
    words = make(memory.path)
    memory.write(FULL.replace(b"/a", b"/first"))
    assert len(told(words)) == 1
    for _ in range(64):
        memory.write(STEP * 1000)
        memory.kept.show()
    memory.write(FULL.replace(b"/a", b"/last"))
    found: list[tuple[int, str]] = []
    for poll in range(20):
        found += told(words, 2.0 + poll)
    assert [line for _, line in found] == [FULL.replace(b"/a", b"/last").decode().strip()]
    assert words.passed_over > 64_000 * len(STEP) - LAG_BYTES


def test_freed_bytes_are_no_words(memory: Memory, make: Make) -> None:
    """A writer that is far ahead by the time the bytes are read: they are zeros."""
    words = make(memory.path)
    memory.write(STEP)
    words.look(1.0)
    stream = words._streams[0]
    os.ftruncate(memory.memory, len(STEP) + 100_000)
    memory.write(b"\n" + FULL)
    assert stream.new_bytes(1.0) == 100_000 + 1 + len(FULL)
    assert told(words) == [(0, FULL.decode().strip())]


def test_a_stream_that_begins_anew_is_read_from_its_beginning(memory: Memory, make: Make) -> None:
    words = make(memory.path)
    memory.write(STEP * 100)
    words.look(1.0)
    os.ftruncate(memory.memory, 0)
    memory.write(FULL)
    assert len(told(words)) == 1


def test_a_poll_takes_no_more_than_it_may(tmp_path: Path, make: Make) -> None:
    memories = [Memory(tmp_path) for _ in range(6)]
    words = make(*(one.path for one in memories), cpu_s=lambda: 0.0)
    for one in memories:
        one.write(STEP * (600_000 // len(STEP)))
    left = [stream.new_bytes(1.0) for stream in words._streams]
    words.look(1.0)
    taken = [before - stream.new_bytes(1.0) for before, stream in zip(left, words._streams, strict=True)]
    assert max(taken) == RANK_BYTES
    assert sum(taken) == sensor.NODE_BYTES
    for poll in range(10):  # each has its turn
        words.look(1.0 + poll)
    assert not any(stream.new_bytes(1.0) for stream in words._streams)
    for one in memories:
        one.close()


def test_listening_costs_its_share_of_a_core_and_no_more(memory: Memory, make: Make) -> None:
    clock = iter(range(10**6))
    words = make(memory.path, cpu_s=lambda: next(clock) * 0.01)  # each piece takes 10 ms
    spent = next(clock)
    for poll in range(2000):
        memory.write(STEP * 2000)
        words.look(1.0 + poll * 0.05)
    pieces = next(clock) - spent - 2000
    assert 0.5 * 100 <= pieces <= 1.2 * (100 + 50)  # 1 % of 100 s, and what was saved up for the start
    assert words.passed_over
    memory.write(FULL)
    assert told(words, 101.0, last=True) == [(0, FULL.decode().strip())]


def test_the_same_is_told_again_after_a_quiet_minute(memory: Memory, make: Make) -> None:
    words = make(memory.path)
    for now_s, count in ((1.0, 1), (50.0, 0), (70.0, 0), (71.0, 1)):
        memory.write(STEP + FULL)
        assert len(told(words, now_s)) == count, now_s


def test_a_file_is_followed_once_it_is_there(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "stderr.log"
    words = make(str(path))
    assert told(words) == []
    path.write_bytes(STEP + FULL)
    give_up_s = time.monotonic() + 20
    while not (found := told(words, time.monotonic())):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    assert found == [(0, FULL.decode().strip())]
    with path.open("ab") as file:
        file.write(b"RuntimeError: odd")
    assert told(words, time.monotonic(), last=True) == [(0, "RuntimeError: odd")]


def test_what_an_earlier_incarnation_wrote_is_not_told(tmp_path: Path, rows: LateRows) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(FULL)
    words = WordsSensor({0: [("stderr", len(FULL), str(path))]}, rows)
    with path.open("ab") as file:
        file.write(b"RuntimeError: odd")
    assert told(words, time.monotonic(), last=True) == [(0, "RuntimeError: odd")]
    words.close()


def test_what_is_no_file_is_not_read(make: Make) -> None:
    reader, writer = os.pipe()
    words = make(f"/proc/{os.getpid()}/fd/{reader}", "/proc/self/fd/999999", "/dev/null")
    os.write(writer, FULL)
    assert told(words) == []
    assert told(words, last=True) == []
    assert os.read(reader, 1000) == FULL
    os.close(reader)
    os.close(writer)


def test_tables_that_cannot_be_read_leave_the_rest_alone(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> RowMatcher:
        raise ValueError("odd table")

    words = WordsSensor({0: [("stderr", 0, memory.path)]}, LateRows(load))
    memory.write(FULL)
    assert told(words) == []
    assert told(words, last=True) == []
    assert "odd table" in caplog.text
    words.close()
