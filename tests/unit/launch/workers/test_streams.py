import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.launch.command.job import STDOUT, job_from_command_line
from keepstep.launch.command.run_folder import LogFiles
from keepstep.launch.workers.rank_words import RankWords, read_at
from keepstep.launch.workers.streams import Follower, line_prefix, sizes, worker_streams


def job(*words: str, **environ: str):
    return job_from_command_line(
        ["--nproc-per-node", "2", *words, "train.py"], {"HOME": "/nowhere", **environ}
    )


def test_the_console_by_default(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path, None, "id")
    streams = worker_streams(job(), logs, 0, 0, 0)
    assert (streams.stdout, streams.stderr, dict(streams.shown)) == (None, None, {})


def test_redirect_tee_and_filter(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path, None, "id")
    wanted = job("-r", "0:3", "-t", "1:1", "--local-ranks-filter", "1")
    first = worker_streams(wanted, logs, 4, 0, 0)
    assert first.stdout == tmp_path / "logs/rank-00004/stdout.log"
    assert first.stderr == tmp_path / "logs/rank-00004/stderr.log"
    assert dict(first.shown) == {}
    second = worker_streams(wanted, logs, 5, 1, 0)
    assert second.shown == {STDOUT: tmp_path / "logs/rank-00005/stdout.log"}
    assert second.stderr is None
    hidden = worker_streams(job("--local-ranks-filter", "1"), logs, 4, 0, 0)
    assert (hidden.stdout, hidden.stderr) == (Path(os.devnull), Path(os.devnull))


def test_where_words_can_be_read(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path, None, "id")
    streams = [worker_streams(job("-r", "0:3", "--local-ranks-filter", "0"), logs, r, r, 1) for r in (0, 1)]
    out, err = streams[0].stdout, streams[0].stderr
    assert out is not None
    out.write_text("earlier")
    begin = sizes(streams)
    assert read_at(RankWords(), streams[0], begin) == [f"stdout:7:{out}", f"stderr:0:{err}"]
    assert read_at(RankWords(), streams[1], begin) == []


def test_prefixes() -> None:
    assert line_prefix(job("--role", "trainer"), 5, 1) == b"[trainer1]:"
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}/${local_rank} ${role_name}] "}
    assert line_prefix(job(**template), 5, 1) == b"[5/1 default] "


@pytest.fixture
def target(tmp_path: Path):
    descriptor = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@given(pieces=st.lists(st.binary(max_size=40), max_size=20))
def test_lines_arrive_whole_however_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("f")
    source = folder / "source"
    descriptor = os.open(folder / "target", os.O_RDWR | os.O_CREAT)
    follower = Follower(descriptor)
    follower.follow(source, b"[0]:")
    follower.pump()
    with source.open("ab", buffering=0) as file:
        for piece in pieces:
            file.write(piece)
            follower.pump()
    follower.pump(last=True)
    whole = b"".join(pieces)
    lines = whole.split(b"\n")
    if not lines[-1]:
        lines.pop()
    assert (folder / "target").read_bytes() == b"".join(b"[0]:" + line + b"\n" for line in lines)
    os.close(descriptor)


def test_words_select_lines(tmp_path: Path, target: int) -> None:
    follower = Follower(target, ["apple", "orange"])
    follower.follow(tmp_path / "s", b"")
    (tmp_path / "s").write_bytes(b"an apple\npear\n" + b"plum\n" * 50000 + b"orange\n")
    follower.pump(last=True)
    assert (tmp_path / "target").read_bytes() == b"an apple\norange\n"


def test_a_reader_that_stalls_delays_nobody(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    follower = Follower(writer)
    follower.follow(tmp_path / "s", b"")
    (tmp_path / "s").write_bytes(b"x" * 79 + b"\n" + (b"y" * 79 + b"\n") * 20000)
    follower.pump()  # returns although the pipe is full
    got = b""
    while len(got) < 20001 * 80:
        got += os.read(reader, 1 << 20)
        follower.pump()
    assert got == (tmp_path / "s").read_bytes()
    os.close(reader)
    follower.pump(last=True)
    os.close(writer)


def test_only_what_is_new(tmp_path: Path, target: int) -> None:
    (tmp_path / "s").write_bytes(b"old\n")
    follower = Follower(target)
    follower.follow(tmp_path / "s", b"")
    with (tmp_path / "s").open("ab") as file:
        file.write(b"new\n")
    follower.pump(last=True)
    assert (tmp_path / "target").read_bytes() == b"new\n"
