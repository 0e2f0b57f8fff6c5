"""A crash's culprits by deaths and words together."""

from __future__ import annotations

import pytest

from keepstep.core.deaths import DIED
from keepstep.core.incident import Confidence, Culprit, Diagnosis
from keepstep.core.told import Failure
from keepstep.detect.failure_rows import RowMatcher, shipped_rows
from keepstep.detect.listener import Listener
from keepstep.locate.blamed_by_words import blame_by_words
from keepstep.locate.failure import explain

MATCHER = RowMatcher(shipped_rows())
NODES = {0: "a", 1: "a", 2: "b", 3: "b"}
ADDRESSES = {"10.0.0.2": "b"}
KEY_ERROR = "Traceback (most recent call last):\nKeyError: 'x'\n"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
LOST = "RuntimeError: Connection closed by peer [10.0.0.1]:4711\n"


def told(words: dict[int, str]) -> Failure:
    logs = []
    for rank, text in words.items():
        listener = Listener(MATCHER, f"log of rank {rank}", rank)
        listener.take(text.encode())
        logs.append(listener.words())
    return explain(logs)


def died(*ranks: int, sure: Confidence = "high", victims: tuple[int, ...] = ()) -> Diagnosis:
    culprits = tuple(Culprit(rank, None, NODES[rank], "", 0.0, sure, DIED, "exit code 1") for rank in ranks)
    return Diagnosis("crash", culprits, victims)


def blamed(diagnosis: Diagnosis, words: dict[int, str], own: frozenset[int] = frozenset()) -> Diagnosis:
    return blame_by_words(diagnosis, told(words), NODES, ADDRESSES, own)


def test_words_and_deaths_that_agree_make_it_sure() -> None:
    found = blamed(died(2, sure="medium"), {2: ECC, 0: LOST})
    assert [(one.rank, one.confidence) for one in found.culprits] == [(2, "high")]
    assert "uncorrectable ECC" in found.culprits[0].detail


def test_words_name_who_was_not_known_by_deaths() -> None:
    unknown = Diagnosis("crash", (), (0, 2))
    found = blamed(unknown, {2: ECC, 0: LOST})
    assert [(one.rank, one.node) for one in found.culprits] == [(2, "b")]
    assert found.victims == (0,)


def test_a_cause_in_words_outweighs_a_death_without_an_own_error() -> None:
    found = blamed(died(0), {2: ECC, 0: LOST})
    assert [one.rank for one in found.culprits] == [2]
    assert found.victims == (0,)


def test_of_two_plain_errors_the_order_of_deaths_counts() -> None:
    found = blamed(died(0), {2: KEY_ERROR}, own=frozenset({0}))
    assert [one.rank for one in found.culprits] == [0]


def test_only_consequences_change_nothing() -> None:
    assert blamed(died(1), {0: LOST}) == died(1)


@pytest.mark.parametrize(
    "error", ["ModuleNotFoundError: No module named 'apex'\n", "SyntaxError: invalid syntax\n"]
)
def test_nobody_is_blamed_for_what_all_import(error: str) -> None:
    found = blamed(died(2), {2: error})
    assert (found.culprits, found.victims) == ((), (2,))


def test_no_rank_is_blamed_for_what_storage_has_of_no_use() -> None:
    for why in ("bytes of storage 19 are not those that were written", "storage /ck does not answer"):
        words = f"keepstep.core.errors.CheckpointError: nothing is restored: no snapshot is whole ({why})\n"
        found = blamed(died(1, victims=(0,)), {1: words})
        assert (found.culprits, found.victims) == ((), (0, 1))


def test_the_one_rank_whose_state_does_not_fit_is_to_blame_and_nobody_of_several() -> None:
    words = "MisfitError: the state or the number of ranks is not that of before\n"
    assert [one.rank for one in blamed(died(1), {1: words}).culprits] == [1]
    assert blamed(died(0, 1, 2), dict.fromkeys((0, 1, 2), words)).culprits == ()


def test_nobody_of_several_is_blamed_for_one_error() -> None:
    found = blamed(died(0, 1, 2, sure="low"), dict.fromkeys(NODES, KEY_ERROR))
    assert (found.culprits, found.victims) == ((), (0, 1, 2))


def test_a_rank_that_the_job_does_not_have_is_not_blamed() -> None:
    words = told({7: ECC})
    assert blame_by_words(Diagnosis("crash"), words, NODES, ADDRESSES, frozenset()).culprits == ()


def test_the_other_end_of_a_link_is_a_node_by_its_address() -> None:
    line = "a:1:2 [0] NCCL WARN socketStartConnect: Connect to 10.0.0.2<41000> failed : No route to host\n"
    listener = Listener(MATCHER, "log")
    listener.take(line.encode())
    found = blame_by_words(Diagnosis("crash"), explain([listener.words()]), NODES, ADDRESSES, frozenset())
    links = [one.link.nodes for one in found.culprits if one.link is not None]
    assert links == [("a", "b")]


@pytest.mark.parametrize("why", ["DUE TO TIME LIMIT", "DUE TO PREEMPTION"])
@pytest.mark.parametrize("ranks", [(0,), (0, 2)])
def test_nobody_is_blamed_where_the_scheduler_ended_the_job(ranks: tuple[int, ...], why: str) -> None:
    line = f"slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2025-01-01T00:00:00 {why} ***\n"
    found = blamed(died(*ranks), {0: line, 2: LOST})
    assert found.culprits == ()
    assert found.victims == ranks
