from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from keepstep.core.errors import TraceError
from keepstep.core.traced_operations import Call
from keepstep.traces.call_log import looks_like_call_log, read_call_log


def line(rank: int, at: str = "1755590104.254021144", function: str = "AllReduce", nbytes: int = 1) -> str:
    return (
        f"[save_count 1] [{at}] [Rank {rank}] Fun {function} Data {nbytes} stream 0x5585c5844830 opCount 7\n"
    )


def test_files_and_archives_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(line(0) + line(0, "1755590104.9", "Recv", 25165824))
    (tmp_path / "rank_1.log.gz").write_bytes(gzip.compress(line(1).encode()))
    with tarfile.open(tmp_path / "more.tar.gz", "w:gz") as archive:
        for rank in (2, 3):
            content = line(rank).encode()
            info = tarfile.TarInfo(f"logs/rank_{rank}.log")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    paths = sorted(tmp_path.iterdir())
    assert all(looks_like_call_log(path) for path in paths)
    log = read_call_log(paths)
    assert sorted(log.calls) == [0, 1, 2, 3]
    assert log.calls[0] == (Call(1755590104.254021144, "AllReduce", 1), Call(1755590104.9, "Recv", 25165824))
    assert log.missing == ()


def test_shuffled_repeated_and_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        line(2, "20.5") + line(2, "10.5") + line(2, "10.5") + "[save_count 1] [1755\nnoise\n" + line(0)
    )
    log = read_call_log([path])
    assert [call.at_s for call in log.calls[2]] == [10.5, 20.5]
    assert "2 lines are no calls" in log.missing
    assert "ranks 1: no calls" in log.missing


def test_a_rank_that_no_job_has_is_named_and_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(line(0) + "".join(line(rank) for rank in (99999999, 99999998, 1 << 20, 88888888)))
    log = read_call_log([path])
    assert list(log.calls) == [0]
    assert log.missing[-1] == (
        "calls of rank 99999999, 99999998, 1048576, …: no job has so many ranks, not used"
    )


def test_an_archive_that_was_cut_short_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log.gz"
    path.write_bytes(gzip.compress("".join(line(0, f"{n}.123456789") for n in range(5000)).encode())[:-500])
    log = read_call_log([path])
    assert len(log.calls[0]) > 100
    assert any("ends early" in text for text in log.missing)


def test_no_call_in_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\x00\xffnothing\n")
    assert not looks_like_call_log(path)
    with pytest.raises(TraceError, match=r"log: no line .*MegaTrace"):
        read_call_log([path])


FORMS = {
    "[1746686438.086068203] [Rank 3] Fun AllReduce Data 25165824 stream 0x55f615683660": "AllReduce",
    "[save_count 5] [1746686438.086068203] [Rank 3] Fun AllReduce Data 25165824 stream 0x562a9d0b5020 opCount 8 "
    "groupHash -5956285979098587305": "AllReduce",
    "[1746686438.086068203] [Rank 3] Fun Send Data 25165824": "Send",
    "[job-9f34] [0] [10.254.1.137] [node201] [save_count 79] [1746686438.086068203] [Rank 3] [PCI 0000:18:00.0] "
    "[Func ncclAllGather] [Data 25165824] [stream (nil)] [opCount 16932] [groupHash 0x8e5988b6aea85fa7]": "AllGather",
}


@pytest.mark.parametrize("text", FORMS)
def test_the_published_forms(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank_3.log"
    path.write_text(text + "\n")
    assert looks_like_call_log(path)
    assert read_call_log([path]).calls == {3: (Call(1746686438.086068203, FORMS[text], 25165824),)}


def test_a_file_without_a_call_is_told(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(line(0))
    (tmp_path / "readme").write_text("two\nlines\n")
    assert read_call_log(sorted(tmp_path.iterdir())).missing == ("readme: no call in it, not used",)
