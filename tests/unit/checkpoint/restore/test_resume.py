"""Which refusals every restart would meet again, and which rank says why."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from keepstep.checkpoint.api import _left_of
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.restore.resume import Elsewhere, SaidByAnother, resume
from keepstep.checkpoint.snapshot import talk
from keepstep.core.errors import CheckpointError, MisfitError

OTHER = "storage /ck: 00000012 is of 2 ranks, this job has 3: use that many ranks"
DAMAGED = "storage /ck: 00000012: its manifest is damaged"


@pytest.mark.parametrize(
    ("refused", "final"), [((OTHER,), True), ((DAMAGED,), False), ((OTHER, DAMAGED), False)]
)
def test_only_another_number_of_ranks_is_for_good(refused: tuple[str, ...], final: bool) -> None:
    elsewhere = Elsewhere(refused=refused)
    rank = Mock(
        number=0, own=frozenset, begun=lambda: True, doubted=lambda: None, elsewhere=lambda: elsewhere
    )
    with pytest.raises(CheckpointError, match="none that can be had") as raised:
        talk(resume(rank, 0), lambda row: [row])
    assert isinstance(raised.value, MisfitError) == final


def refused(*ranks: Mock) -> list[CheckpointError]:
    """What each rank raises, by rank."""
    steps = [resume(rank, 0) for rank in ranks]
    rows = [next(one) for one in steps]
    while True:
        sent, raised = rows, list[CheckpointError]()
        rows = []
        for one in steps:
            try:
                rows.append(one.send(sent))
            except CheckpointError as error:  # noqa: PERF203
                raised.append(error)
        if raised:
            return raised


def rank_with(number: int, *steps: int, elsewhere: tuple[int, ...] = ()) -> Mock:
    """A rank with these steps in its cache, and others that are damaged elsewhere."""
    found = Elsewhere(frozenset(Key(0, step) for step in elsewhere))
    return Mock(
        number=number,
        own=lambda: frozenset(Key(0, step) for step in steps),
        begun=lambda: False,
        doubted=lambda: None,
        elsewhere=lambda: found,
        moment=lambda key: 0,
        bring=Mock(side_effect=CheckpointError("bytes are not those that were written")),
    )


def test_the_rank_whose_snapshots_are_damaged_says_so() -> None:
    first, second = refused(rank_with(0, 5, 10), rank_with(1, elsewhere=(5, 10)))
    assert type(second) is CheckpointError
    assert "(ranks 1: nothing (damaged, or not to be read); ranks 0: step 5" in str(second)
    assert "bytes are not those that were written" in str(second)
    assert type(first) is SaidByAnother


def test_of_several_that_know_why_the_first_says_it() -> None:
    ranks = [rank_with(0, 5), *(rank_with(number, elsewhere=(5,)) for number in (1, 2))]
    assert [type(error) for error in refused(*ranks)] == [SaidByAnother, CheckpointError, SaidByAnother]


def test_where_none_knows_why_the_one_that_has_least_says_it() -> None:
    assert [type(error) for error in refused(rank_with(0, 5), rank_with(1))] == [
        SaidByAnother,
        CheckpointError,
    ]


def test_what_is_left_for_the_launcher_tells_who_refused() -> None:
    own = _left_of(CheckpointError("storage /ck\ndoes not answer"))
    assert (type(own), str(own)) == (CheckpointError, "nothing is restored: storage /ck\\ndoes not answer")
    assert str(_left_of(MisfitError("step 7"))) == "the state or the number of ranks is not that of before"
    assert type(_left_of(SaidByAnother("see another"))) is SaidByAnother
