"""What workers write is shown as it came and kept within bounds, however they write it."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.launch.workers import kept_words
from keepstep.launch.workers.kept_words import Console, KeptWords, can_be_kept, is_written, new_memory

pytestmark = pytest.mark.skipif(not can_be_kept(), reason="no memfd that can be freed in part")


class Words:
    """The words of one rank, with their writer, on a console of its own or a given one."""

    def __init__(self, folder: Path, console: Console | None = None, name: str = "rank 0") -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.target = os.open(folder / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.memory, self.reader, self.writer = new_memory()
        self.console, self.name = console or Console(self.target), name
        self.kept = self.take()

    def take(self) -> KeptWords:
        head, end = self.folder / "head", self.folder / "end"
        return KeptWords(self.memory, self.reader, self.console, self.name, head, end)

    def write(self, data: bytes) -> None:
        assert os.write(self.writer, data) == len(data)

    @property
    def used_bytes(self) -> int:
        return os.fstat(self.reader).st_blocks * 512

    def of(self, name: str) -> bytes:
        path = self.folder / name
        return path.read_bytes() if path.exists() else b""

    def close(self) -> None:
        self.kept.close()
        os.close(self.writer)
        os.close(self.target)


@pytest.fixture
def words(tmp_path: Path) -> Iterator[Words]:
    made = Words(tmp_path / "w")
    yield made
    made.close()


STEPS = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([b"a line\n", b"\rstep 5", b"\n"]),
        st.integers(1, 3000).map(lambda size: b"z" * size),
        st.sampled_from(["show", "keep", "take over"]),
    ),
    max_size=40,
)


@settings(max_examples=many(200))
@given(steps=STEPS)
def test_everything_is_shown_as_it_came_and_the_files_have_its_ends(
    tmp_path_factory: pytest.TempPathFactory, steps: list[bytes | str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_words, "HEAD_BYTES", 1000)
        patch.setattr(kept_words, "END_BYTES", 4096)
        patch.setattr(kept_words, "_FREED_AT_ONCE_BYTES", 4096)
        words = Words(tmp_path_factory.mktemp("w") / "w")
        written = b""
        for step in steps:
            if isinstance(step, bytes):
                words.write(step)
                written += step
            elif step == "show":
                words.kept.show()
                assert words.used_bytes <= len(written) <= 4 * 4096 or words.used_bytes <= 8 * 4096
            elif step == "keep":
                words.kept.keep()
            else:
                words.kept = words.take()
        assert words.kept.show(last=True)
        words.kept.keep()
        assert words.of("console") == written
        assert words.of("head") == written[:1000]
        end, rest = words.of("end"), written[1000:]
        first, _, more = end.partition(b"\n")
        if first.startswith(b"[keepstep: "):
            left_out = int(first.split()[1])
            assert more == rest[left_out:]
            assert 4096 <= len(more) <= 8192
        else:
            assert end == rest
            assert len(end) <= 8192
        words.close()


def test_half_a_line_waits_for_its_end_but_not_for_long(words: Words) -> None:
    words.write(b"one\ntw")
    words.kept.show()
    assert words.of("console") == b"one\n"
    words.write(b"o\nthr")
    words.kept.show()
    assert words.of("console") == b"one\ntwo\n"
    words.kept.show()
    assert words.of("console") == b"one\ntwo\nthr"


def test_gigabytes_take_no_memory_and_no_room(words: Words) -> None:
    line = b"x" * 1023 + b"\n"
    for _ in range(100):
        words.write(line * 4096)
        while not words.kept.show():
            pass
        os.ftruncate(words.target, 0)
        assert words.used_bytes <= kept_words.END_BYTES + kept_words.BACKLOG_BYTES
    words.kept.keep()
    assert words.of("head") == line * 256
    first, _, end = words.of("end").partition(b"\n")
    assert first == b"[keepstep: %d bytes before this are not kept]" % (398 << 20 | 768 << 10)
    assert end == line * 1024


def test_a_console_that_nobody_reads_costs_old_bytes_and_says_so(tmp_path: Path) -> None:
    reader, pipe = os.pipe()
    words = Words(tmp_path / "w", Console(pipe))
    line = b"x" * 99 + b"\n"
    for _ in range(30):
        words.write(line * 10_000)
        words.kept.show()
        assert words.used_bytes <= kept_words.BACKLOG_BYTES + (4 << 20)  # memory comes in large pages
    os.set_blocking(reader, False)
    got = b""
    while not words.kept.is_shown or select.select([reader], [], [], 0)[0]:
        words.kept.show(last=True)
        got += os.read(reader, 1 << 20)
    before, told, after = got.partition(b"keepstep: ")
    number = int(after.split()[0])
    told, _, after = after.partition(b"\n")
    assert b"bytes of rank 0 are not shown: the console was too slow" in told
    assert len(before.rstrip(b"\n")) + number + len(after) in range(30_000_000 - 2, 30_000_000 + 1)
    assert len(after) >= kept_words.BACKLOG_BYTES
    words.kept.keep()
    assert words.of("head") == (line * 3000)[: kept_words.HEAD_BYTES]
    os.close(reader)
    words.close()
    os.close(pipe)


def test_a_reader_that_has_gone_is_nobodys_trouble(tmp_path: Path) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    words = Words(tmp_path / "w", Console(pipe))
    words.write(b"a\n" * 100_000)
    assert words.kept.show(last=True)
    words.kept.keep()
    assert words.of("head") == b"a\n" * 100_000
    words.close()
    os.close(pipe)


def test_a_folder_that_cannot_be_written_says_so_and_the_console_goes_on(
    words: Words, tmp_path: Path
) -> None:
    (tmp_path / "w").rename(tmp_path / "moved")
    words.write(b"a" * (2 << 20))
    assert words.kept.show(last=True)
    with pytest.raises(FileNotFoundError):
        words.kept.keep()
    (tmp_path / "moved").rename(tmp_path / "w")
    words.write(b"b\n")
    assert words.kept.show(last=True)
    words.kept.keep()
    assert words.of("console") == b"a" * (2 << 20) + b"b\n"
    first, _, end = words.of("end").partition(b"\n")
    assert first.startswith(b"[keepstep: ")
    assert end.endswith(b"ab\n")


def test_a_stderr_that_is_opened_anew_begins_anew(words: Words) -> None:
    words.write(b"before\n")
    words.kept.show()
    with open(f"/proc/self/fd/{words.writer}", "wb") as file:
        file.write(b"new\n")
    words.kept.show()
    words.write(b"after\n")
    words.kept.show()
    assert words.of("console") == b"before\nnew\nafter\n"


def test_it_is_over_once_the_last_process_has_closed_it(tmp_path: Path) -> None:
    memory, reader, writer = new_memory()
    child = os.fork()
    if child == 0:
        signal.pause()
    os.close(writer)
    assert is_written(reader)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert not is_written(reader)
    os.close(memory)
    os.close(reader)
