"""Whatever lies in a folder, `analyze` answers or refuses it in one line; the order of lines does not matter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.locate.synthetic_calls import call_logs

from keepstep.analyze import analyze
from keepstep.core.errors import TraceError


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


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), edits=st.integers(0, 20))
@pytest.mark.parametrize("kind", ["calls", "training", "noise"])
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
    else:
        (folder / "dump_0").write_bytes(chance.randbytes(chance.randrange(300)))
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
