"""Whatever lies in a folder, `analyze` answers or refuses it in one line; the order of lines does not matter."""

from __future__ import annotations

import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.unit.locate.synthetic_calls import call_logs

from keepstep.analyze import analyze
from keepstep.core.errors import TraceError
from keepstep.core.layout import ParallelLayout

RECORDED = Path(__file__).parents[1] / "recorded"
ANSWERS = [path.read_bytes() for path in (*RECORDED.glob("ras/*-2.*"), *RECORDED.glob("h100/*/ras*"))]


def call_lines(rank: int) -> list[bytes]:
    calls = call_logs(40, range(20, 30), {1: 2.0})[rank]
    return [
        f"[save_count 1] [{c.at_s:.9f}] [Rank {rank}] Fun {c.function} Data {c.nbytes} stream 0x5 opCount 1\n".encode()
        for c in calls
    ]


LINES = {rank: call_lines(rank) for rank in range(4)}
TRAINING = [
    f" iteration {n}/ 90 | elapsed time per iteration (ms): {1000 + n % 3} |\n".encode() for n in range(60)
]


ABSENT, RANKS, PAIRS = (
    5,
    8,
    2,
)  # rank 5 of 8 does not enter the last all-reduce of all; two groups of four besides


def job_dumps(*, gloo: bool) -> dict[int, dict[str, Any]]:
    """What the flight recorders of a small job leave, as torch 2.13 writes it for NCCL and for Gloo."""
    dumps: dict[int, dict[str, Any]] = {}
    for rank in range(RANKS):
        part = str(1 + rank // (RANKS // PAIRS))
        entries: list[dict[str, Any]] = []
        for seq in range(1, 7):
            for group, desc in (("0", "default_pg"), (part, "undefined")):
                if group == "0" and seq == 6 and rank == ABSENT:
                    continue
                stuck = seq == 6
                if group != "0" and stuck:
                    continue
                entries.append({
                    "pg_id": int(group != "0"), "process_group": [group, desc], "collective_seq_id": seq,
                    "p2p_seq_id": 0, "is_p2p": False, "profiling_name": f"{'gloo' if gloo else 'nccl'}:all_reduce",
                    "state": "scheduled" if gloo or stuck else "completed", "retired": not stuck,
                    "time_created_ns": 1_000_000 * (2 * seq + (group != "0")) + rank, "frames": [],
                })  # fmt: skip
        groups = {
            "0": {"desc": "default_pg", "ranks": str(list(range(RANKS)))},
            part: {"desc": "undefined", "ranks": str([r for r in range(RANKS) if str(1 + r // 4) == part])},
        }
        enqueued = 6 - (rank == ABSENT)
        status = {
            "0": {"last_enqueued_collective": str(enqueued + 7 * gloo), "last_completed_collective": "5"},
            "1": {"last_enqueued_collective": "5", "last_completed_collective": "5"},
        }
        dumps[rank] = {
            "version": "2.10", "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}} if gloo else groups,
            "pg_status": status, "entries": entries,
        }  # fmt: skip
    return dumps


def damaged(data: bytes, chance: random.Random, edits: int) -> bytes:
    found = bytearray(data)
    for _ in range(edits):
        at = chance.randrange(len(found) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            del found[at : at + chance.randrange(200)]
        elif kind == 1:
            found[at:at] = chance.randbytes(chance.randrange(60))
        elif kind == 2:
            found[at : at + 1] = chance.choice([b"\n", b"]", b"9", b"\xff", b"e99"])
        else:
            found[at:at] = bytes(found[at : at + 300])
    return bytes(found)


def judged(path: Path) -> None:
    try:
        found = analyze(path)
    except TraceError as refused:
        if "\n" in str(refused):
            pytest.fail(f"more than one line: {refused}")
        return
    assert all(text and "\n" not in text for text in found.missing)


@settings(max_examples=many(60), deadline=None)
@given(seed=st.integers(0, 1 << 32), edits=st.integers(0, 20))
@example(seed=364285621, edits=1)
@pytest.mark.parametrize("kind", ["calls", "training", "noise", "dumps", "json", "gloo", "ras"])
def test_damage_is_used_as_far_as_it_goes_or_refused(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, edits: int
) -> None:
    chance = random.Random(seed)
    folder = tmp_path_factory.mktemp(kind)
    if kind == "calls":
        for rank, lines in LINES.items():
            if chance.random() < 0.9:
                (folder / f"rank_{rank}.log").write_bytes(damaged(b"".join(lines), chance, edits))
    elif kind == "training":
        (folder / "log").write_bytes(damaged(b"".join(TRAINING), chance, edits))
    elif kind == "ras":
        answer = chance.choice(ANSWERS)
        (folder / "ras").write_bytes(damaged(answer, chance, edits))
        folder /= "ras"
    elif kind == "noise":
        (folder / "dump_0").write_bytes(chance.randbytes(chance.randrange(300)))
    else:
        for rank, content in job_dumps(gloo=kind == "gloo").items():
            if chance.random() < 0.9:
                data = pickle.dumps(content) if kind == "dumps" else json.dumps(content).encode()
                (folder / f"dump_{rank}").write_bytes(damaged(data, chance, edits))
    judged(folder)


def test_order_and_repeats_of_lines_do_not_matter(tmp_path: Path) -> None:
    chance = random.Random(5)
    found = []
    for name in ("plain", "shuffled"):
        folder = tmp_path / name
        folder.mkdir()
        for rank, lines in LINES.items():
            mixed = lines
            if name == "shuffled":
                mixed = [*lines, *chance.sample(lines, 50)]
                chance.shuffle(mixed)
            (folder / f"rank_{rank}.log").write_bytes(b"".join(mixed))
        found.append(analyze(folder).incidents)
    assert [culprit.rank for culprit in found[0][0].culprits] == [1]
    assert found[0] == found[1]


@settings(max_examples=many(60), deadline=None)
@given(seed=st.integers(0, 1 << 32))
@pytest.mark.parametrize("gloo", [False, True])
def test_dumps_name_the_absent_rank_whatever_else_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, gloo: bool, seed: int
) -> None:
    """Shuffled and doubled entries change nothing; up to three dumps may be cut, of another version or gone."""
    chance = random.Random(seed)
    folder = tmp_path_factory.mktemp("dumps")
    spoilt = chance.sample([rank for rank in range(RANKS) if rank != ABSENT], chance.randrange(4))
    for rank, content in job_dumps(gloo=gloo).items():
        content["entries"] += chance.sample(content["entries"], 2)
        chance.shuffle(content["entries"])
        how = chance.choice(["cut", "version", "gone", "empty"]) if rank in spoilt else ""
        if how == "version":
            content["version"] = chance.choice(["1.5", "3.0"])
        data = pickle.dumps(content) if chance.random() < 0.5 else json.dumps(content).encode()
        if how == "cut":
            data = data[: chance.randrange(1, len(data) - 1)]
        if how != "gone":
            (folder / f"dump_{rank}").write_bytes(b"" if how == "empty" else data)
    found = analyze(folder, ParallelLayout.declared("tp2-dp4"))
    (incident,) = found.incidents
    assert [culprit.rank for culprit in incident.culprits] == [ABSENT]
    assert "tp 1, dp 2" in incident.culprits[0].detail
    assert all(any(f"rank {rank}" in line or f"ranks {rank}" in line or "no dump" in line
                   for line in found.missing) for rank in spoilt)  # fmt: skip


def test_a_dump_of_another_job_and_one_with_a_wrong_name_are_left_out(tmp_path: Path) -> None:
    dumps = job_dumps(gloo=False)
    dumps[3]["pg_config"]["0"]["ranks"] = "[0, 1, 2, 3]"
    dumps[70] = dumps.pop(7)
    for rank, content in dumps.items():
        (tmp_path / f"dump_{rank}.json").write_text(json.dumps(content))
    found = analyze(tmp_path)
    assert [culprit.rank for culprit in found.incidents[0].culprits] == [ABSENT]
    assert found.incidents[0].world_size == RANKS
    assert any("rank 3: dump_3.json is of another job" in line for line in found.missing)
    assert any("dump_70.json is of no rank 70" in line and "rename" in line for line in found.missing)


@pytest.mark.parametrize(
    ("layout", "said"),
    [("tp2-dp2", "dump_7: has rank 7, but --layout"), ("tp4-dp4", "dump_7: its job has ranks 0 to 7")],
)
def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path, layout: str, said: str) -> None:
    for rank, content in job_dumps(gloo=False).items():
        (tmp_path / f"dump_{rank}").write_bytes(pickle.dumps(content))
    with pytest.raises(TraceError, match=re.escape(said)) as refused:
        analyze(tmp_path, ParallelLayout.declared(layout))
    assert "\n" not in str(refused.value)
    assert "change a size" in str(refused.value)


def test_gloo_dumps_and_a_layout_tell_of_ranks_without_a_dump(tmp_path: Path) -> None:
    """Nothing in them says how many ranks there are."""
    for rank, content in job_dumps(gloo=True).items():
        if rank != ABSENT:
            (tmp_path / f"dump_{rank}").write_text(json.dumps(content))
    found = analyze(tmp_path, ParallelLayout.declared("tp4-dp2"))
    assert [(one.rank, one.cause) for one in found.incidents[0].culprits] == [(ABSENT, "silent")]
    assert f"ranks {ABSENT}: no dump" in found.missing
