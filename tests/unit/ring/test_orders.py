"""The orders page: what one side writes the other reads, and what is torn, old or foreign is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from keepstep.core.errors import RingError
from keepstep.ring import orders
from keepstep.ring.orders import OrdersPage, State, Word


@pytest.fixture
def sides() -> Iterator[tuple[OrdersPage, OrdersPage]]:
    descriptor = orders.create()
    agent, worker = OrdersPage(f"/proc/{os.getpid()}/fd/{descriptor}"), OrdersPage(descriptor)
    os.close(descriptor)
    yield agent, worker
    agent.close()
    worker.close()


def soon_ns(seconds: float = 1.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def test_an_order_is_seen_renewed_and_called_off(sides: tuple[OrdersPage, OrdersPage]) -> None:
    agent, worker = sides
    assert worker.words[Word.ORDER] == 0
    agent.order(7, 120, soon_ns())
    assert (worker.words[Word.ORDER], worker.words[Word.BOUNDARY]) == (7, 120)
    agent.order(7, 999, soon_ns(2))
    assert worker.words[Word.BOUNDARY] == 120  # a renewal moves nothing
    assert worker.leased(time.monotonic_ns())
    agent.release()
    assert not worker.leased(time.monotonic_ns())


def test_a_lease_runs_out_and_none_is_too_long(sides: tuple[OrdersPage, OrdersPage]) -> None:
    agent, worker = sides
    agent.order(7, 1, 1000)
    assert worker.leased(999)
    assert not worker.leased(1000)
    agent.order(8, 1, 1 << 63)
    assert not worker.leased(999)


def test_states_belong_to_their_hold(sides: tuple[OrdersPage, OrdersPage]) -> None:
    agent, worker = sides
    worker.say(7, State.HELD, 120)
    assert agent.state(7) is State.HELD
    assert agent.state(8) is State.UNSEEN
    worker.words[Word.STATE] = 77
    assert agent.state(7) is State.UNSEEN


def test_bodies_carry_their_number(sides: tuple[OrdersPage, OrdersPage]) -> None:
    agent, worker = sides
    assert worker.tests.newest() is None
    agent.tests.put(11, {"limit_s": 2})
    assert worker.tests.newest() == (11, {"limit_s": 2})
    worker.report.put(11, {"rank": 3})
    assert agent.report.under(11) == {"rank": 3}
    assert agent.report.under(12) is None
    worker.words[Word.REPORT] = 12
    assert agent.report.under(12) is None  # the word is new, the body is the old one


@pytest.mark.parametrize("damage", [b"\xff" * 8, (5).to_bytes(8, "little") + b"[1,2]", bytes(8)])
def test_a_damaged_body_is_none(sides: tuple[OrdersPage, OrdersPage], damage: bytes) -> None:
    agent, worker = sides
    agent.tests.put(11, {"limit_s": 2})
    agent._map[4096 : 4096 + len(damage)] = damage
    assert worker.tests.newest() is None


def test_a_body_that_does_not_fit_is_refused(sides: tuple[OrdersPage, OrdersPage]) -> None:
    with pytest.raises(RingError, match="do not fit"):
        sides[0].tests.put(1, {"text": "x" * 40_000})
    sides[1].report.put(1, {"text": "x" * 28_000})
    with pytest.raises(RingError, match="do not fit"):
        sides[1].report.put(1, {"text": "x" * 29_000})


def test_shares_of_the_largest_job_fit_beside_all_else(sides: tuple[OrdersPage, OrdersPage]) -> None:
    agent, worker = sides
    assert worker.shares.newest(0) is None
    assert agent.split.newest(0) is None
    worker.report.put(1, {"text": "x" * 28_000})
    agent.shares.put(3, {"shares": [1_000_000] * 16_384})
    worker.split.add({"count": 64})
    worker.split.add({"count": 32})
    assert worker.shares.newest(3) is None
    assert worker.shares.newest(0) == (3, {"shares": [1_000_000] * 16_384})
    assert agent.split.newest(0) == (2, {"count": 32})
    assert agent.split.newest(2) is None
    assert agent.report.under(1) == {"text": "x" * 28_000}


def test_what_is_no_page_is_refused(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "page")
    for content in (b"", b"x" * 100, b"\0" * orders.PAGE_BYTES):
        with open(path, "wb") as file:
            file.write(content)
        with pytest.raises(RingError, match="orders page"):
            OrdersPage(path)
    with pytest.raises(RingError, match="cannot be opened"):
        OrdersPage(path + "-not-there")
