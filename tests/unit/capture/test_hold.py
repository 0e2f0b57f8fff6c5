"""The trap: who is ordered waits, and every way out of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from keepstep.capture import hold as hold_module
from keepstep.capture.hold import COUNT, ORDER, Hold
from keepstep.capture.recorder import Recorder
from keepstep.core.events import Phase
from keepstep.ring import orders
from keepstep.ring.orders import OrdersPage, State

PATIENCE_S = 20


class FakeRecorder:
    def __init__(self) -> None:
        self.begun: list[Phase] = []
        self.ended = 0
        self.stumbles: list[Exception] = []

    def phase(self, phase: Phase) -> Any:
        self.begun.append(phase)

        def end() -> None:
            self.ended += 1

        return end

    def stumbled(self, error: Exception) -> None:
        self.stumbles.append(error)


class Rank:
    """A worker that steps in a thread, and its agent's side of the page."""

    def __init__(self, page: OrdersPage) -> None:
        self.page = page
        self.recorder = FakeRecorder()
        self.hold = Hold(self.recorder)  # type: ignore[arg-type]
        self.hold.open()

    def order(self, number: int, boundary: int, seconds: float = PATIENCE_S / 2) -> None:
        seconds = min(seconds, orders.MOST_LEASE_S)
        self.page.order(number, boundary, time.monotonic_ns() + int(seconds * 1e9))

    def step(self, steps: int) -> threading.Thread:
        thread = threading.Thread(target=self.hold.look, args=(steps,), daemon=True)
        thread.start()
        return thread

    def until(self, number: int, state: State) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while self.page.state(number) is not state:
            assert time.monotonic() < deadline_s, f"{self.page.state(number)!r}, not {state!r}"
            time.sleep(0.002)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    descriptor = orders.create()
    monkeypatch.setenv("KEEPSTEP_ORDERS", f"/proc/{os.getpid()}/fd/{descriptor}")
    page = OrdersPage(descriptor)
    made = Rank(page)
    yield made
    page.release()
    page.close()
    os.close(descriptor)


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def test_nothing_ordered_nothing_done(rank: Rank) -> None:
    rank.hold.look(1)
    assert rank.recorder.begun == []
    assert rank.page.state(1) is State.UNSEEN


def test_held_at_the_boundary_until_called_off(rank: Rank) -> None:
    rank.order(7, boundary=3)
    rank.hold.look(2)
    assert rank.page.state(7) is State.COMING
    thread = rank.step(3)
    rank.until(7, State.HELD)
    assert rank.page.report.under(7) is not None  # where it takes transfers
    rank.page.release()
    assert ended(thread)
    assert rank.page.state(7) is State.RELEASED
    assert (rank.recorder.begun, rank.recorder.ended) == ([Phase.HOLD], 1)
    rank.order(7, boundary=4)  # the same once more is no new hold
    rank.hold.look(4)


def test_past_the_boundary_it_says_so_and_goes_on(rank: Rank) -> None:
    rank.order(7, boundary=3)
    rank.hold.look(4)
    assert rank.page.state(7) is State.MISSED
    assert rank.recorder.begun == []


def test_a_lease_that_nobody_renews_ends_the_hold(rank: Rank) -> None:
    rank.order(7, boundary=3, seconds=0.3)
    assert ended(rank.step(3))
    assert rank.page.state(7) is State.RELEASED
    rank.order(8, boundary=5, seconds=0.0)
    rank.hold.look(5)  # an order whose lease is over is none
    assert rank.page.state(8) is State.UNSEEN


def test_a_renewed_lease_goes_on_and_the_longest_hold_ends_it_all_the_same(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold_module, "MOST_HELD_S", 0.5)
    rank.order(7, boundary=3)
    assert ended(rank.step(3))
    assert rank.page.state(7) is State.RELEASED


def test_a_device_that_does_not_drain_does_not_outlast_the_lease(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(hold_module, "_drain", lambda: never.wait)
    rank.order(7, boundary=3, seconds=0.3)
    assert ended(rank.step(3))
    never.set()
    assert rank.page.state(7) is State.RELEASED


def test_tests_are_run_while_held_and_random_numbers_are_left_alone(rank: Rank) -> None:
    before = torch.get_rng_state()
    rank.order(7, boundary=3)
    thread = rank.step(3)
    rank.until(7, State.HELD)
    rank.page.tests.put(9, {"rank": 0, "transfers": [], "endpoints": {}, "limit_s": 5})
    deadline_s = time.monotonic() + PATIENCE_S
    while (report := rank.page.report.under(9)) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    rank.page.release()
    assert ended(thread)
    assert [one["test"] for one in report["devices"]] == ["fp32"]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("where", ["", "/nowhere/page"])
def test_without_a_page_there_is_no_hold(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_ORDERS", where)
    recorder = FakeRecorder()
    hold = Hold(recorder)  # type: ignore[arg-type]
    hold.open()
    hold.look(1)
    assert len(recorder.stumbles) == bool(where)


def test_a_process_that_plays_on_without_a_page_takes_its_steps() -> None:
    hold = Hold(Recorder())
    hold.renew()
    hold.words[COUNT] = 1  # as every optimizer step does
    assert not hold.words[ORDER]
