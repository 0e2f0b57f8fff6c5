from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.analyze import analyze
from keepstep.core.errors import TraceError
from keepstep.core.events import Op
from keepstep.core.ranges import fold_ranks
from keepstep.traces import flight_recorder
from keepstep.traces.flight_recorder import read_dumps

RANKS = (0, 1, 2, 3)


def entry(seq: int, op: str = "all_reduce", *, group: str = "0", state: str = "scheduled", **more: Any):
    p2p = op.startswith(("send", "recv"))
    return {
        "pg_id": int(group), "process_group": (group, "default_pg"), "profiling_name": f"nccl:{op}",
        "collective_seq_id": 0 if p2p else seq, "p2p_seq_id": seq if p2p else 0, "is_p2p": p2p, "state": state,
        "time_created_ns": 1_000_000_000 * seq, "retired": False, **more,
    }  # fmt: skip


def dump(
    entries: list[dict[str, Any]], enqueued: int, completed: int, version: str = "2.9"
) -> dict[str, Any]:
    return {
        "version": version,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(RANKS))}},
        "pg_status": {"0": {"last_enqueued_collective": enqueued, "last_completed_collective": completed}},
        "entries": entries,
    }


def write(folder: Path, dumps: dict[int, Any], *, as_json: bool = False) -> list[Path]:
    paths: list[Path] = []
    for rank, content in dumps.items():
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(json.dumps(content).encode() if as_json else pickle.dumps(content))
        paths.append(path)
    return paths


@pytest.mark.parametrize("as_json", [False, True])
def test_ranks_are_at_their_oldest_unfinished_operation(tmp_path: Path, as_json: bool) -> None:
    one = dump([entry(6, state="completed"), entry(7), entry(8, "_all_gather_base")], 8, 6)
    read = read_dumps(write(tmp_path, dict.fromkeys(RANKS, one), as_json=as_json))
    assert read.world_size == 4
    assert read.missing == ()
    for state in read.states:
        (flight,) = state.in_flight
        assert (flight.group, flight.op, flight.seq) == ("0 (default_pg)", Op.ALLREDUCE, 7)
        assert [(s.started, s.completed) for s in state.streams] == [(7, 6)]


def test_messages_have_global_peers(tmp_path: Path) -> None:
    dumps = {
        rank: dump([entry(5, text)], 5, 4)
        for rank, text in enumerate(("send 0->3", "recv 1<-2", "send 2->1", "recv 3<-0"))
    }
    read = read_dumps(write(tmp_path, dumps))
    assert [state.in_flight[0].peer for state in read.states] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (pickle.dumps(dump([entry(1)], 1, 0))[:-40], "cut short"),
        (b"\x80\x04nonsense", "neither a pickle nor JSON"),
        (b"{", "cut short"),
        (b"{1}", "neither a pickle nor JSON"),
        (pickle.dumps({"entries": []} | {"version": "3.0"}), "version 3.0"),
        (pickle.dumps([1, 2]), "no entries"),
        (pickle.dumps(dump([{"pg_id": 0}], 1, 0)), "damaged"),
        (pickle.dumps(Path("/")), "pathlib"),
    ],
)
def test_what_cannot_be_used_is_said_and_the_rest_is_used(tmp_path: Path, content: bytes, said: str) -> None:
    paths = write(tmp_path, {rank: dump([entry(7)], 7, 6) for rank in (0, 1, 3)})
    bad = tmp_path / "nccl_trace_rank_2"
    bad.write_bytes(content)
    read = read_dumps([*paths, bad])
    assert [state.rank for state in read.states] == [0, 1, 3]
    assert "rank 2" in read.missing[0]
    assert said in read.missing[0]
    with pytest.raises(TraceError, match="rank 2"):
        read_dumps([bad])


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    path = tmp_path / "dump_0"
    path.write_bytes(pickle.dumps({"version": "2.9", "entries": [Evil()]}))
    with pytest.raises(TraceError, match="mkdir"):
        read_dumps([path])
    assert not (tmp_path / "made").exists()


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    (path,) = write(tmp_path, {1: dump([entry(1)], 1, 0)})
    other = tmp_path / "dump_1"
    other.write_bytes(path.read_bytes())
    read = read_dumps([path, other])
    assert [state.rank for state in read.states] == [1]
    assert "rank 1: nccl_trace_rank_1 is the same as dump_1, not used" in read.missing
    other.write_bytes(pickle.dumps(dump([], 0, 0)))
    with pytest.raises(TraceError, match="rank 1 has another dump"):
        read_dumps([path, other])


