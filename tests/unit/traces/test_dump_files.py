from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.core.errors import TraceError
from keepstep.traces import dump_files
from keepstep.traces.dump_files import find_dumps, is_dump, ranks_of

DUMP = pickle.dumps({"version": "2.10", "entries": []})


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (("_dump_12", "nccl_trace_rank_3", "rank7.json", "rank_1.pickle", "notes.txt"), (12, 3, 7, 1, None)),
        (("trace_rank_0_20251125", "trace_rank_1_20251125"), (0, 1)),
        (("rank-0.host-17.json", "Rank1.host-18.json"), (0, 1)),
        (("global_rank_9_local_rank_1", "local_rank_1_global_rank_9"), (9, 9)),
        (("dump_0_120501", "dump_1_120501", "dump_2_120502"), (0, 1, 2)),
        (("0.nccl_trace", "1.nccl_trace"), (0, 1)),
        (("node0_dump_0", "node0_dump_1", "node1_dump_2", "node1_dump_3"), (0, 1, 2, 3)),
        (("dump_0_pid48213", "dump_1_pid48214"), (0, 1)),
        (("dump_0", "dump_1", "dump_20251125"), (0, 1, None)),
        (("dump_" + "9" * 400,), (None,)),
        (("dump_²",), (None,)),
    ],
)
def test_the_rank_in_the_name(names: tuple[str, ...], ranks: tuple[int | None, ...]) -> None:
    assert tuple(ranks_of(map(Path, names)).values()) == ranks


def test_only_what_begins_as_a_dump_is_one(tmp_path: Path) -> None:
    contents = {
        "dump_0": DUMP, "dump_1": b"", "dump_2": b"cut", "x_3": b"", "config_4.json": b'{"a": 1}', "log_5": b"text",
        "rank_6": b'{"version": "2.9", "pg_config": {}}', "dump": DUMP,
    }  # fmt: skip
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "dump_7")
    assert [path.name for path in find_dumps(tmp_path)] == ["dump_0", "dump_1", "dump_2", "rank_6"]
    assert not is_dump(tmp_path / "dump_7")
    assert not is_dump(tmp_path / "absent")


def test_dumps_one_folder_deeper_are_found_where_there_are_none_above(tmp_path: Path) -> None:
    for name in ("node0/dump_0", "node1/dump_1", "node1/deeper/dump_2"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(DUMP)
    assert [path.name for path in find_dumps(tmp_path)] == ["dump_0", "dump_1"]
    (tmp_path / "dump_9").write_bytes(DUMP)
    assert [path.name for path in find_dumps(tmp_path)] == ["dump_9"]


def test_empty_files_alone_are_dumps_of_ranks_that_were_killed(tmp_path: Path) -> None:
    for name in ("dump_0", "dump_1", "notes"):
        (tmp_path / name).touch()
    assert [path.name for path in find_dumps(tmp_path)] == ["dump_0", "dump_1"]


def test_other_pickles_under_the_names_of_dumps_are_looked_at(tmp_path: Path) -> None:
    for name in ("dump_0", "nccl_trace_rank_1", "model_2.pickle"):
        (tmp_path / name).write_bytes(pickle.dumps({"weights": 1}))
    assert [path.name for path in find_dumps(tmp_path)] == ["dump_0", "nccl_trace_rank_1"]


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_files, "MOST_FILES", 2)
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    with pytest.raises(TraceError, match="more than 2 files"):
        find_dumps(tmp_path)


def test_other_pickles_and_folders_that_cannot_be_listed_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in (
        ("ckpt/rng_1000.pkl", pickle.dumps({"seed": 1})),
        ("found/dump_0", DUMP),
        ("lost/x", b""),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    listing = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder.name == "lost":
            raise PermissionError(13, "Permission denied", str(folder))
        return listing(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert [path.name for path in find_dumps(tmp_path)] == ["dump_0"]


@pytest.mark.parametrize("name", ["rank{}/nccl_trace", "{}/dump.pkl", "fr/node0/nccl_trace_rank_{}"])
def test_the_rank_may_be_that_of_a_folder_and_folders_may_be_deeper(tmp_path: Path, name: str) -> None:
    for rank in (0, 1, 12):
        path = tmp_path / name.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DUMP)
    assert sorted(rank or 0 for rank in ranks_of(find_dumps(tmp_path)).values()) == [0, 1, 12]
    assert len(find_dumps(tmp_path)) == 3
