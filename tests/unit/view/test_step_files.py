import json
import os
from pathlib import Path

import numpy as np
import pytest

from keepstep.view import step_files
from keepstep.view.step_files import Iterations, SeenFile, StepFiles, joined

MUCH = 1 << 30


def line(step: int, ranks: tuple[int, ...] = (0, 1), inc: int | None = None, start: float = 100.0) -> str:
    cells = {str(rank): {"t": start + step, "d": 0.5, "self": 0.25 + rank, "blocked": 0.1} for rank in ranks}
    return json.dumps({"step": step, **({} if inc is None else {"inc": inc}), "ranks": cells}) + "\n"


def write(path: Path, lines: list[str]) -> None:
    with path.open("a") as file:
        file.writelines(lines)


def seen(*paths: Path) -> list[SeenFile]:
    return [SeenFile(path, path.stat().st_ino, path.stat().st_size) for path in paths]


def read(files: StepFiles, *paths: Path, most_bytes: int = MUCH) -> list[tuple[int, list[int]]]:
    """Incarnations, each with the steps of rank 0."""
    found = joined([one for part in files.read(seen(*paths), most_bytes) for one in part])
    return [(one.incarnation, one.step[one.rank == 0].tolist()) for one in found]


def test_the_columns_are_those_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "iterations.jsonl"
    write(path, [line(7), line(8)])
    (found,) = (one for part in StepFiles().read(seen(path), MUCH) for one in part)
    assert found.rank.tolist() == [0, 1, 0, 1]
    assert found.step.tolist() == [7, 7, 8, 8]
    assert found.own_s.tolist() == [0.25, 1.25] * 2
    assert found.iteration_s.tolist() == [0.5] * 4
    assert found.start_unix_s.tolist() == [107.0, 107.0, 108.0, 108.0]


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path, files = tmp_path / "iterations.jsonl", StepFiles()
    write(path, [line(0), line(1)])
    assert read(files, path) == [(0, [0, 1])]
    assert not files.has_news(seen(path))
    write(path, [line(2), line(3)[:20]])
    assert read(files, path) == [(0, [2])]
    assert read(files, path) == []
    write(path, [line(3)[20:]])
    assert read(files, path) == [(0, [3])]
    assert files.broken == 0


def test_the_predecessor_is_read_to_its_end_first(tmp_path: Path) -> None:
    path, old, files = tmp_path / "iterations.jsonl", tmp_path / "iterations.1.jsonl", StepFiles()
    write(path, [line(0)])
    assert read(files, path) == [(0, [0])]
    write(path, [line(1)])
    os.replace(path, old)
    write(path, [line(2)])
    assert read(files, path, old) == [(0, [1, 2])]


def test_a_file_with_the_number_of_a_removed_one_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, files = tmp_path / "iterations.jsonl", StepFiles()
    write(path, [line(step) for step in range(9)])
    read(files, path)
    path.write_text(line(9))
    assert read(files, path) == [(0, [9])]


def test_steps_that_go_back_are_of_the_next_incarnation_where_none_is_written(tmp_path: Path) -> None:
    path = tmp_path / "iterations.jsonl"
    write(path, [*map(line, range(5)), *map(line, range(3, 6)), *map(line, range(2))])
    assert read(StepFiles(), path) == [(0, [0, 1, 2, 3, 4]), (1, [3, 4, 5]), (2, [0, 1])]


def test_the_incarnation_that_is_written_counts(tmp_path: Path) -> None:
    path = tmp_path / "iterations.jsonl"
    write(path, [line(0), line(1, inc=3), line(1, inc=4), line(2, inc=4)])
    assert read(StepFiles(), path) == [(0, [0]), (3, [1]), (4, [1, 2])]


def test_a_rank_that_is_late_does_not_count_as_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "iterations.jsonl"
    write(path, [*(line(step, (0,)) for step in range(20)), *(line(step, (1,)) for step in range(3))])
    assert read(StepFiles(), path) == [(0, list(range(20)))]


@pytest.mark.parametrize(
    "bad",
    [
        "{}\n",
        "[]\n",
        line(3)[:-30] + "\n",
        '{"step":"x","ranks":{}}\n',
        '{"step":1,"ranks":{"a":{"t":1,"d":1}}}\n',
        '{"step":1,"ranks":{"0":{"t":1,"d":"inf"}}}\n',
        '{"step":1,"ranks":{"0":{"t":1' + "0" * 500 + ',"d":1}}}\n',
        "[" * 9000 + "\n",
    ],
)
def test_a_damaged_line_is_counted(tmp_path: Path, bad: str) -> None:
    path, files = tmp_path / "iterations.jsonl", StepFiles()
    write(path, [line(0), bad, line(1)])
    assert read(files, path) == [(0, [0, 1])]
    assert files.broken == 1


def test_numbers_that_are_too_large_stop_nothing(tmp_path: Path) -> None:
    path = tmp_path / "iterations.jsonl"
    write(path, [line(0), line(1 << 62), line(1, inc=1 << 62)])
    found = joined([one for part in StepFiles().read(seen(path), MUCH) for one in part])
    assert sum(len(one.rank) for one in found) == 6
    assert all(one.step.max() < 1 << 62 for one in found)


def test_no_more_ranks_are_remembered_than_a_job_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_files, "MOST_RANKS", 8)
    path, files = tmp_path / "iterations.jsonl", StepFiles()
    write(path, [line(1, tuple(range(first, first + 4))) for first in range(0, 400, 4)])
    assert len(read(files, path)) > 0
    assert len(files._newest) <= 8


def test_a_line_that_never_ends_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.view.step_files._LONGEST_LINE", 4096)
    monkeypatch.setattr("keepstep.view.step_files._PIECE_BYTES", 1024)
    path, files = tmp_path / "iterations.jsonl", StepFiles()
    write(path, [line(0), "x" * 20_000 + "\n", line(1)])
    assert read(files, path) == [(0, [0, 1])]
    assert files.broken == 1


def test_of_a_file_that_is_too_long_evenly_spaced_parts_are_read(tmp_path: Path) -> None:
    path, files = tmp_path / "iterations.jsonl", StepFiles()
    write(path, [line(step) for step in range(5000)])
    ((_, steps),) = read(files, path, most_bytes=path.stat().st_size // 10)
    assert 300 < len(steps) < 1500
    gaps = np.diff(steps)
    assert steps[0] < 100
    assert steps[-1] > 4700
    assert gaps.min() == 1
    assert gaps.max() < 400
    assert files.broken == 0
    write(path, [line(5000)])
    assert read(files, path)[0][1][-1] == 5000


def test_parts_are_joined_by_incarnation() -> None:
    def part(incarnation: int, step: int) -> Iterations:
        one = np.array([step])
        return Iterations(incarnation, one, one, one, one, one)

    found = joined([part(1, 5), part(0, 6), part(1, 7)])
    assert [(one.incarnation, one.step.tolist()) for one in found] == [(0, [6]), (1, [5, 7])]
    assert joined([]) == []