def test_missing_and_empty_dumps_are_told(tmp_path: Path) -> None:
    empty: dict[str, Any] = dump([], 0, 0) | {"pg_status": {}}
    read = read_dumps(write(tmp_path, {0: dump([entry(7)], 7, 6), 2: empty}))
    assert [state.rank for state in read.states] == [0]
    assert any("ranks 2: their dumps are empty" in line for line in read.missing)
    assert any("ranks 1,3: no dump" in line for line in read.missing)


@given(data=st.binary(max_size=400), at=st.integers(0, 600))
def test_damage_never_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int):
    whole = pickle.dumps(dump([entry(1), entry(2, "send 0->1")], 2, 0))
    path = tmp_path_factory.mktemp("damaged") / "dump_0"
    path.write_bytes(whole[:at] + data + whole[at + len(data) :])
    with contextlib.suppress(TraceError):
        read_dumps([path])


def test_dumps_without_counts_tell_them_by_their_entries(tmp_path: Path) -> None:
    entries = [entry(6, state="completed"), entry(7), entry(8)]
    read = read_dumps(write(tmp_path, {0: dump(entries, 0, 0) | {"pg_status": {}}}))
    assert [(s.started, s.completed) for s in read.states[0].streams] == [(7, 6)]


def test_the_dump_of_another_rank_is_said_to_be_one(tmp_path: Path) -> None:
    pair = dump([entry(1, "send 0->1", group="1")], 1, 0)
    pair["pg_config"]["1"] = {"name": "1", "desc": "pipeline", "ranks": "[0, 1]"}
    read = read_dumps(write(tmp_path, {0: pair, 1: pair, 2: pair, 3: dump([entry(1)], 1, 0)}))
    assert read.missing == (
        "rank 2: nccl_trace_rank_2 has messages of 1, which is between ranks 0-1: "
        "the dump of another rank under this rank's name",
    )


FRAMES = [
    {
        "name": "all_reduce",
        "filename": "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d.py",
        "line": 9,
    },
    {
        "name": "backward",
        "filename": "/opt/venv/lib/python3.11/site-packages/accelerate/accelerator.py",
        "line": 8,
    },
    {"name": "wrapped", "filename": "/usr/lib/python3.11/contextlib.py", "line": 7},
    {
        "name": "train",
        "filename": "/opt/venv/lib/python3.11/site-packages/transformers/trainer.py",
        "line": 6,
    },
    {"name": "<module>", "filename": "/home/me/train.py", "line": 50},
]


@pytest.mark.parametrize(
    ("op", "content", "expected"),
    [
        ("all_reduce", ([[3, 4]], ["Float"], [[3, 4]]), (48, "float32")),
        ("all_reduce", ([[]], ["BFloat16"], [[]]), (2, "bfloat16")),
        ("_all_gather_base", ([[8]], ["Half"], [[32]]), (64, "float16")),
        ("all_gather", ([[5]], ["Long"], [[5], [8]]), (104, "int64")),
        ("reduce_scatter", ([[8], [8]], ["Double"], [[8]]), (128, "float64")),
        ("gather", ([[8]], ["Byte"], [[8], [8]]), (8, "uint8")),
        ("all_reduce", ([[8]], ["QuantumFloat"], [[8]]), (0, "")),
        ("all_reduce", ([["x"]], ["Float"], "?"), (0, "")),
        ("all_reduce", (None, None, None), (0, "")),
        ("barrier", ([], [], []), (0, "")),
    ],
)
def test_sizes_and_types_of_calls(
    tmp_path: Path, op: str, content: tuple[Any, Any, Any], expected: tuple[int, str]
) -> None:
    sizes = dict(zip(("input_sizes", "input_dtypes", "output_sizes"), content, strict=True))
    done = entry(6, op, state="completed", **sizes)
    one = dump([done, entry(7, op, **sizes, frames=FRAMES)], 7, 6)
    state = read_dumps(write(tmp_path, dict.fromkeys(RANKS, one))).states[0]
    (flight,) = state.in_flight
    assert (flight.bytes, flight.element) == expected
    assert flight.site == "/home/me/train.py:50 <module> (called through transformers, backward)"
    (ended,) = state.streams[0].ended
    assert (ended.seq, ended.bytes, ended.element, ended.site) == (6, *expected, "")


