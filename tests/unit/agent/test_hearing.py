"""What is sent of what was heard: the weightiest first, no more than is of use, without secrets, and again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from keepstep.agent.hearing import A_MINUTE, ALIKE, KEPT_FREE, Hearing, said
from keepstep.core.told import Row, Told
from keepstep.wire.messages import Said, Words

ROW = Row("full", (), (), "cause", "storage", "no-space", "the disk is full")


class Ears:
    """A stand-in for the sensors: what the next look finds."""

    def __init__(self) -> None:
        self.next: list[tuple[int, Told]] = []
        self.passed_over = 0

    def look(self, *_: object, last: bool = False) -> list[tuple[int, Told]]:
        found, self.next = self.next, []
        return found

    def close(self) -> None:
        pass


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture
def hearing(ears: Ears, tmp_path: Path) -> Iterator[Hearing]:
    (tmp_path / "kmsg").touch()
    made = Hearing(4, {}, str(tmp_path / "kmsg"), dict[int, int], incarnation=3)
    made._words = cast("Any", ears)
    yield made
    made._kernel.close()


def told(role: str, number: int, name: str = "") -> Told:
    row = replace(ROW, role=cast("Any", role), name=name or role)
    return Told(row, f"line {number}", f"line {number}", number, "stderr")


def numbers(messages: list[Words]) -> list[int]:
    assert all(len(one.lines) <= 64 and (one.node_rank, one.incarnation) == (4, 3) for one in messages)
    return [line.number for one in messages for line in one.lines]


def test_what_weighs_most_goes_first(hearing: Hearing, ears: Ears) -> None:
    roles = ("note", "echo", "cause", "timeout", "exception", "suspect", "outcome", "cause")
    ears.next = [(0, told(role, number)) for number, role in enumerate(roles)]
    assert numbers(hearing.poll(1.0)) == [2, 7, 5, 4, 6, 1, 3, 0]
    assert hearing.poll(1.05) == []


def test_what_tells_little_leaves_room(hearing: Hearing, ears: Ears) -> None:
    ears.next = [(0, told("echo", number, f"echo {number}")) for number in range(60)]
    assert len(numbers(hearing.poll(1.0))) == A_MINUTE - KEPT_FREE
    ears.next = [(1, told("cause", number, f"cause {number}")) for number in range(100, 150)]
    assert numbers(hearing.poll(1.1)) == list(range(100, 100 + KEPT_FREE))
    later = [number for at in range(600) for number in numbers(hearing.poll(1.1 + at * 0.1))]
    assert later[:18] == list(range(132, 150))
    assert len(later) <= A_MINUTE + 1
    assert len(later) > 18


def test_no_more_than_so_many_are_sent_in_a_minute(hearing: Hearing, ears: Ears) -> None:
    sent = 0
    for poll in range(20 * 60 * 10):
        ears.next = [(0, told("cause", number, f"row {poll % 400}.{number}")) for number in range(5)]
        sent += len(numbers(hearing.poll(100.0 + poll * 0.05)))
    assert 9 * A_MINUTE <= sent <= 11 * A_MINUTE + 1
    assert len(hearing._waiting) <= 256
    assert sum(len(one.lines) for one in hearing.again()) == 256


def test_one_rank_does_not_drown_the_others(hearing: Hearing, ears: Ears) -> None:
    ears.next = [(rank, told("cause", number)) for number in range(100) for rank in (0, 1)]
    (message,) = hearing.poll(1.0)
    assert [line.rank for line in message.lines] == [0, 1] * ALIKE
    ears.next = [(0, told("cause", 0))]
    assert hearing.poll(30.0) == []
    ears.next = [(0, told("cause", 0))]
    assert numbers(hearing.poll(70.0)) == [0]


def test_a_new_controller_is_told_again(hearing: Hearing, ears: Ears) -> None:
    assert list(hearing.again()) == []
    ears.next = [(0, told("cause", 1)), (1, told("echo", 2))]
    first = hearing.poll(1.0)
    assert list(hearing.again()) == first
    ears.next = [(0, told("suspect", 3))]
    hearing.poll(2.0)
    assert numbers(list(hearing.again())) == [1, 2, 3]


def test_at_the_end_the_weightiest_of_what_waits_is_sent(hearing: Hearing, ears: Ears) -> None:
    ears.next = [(0, told("cause", number, f"row {number}")) for number in range(100)]
    assert len(numbers(hearing.poll(1.0))) == A_MINUTE
    ears.next = [(0, told("outcome", 200))]
    assert numbers(hearing.end(1.1)) == [*range(64, 100), 200]


def test_a_fault_of_the_ears_is_said_and_does_no_harm(
    hearing: Hearing, ears: Ears, caplog: pytest.LogCaptureFixture
) -> None:
    ears.next = [(0, told("no role", 1))]
    assert hearing.poll(1.0) == []
    assert caplog.messages == ["ranks and kernel are not listened to any more"]
    ears.next = [(0, told("cause", 2))]
    assert hearing.poll(2.0) == []
    assert hearing.end(3.0) == []


def test_a_line_is_short_and_has_no_secret() -> None:
    key = "hf_" + "a" * 30
    long = Told(
        ROW, f"token {key} " + "x" * 3000, f"token {key} short", 7, "stderr", places={"path": key + "/" * 900}
    )
    found = said(3, long, 1000.0)
    assert (found.line, found.rank, found.row, found.number) == ("token *** short", 3, "full", 7)
    assert len(found.places["path"]) == 200
    assert key not in str(found)
    longer = said(
        3, Told(ROW, "y" * 600, "y" * 600, 0, "stderr", places={str(n): "v" for n in range(20)}), 0.0
    )
    assert len(longer.line) == 500
    assert len(longer.places) == 8
    for one in (found, longer):
        assert msgspec.convert(msgspec.to_builtins(one), Said) == one


@pytest.mark.parametrize(
    ("written_s", "when_s"),
    [(None, 5000.0), (4999.5, 5000.0), (4900.0, 4900.0), (1400.0, 5000.0), (8600.0, 5000.0)],
)
def test_when_a_line_was_written(written_s: float | None, when_s: float) -> None:
    """Its own date counts where the line has waited; one in another zone does not."""
    assert said(0, Told(ROW, "x", "x", 1, time_s=written_s), 5000.0).unix_s == when_s
