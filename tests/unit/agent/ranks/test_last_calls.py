from __future__ import annotations

import random

import numpy as np

from keepstep.agent.ranks.last_calls import LastCalls, last_calls
from keepstep.core.events import Flag, Kind, Op, Phase, element_bits, reduction_bits
from keepstep.ring.reader import RECORD

SITES = ["", "train.py:12 backward", "train.py:20 log", "train.py:30 odd"]
FLOAT_SUM = element_bits("float32") | reduction_bits("SUM")


def records(*calls: tuple[int, Op, int], is_open: int = 0, phases: bool = False):
    """Calls (group, operation, site) in order; the last ``is_open`` are in flight."""
    rows = np.zeros(len(calls), RECORD)
    counts: dict[int, int] = {}
    for at, (group, op, site) in enumerate(calls):
        counts[group] = counts.get(group, 0) + 1
        ended = 0 if at >= len(calls) - is_open else at + 2
        rows[at] = (
            at,
            at + 1,
            ended,
            0,
            8 * at,
            counts[group],
            -1,
            1,
            site,
            group,
            Kind.COLLECTIVE,
            op,
            FLOAT_SUM,
        )
    if phases:
        rows = np.repeat(rows, 2)
        rows["ticket"] = np.arange(len(rows))
        rows["kind"][::2], rows["op"][::2] = Kind.PHASE, Phase.BACKWARD
    return rows


def dumb_usual(calls: list[tuple[int, Op, int]], at: int) -> int:
    if at < 8 or not calls[at][2]:
        return -1
    for back in range(8, 0, -1):
        run = calls[at - back : at]
        after = [calls[i] for i in range(back, at) if calls[i - back : i] == run]
        if after:
            return after.count(calls[at])
    return -1


def test_how_usual_calls_are_is_counted_as_a_dumb_count_does() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        calls = [
            (rng.randrange(2), rng.choice([Op.ALLREDUCE, Op.BARRIER]), rng.randrange(3))
            for _ in range(rng.randint(1, 60))
        ]
        is_open = rng.randint(0, min(4, len(calls)))
        rows = records(*calls, is_open=is_open, phases=bool(seed % 2))
        found = last_calls(rows, SITES)
        collectives = rows[rows["kind"] == Kind.COLLECTIVE]
        expected = {
            int(collectives["ticket"][at]): dumb_usual(calls, at)
            for at in range(len(calls) - is_open, len(calls))
        }
        assert found.usual == expected, seed
        for group, ended in found.ended.items():
            numbers = [at for at in range(len(calls) - is_open) if calls[at][0] == group][-4:]
            assert [one.usual for one in ended] == [dumb_usual(calls, at) for at in numbers], seed
            assert [one.seq for one in ended] == [int(collectives["seq"][at]) for at in numbers], seed


def test_the_last_calls_of_a_group_are_told_with_what_they_moved() -> None:
    rows = records(*[(0, Op.ALLREDUCE, 1)] * 9, (0, Op.ALLREDUCE, 2), (3, Op.BARRIER, 3), is_open=1)
    rows["flags"][-3] |= int(Flag.FAILED)
    found = last_calls(rows, SITES)
    assert [one.seq for one in found.ended[0]] == [7, 8, 9, 10]
    last = found.ended[0][-1]
    assert (last.op, last.bytes, last.element, last.reduction) == (Op.ALLREDUCE, 72, "float32", "SUM")
    assert (last.site, last.usual) == ("train.py:20 log", 0)
    assert [one.failed for one in found.ended[0]] == [False, False, True, False]
    assert found.ended[3] == ()
    assert found.usual == {10: -1}  # the call before it was never made before: the place is new
    assert found.main_site == 1


def test_a_ring_without_collectives_has_no_calls() -> None:
    assert last_calls(np.zeros(0, RECORD)) == LastCalls()
    rows = records((0, Op.ALLREDUCE, 1), phases=True)
    assert last_calls(rows[:1]) == LastCalls()


def test_a_place_that_is_not_known_has_no_habit() -> None:
    found = last_calls(records(*[(0, Op.ALLREDUCE, 0)] * 12, is_open=1))
    assert set(found.usual.values()) == {-1}
    assert found.main_site == 0