@pytest.mark.parametrize(
    ("frames", "site"),
    [
        ([{"name": "f", "filename": "torch/distributed/c10d.py", "line": 1}], ""),
        (
            [
                {"name": "call", "filename": "/opt/site/keepstep/capture/operations.py", "line": 138},
                {"name": "barrier", "filename": "/src/pytorch/torch/distributed/c10d.py", "line": 5},
                {
                    "name": "call",
                    "filename": "/v/lib/site-packages/keepstep/capture/operations.py",
                    "line": 1,
                },
                {"name": "main", "filename": "/home/me/torch/train.py", "line": 51},
            ],
            "/home/me/torch/train.py:51 main",
        ),
        (
            [{"name": "f", "filename": "/home/me/lightning/model.py", "line": 3}],
            "/home/me/lightning/model.py:3 f",
        ),
        ([{"name": "f", "filename": "train.py", "line": 3}], "train.py:3 f"),
        ([{"name": "f", "filename": "<string>", "line": 3}], ""),
        ([{"name": "f", "filename": "train.py"}], ""),
        (["odd"], ""),
        ("odd", ""),
        (None, ""),
    ],
)
def test_the_users_line_is_found_or_not_told(tmp_path: Path, frames: Any, site: str) -> None:
    one = dump([entry(7, frames=frames)], 7, 6)
    assert read_dumps(write(tmp_path, dict.fromkeys(RANKS, one))).states[0].in_flight[0].site == site


def sized(seq: int, count: int, line: int, **more: Any) -> dict[str, Any]:
    frames = [{"name": "<module>", "filename": "/home/me/train.py", "line": line}]
    content = {"input_sizes": [[count]], "output_sizes": [[count]], "input_dtypes": ["BFloat16"]}
    return entry(seq, frames=frames, **content, **more)


