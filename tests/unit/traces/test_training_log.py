from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from keepstep.core.errors import TraceError
from keepstep.traces.training_log import looks_like_training_log, read_training_log


def line(number: int, ms: float = 1400.0) -> str:
    return (
        f" iteration {number:8d}/    1200 | consumed samples: 48 | elapsed time per iteration (ms): {ms} | "
        "learning rate: 0.000E+00 |\n"
    )


def log(path: Path, text: str, *, zipped: bool = False) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_iterations_and_their_seconds(tmp_path: Path, zipped: bool) -> None:
    text = "loading\n" + line(1, 88966.1) + "a warning\n" + line(2) + line(3)
    path = log(tmp_path / "log", text, zipped=zipped)
    assert looks_like_training_log(path)
    read = read_training_log(path)
    assert [number for number, _ in read.iterations] == [1, 2, 3]
    assert [seconds for _, seconds in read.iterations] == pytest.approx([88.9661, 1.4, 1.4])
    assert read.missing == ()


def test_a_log_every_ten_iterations_with_a_gap(tmp_path: Path) -> None:
    read = read_training_log(log(tmp_path / "log", "".join(line(n) for n in (10, 20, 30, 60, 70))))
    assert read.missing == ("log: 1 gaps between iterations",)


def test_what_ran_again_after_a_restart_counts_once(tmp_path: Path) -> None:
    text = "".join(line(n) for n in (1, 2, 3, 4)) + "".join(line(n, 2000.0) for n in (3, 4, 5))
    read = read_training_log(log(tmp_path / "log", text))
    assert read.iterations == ((1, 1.4), (2, 1.4), (3, 2.0), (4, 2.0), (5, 2.0))
    assert "began anew 1 times" in read.missing[0]


def test_a_gzip_that_was_cut_short_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    path = log(tmp_path / "log.gz", "".join(line(n, 1400 + n) for n in range(1, 2000)), zipped=True)
    path.write_bytes(path.read_bytes()[:-2000])
    read = read_training_log(path)
    assert len(read.iterations) > 100
    assert "ends early" in read.missing[0]


@pytest.mark.parametrize("text", ["", "nothing here\n", "\x00\xff\n"])
def test_no_iteration_in_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="elapsed time per iteration"):
        read_training_log(log(tmp_path / "log", text))


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_training_log(tmp_path / "none")
