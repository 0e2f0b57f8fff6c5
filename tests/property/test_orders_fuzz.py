"""Whatever stands on a page: its agent passes on what is sound or nothing, and its worker is not held by it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.agent.services.orders import Holding, Microbatches, RankPages
from keepstep.core.validation import RankTests
from keepstep.ring import orders
from keepstep.ring.orders import PAGE_BYTES, OrdersPage, Word
from keepstep.wire import Held, Hold, Measured, RunTests, Splits, encode

WORDS = st.integers(0, (1 << 64) - 1)
JSON = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)


@contextmanager
def page() -> Iterator[tuple[int, OrdersPage]]:
    descriptor = orders.create()
    opened = OrdersPage(descriptor)
    try:
        yield descriptor, opened
    finally:
        opened.close()
        os.close(descriptor)


@given(
    st.lists(st.tuples(st.integers(8, PAGE_BYTES - 64), st.binary(min_size=1, max_size=64)), max_size=12),
    WORDS,
)
@settings(max_examples=many(150), deadline=None)
def test_an_agent_survives_any_page(writes: list[tuple[int, bytes]], state: int) -> None:
    with page() as (descriptor, worker):
        pages = RankPages({4: f"/proc/{os.getpid()}/fd/{descriptor}"})
        holding = Holding(pages, 0, lambda rank, step: step + 1)
        said = holding.receive(Hold(7, 9, 2.0)) + holding.receive(RunTests(7, 8, (RankTests(4, (), {}),)))
        worker.report.put(8, {"rank": 4, "devices": [], "links": [], "missing": []})
        worker.words[Word.ACK], worker.words[Word.STATE] = 7, state
        for place, content in writes:
            os.pwrite(descriptor, content, place)
        said += holding.poll() + holding.receive(Hold(7, 9, 2.0))
        holding.release()
        pages.close()
    for message in said:
        assert isinstance(message, Held | Measured)
        if isinstance(message, Measured):
            assert message.figures.rank == 4


@given(
    st.lists(
        st.tuples(st.integers(245_760, PAGE_BYTES - 64), st.binary(min_size=1, max_size=64)), max_size=6
    ),
    st.dictionaries(st.sampled_from(["count", "replica", "share", "incarnation", "x"]), JSON, max_size=4),
    WORDS,
)
@settings(max_examples=many(150), deadline=None)
def test_an_agent_tells_a_split_or_none(
    writes: list[tuple[int, bytes]], changed: dict[str, object], number: int
) -> None:
    with page() as (descriptor, worker):
        pages = RankPages({4: f"/proc/{os.getpid()}/fd/{descriptor}"})
        microbatches = Microbatches(pages, 0)
        body: dict[str, object] = {
            "incarnation": 0,
            "count": 8,
            "replica": 1,
            "replicas": 2,
            "share": 4,
            "step": 3,
        }
        worker.split.add(body | changed)
        for place, content in writes:
            os.pwrite(descriptor, content, place)
        told = [microbatches.look()]
        worker.words[Word.SPLIT] = number
        told.append(microbatches.look())
        pages.close()
    for message in told:
        assert message is None or isinstance(message, Splits)
        assert message is None or len(encode(message)) < 200


@given(st.binary(max_size=400), WORDS, WORDS)
@settings(max_examples=many(150), deadline=None)
def test_a_worker_reads_tests_or_none(content: bytes, order: int, lease_ns: int) -> None:
    with page() as (descriptor, worker):
        worker.words[Word.TESTS] = 5
        os.pwrite(descriptor, len(content).to_bytes(8, "little") + content, 4096)
        found = worker.tests.newest()
        assert found is None or isinstance(found[1], dict)
        worker.words[Word.ORDER], worker.words[Word.LEASE_NS] = order, lease_ns
        now_ns = time.monotonic_ns()
        if worker.leased(now_ns):
            assert 0 < lease_ns - now_ns <= orders.MOST_LEASE_S * 1e9