def test_the_rank_that_brings_another_size_is_named_with_its_line(tmp_path: Path) -> None:
    past = [sized(seq, 4096, 50, state="completed") for seq in range(1, 11)]
    dumps = {r: dump([*past, sized(11, 4095 if r == 2 else 4096, 50 + r // 2)], 11, 10) for r in RANKS}
    incident = analyze(write(tmp_path, dumps)[0].parent).incidents[0]
    assert [(culprit.rank, culprit.confidence) for culprit in incident.culprits] == [(2, "high")]
    assert "rank 2 in ALLREDUCE of 8190 B (4095 bfloat16)" in incident.culprits[0].detail
    assert any("/home/me/train.py:51" in line for line in incident.evidence)


def test_a_call_that_one_rank_alone_made_is_its_own(tmp_path: Path) -> None:
    past = [sized(seq, 1, 50, state="completed") for seq in range(1, 11)]
    dumps = {rank: dump([*past], 10, 10) for rank in RANKS}
    dumps[3] = dump([*past, sized(11, 1, 212)], 11, 10)
    incident = analyze(write(tmp_path, dumps)[0].parent).incidents[0]
    assert [(culprit.rank, culprit.confidence) for culprit in incident.culprits] == [(3, "medium")]
    assert "/home/me/train.py:212" in incident.culprits[0].detail
    dumps[3] = dump([*past, sized(11, 1, 50)], 11, 10)  # a call as all before: it waits for the others
    incident = analyze(write(tmp_path, dumps)[0].parent).incidents[0]
    assert 3 not in [culprit.rank for culprit in incident.culprits]


def hang(folder: Path, ranks: tuple[int, ...] = RANKS, *, at_ns: int = 1_700_000_000_000_000_000) -> None:
    """Dumps of a job in which rank 3 has not made call 7."""
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        calls = [
            entry(seq, state="completed" if seq < 7 else "scheduled") for seq in range(4, 8 - (rank == 3))
        ]
        for one in calls:
            one["time_created_ns"] += at_ns
        write(folder, {rank: dump(calls, 7 - (rank == 3), 6)})


def blamed(folder: Path) -> list[int | None]:
    return [culprit.rank for culprit in analyze(folder).incidents[0].culprits]


def test_folders_of_nodes_are_one_job(tmp_path: Path) -> None:
    hang(tmp_path / "node0", (0, 1))
    hang(tmp_path / "node1", (2, 3))
    assert blamed(tmp_path) == [3]
    assert not any("no dump" in line for line in analyze(tmp_path).missing)


def test_folders_with_the_same_ranks_are_told_what_to_do(tmp_path: Path) -> None:
    hang(tmp_path / "monday")
    hang(tmp_path / "tuesday", at_ns=1_700_100_000_000_000_000)
    with pytest.raises(
        TraceError, match="give one of the folders, or, if each is of a node of one job, rename"
    ):
        analyze(tmp_path)


@pytest.mark.parametrize("name", ["dump_20251125", "dump_251125", "dump_3_20251125", "rank_9"])
def test_a_stray_file_is_named_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    hang(tmp_path)
    (tmp_path / name).write_bytes(
        pickle.dumps(dump([entry(1)], 1, 0)) if name != "rank_9" else b"\x80\x04pg_config, cut"
    )
    if name == "dump_3_20251125":
        with pytest.raises(TraceError, match="rank 3 has another dump"):
            analyze(tmp_path)
        return
    assert blamed(tmp_path) == [3]
    assert any(name in line for line in analyze(tmp_path).missing)


def test_the_date_in_the_name_of_a_dump_without_members_is_no_rank(tmp_path: Path) -> None:
    unlisted = dump([entry(6, state="completed"), entry(7)], 7, 6) | {"pg_config": {}}
    read = read_dumps(write(tmp_path, {0: unlisted, 1: unlisted, 2: unlisted, 251125: unlisted}))
    assert read.world_size == 3
    assert any("number far from the other ranks" in line for line in read.missing)


def test_dumps_of_another_run_are_left_out(tmp_path: Path) -> None:
    hang(tmp_path, (0, 1, 2))
    hang(tmp_path, (3,), at_ns=1_699_990_000_000_000_000)
    read = read_dumps(tmp_path.iterdir())
    assert [state.rank for state in read.states] == [0, 1, 2]
    assert any(
        "rank 3: nccl_trace_rank_3 is of another run: its last call was made at 2023" in line
        for line in read.missing
    )
    hang(tmp_path, (2,), at_ns=1_699_990_000_000_000_000)
    with pytest.raises(
        TraceError, match=r"of several runs: ranks 2-3 until .* ranks 0-1 until .* keep those of one"
    ):
        read_dumps(tmp_path.iterdir())


def test_a_rank_that_had_nothing_to_do_for_long_is_of_the_same_run(tmp_path: Path) -> None:
    hang(tmp_path, (0, 1, 2))
    hang(tmp_path, (3,), at_ns=1_699_990_000_000_000_000)
    write(tmp_path, {3: dump([entry(7)], 7, 6)})
    assert len(read_dumps(tmp_path.iterdir()).states) == 4


def test_the_members_of_gloos_default_group_are_known_while_it_is_the_only_one(tmp_path: Path) -> None:
    def gloo(ranks: str) -> dict[str, Any]:
        calls = [entry(6, retired=True), entry(7)]
        return dump(calls, 9, 9) | {"pg_config": {"": {"name": "", "desc": "", "ranks": ranks}}}

    read = read_dumps(write(tmp_path, {0: gloo("[0, 1, 2, 3]"), 1: gloo("[0, 1, 2, 3]")}))
    assert (read.world_size, read.listed, read.inferred) == (4, 4, frozenset())
    assert read.groups["0 (default_pg)"].members == (0, 1, 2, 3)
    assert [(s.started, s.completed) for s in read.states[0].streams] == [(7, 6)]
    read = read_dumps(write(tmp_path, {0: gloo("[]"), 1: gloo("[]")}))
    assert (read.world_size, read.listed, read.inferred) == (2, 0, frozenset({"0 (default_pg)"}))


def test_a_barrier_by_all_reduce_is_a_barrier(tmp_path: Path) -> None:
    one = dump([sized(7, 1, 51, op="all_reduce_barrier")], 7, 6)
    (flight,) = read_dumps(write(tmp_path, {0: one})).states[0].in_flight
    assert (flight.op, flight.bytes, flight.element) == (Op.BARRIER, 0, "")


@pytest.mark.parametrize(
    ("ranks", "members"),
    [
        ("[0, 1, 2, 3]", (0, 1, 2, 3)),
        ("0,1", (0, 1)),
        ("(2, 3,)", (2, 3)),
        ([0, 1], (0, 1)),
        ("[0, 16000000]", None),
        ("-" * 200_000, None),
        ("[" * 200_000, None),
        ("[0, 1", (0, 1)),
        ("[1e3]", None),
        ("__import__('os')", None),
        ({}, ()),
        (7, None),
    ],
)
def test_members_of_groups(tmp_path: Path, ranks: Any, members: tuple[int, ...] | None) -> None:
    content = dump([entry(7)], 7, 6)
    content["pg_config"]["0"]["ranks"] = ranks
    paths = write(tmp_path, {0: content})
    if members is None:
        with pytest.raises(TraceError, match=r"damaged: (Value|Type)Error"):
            read_dumps(paths)
    else:
        assert read_dumps(paths).groups["0 (default_pg)"].members == (members or (0,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"collective_seq_id": 1 << 80}, "no number of a call"),
        ({"time_created_ns": -5}, "no number of a call"),
        ({"profiling_name": ["nccl:all_reduce"]}, "a list is where a name should be"),
        ({"process_group": [["0"], ""]}, "a list is where a name should be"),
    ],
)
def test_odd_values_in_calls_are_damage(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_dumps(write(tmp_path, {0: dump([entry(7) | change], 7, 6)}))


def test_more_calls_than_any_buffer_holds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_CALLS", 2)
    with pytest.raises(TraceError, match="has 3 calls, of which 2 are read; set TORCH_FR_BUFFER_SIZE lower"):
        read_dumps(write(tmp_path, {0: dump([entry(1), entry(2), entry(3)], 3, 0)}))


def test_many_bad_files_are_counted(tmp_path: Path) -> None:
    hang(tmp_path)
    for rank in range(10, 60):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(b"noise")
    missing = analyze(tmp_path).missing
    assert "30 more files could not be used" in missing
    assert len(missing) < 30


def test_nobody_is_told_to_test_pairs_of_nodes_without_names(tmp_path: Path) -> None:
    """All are in call 7 and nobody gets out: a dump knows no nodes."""
    same = dump([entry(6, state="completed"), entry(7)], 7, 6)
    (incident,) = analyze(write(tmp_path, dict.fromkeys(RANKS, same))[0].parent).incidents
    assert "pair by pair" not in str(incident)
    assert "which of ranks 0-3 holds up the others" in str(incident.missing)


def test_parts_of_a_split_with_one_name_are_groups_of_their_own(tmp_path: Path) -> None:
    dumps: dict[int, Any] = {}
    for rank in range(8):
        first = rank - rank % 2
        content = dump([entry(1, group="1")], 1, 0)
        content["pg_config"] = {
            "0": {"desc": "default_pg", "ranks": str(list(range(8)))},
            "1": {"desc": "mesh_tp", "ranks": str([first, first + 1])},
        }
        content["pg_status"] = {"1": {"last_enqueued_collective": 1, "last_completed_collective": 0}}
        dumps[rank] = content
    read = read_dumps(write(tmp_path, dumps))
    assert [state.rank for state in read.states] == list(range(8))
    parts = {name: info.members for name, info in read.groups.items() if info.desc == "mesh_tp"}
    assert parts == {
        f"1 (mesh_tp) of ranks {fold_ranks((first, first + 1))}": (first, first + 1) for first in (0, 2, 4, 6)
    }
