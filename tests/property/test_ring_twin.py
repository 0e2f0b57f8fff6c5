"""The ring against a twin that keeps everything in lists: the same records, ends, losses, in the same order."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.events import Flag
from keepstep.ring import Operation, RingReader, RingWriter, create

RECORDS = 64
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(1, 40)),
        st.tuples(st.just("wait"), st.integers(0, 200)),
        st.tuples(st.just("end"), st.integers(0, 200)),
        st.tuples(st.just("fail"), st.integers(0, 200)),
        st.tuples(st.just("poll"), st.integers(0, 1)),
    ),
    max_size=40,
)


@dataclass
class Twin:
    """What each reader should have seen."""

    position: list[int] = field(default_factory=lambda: [0, 0])
    pending: list[list[int]] = field(default_factory=lambda: [[], []])
    state: list[str] = field(default_factory=list)  # of every ticket: "", "wait", "end", "wait end", ...

    def oldest(self) -> int:
        return max(0, len(self.state) - RECORDS)

    def poll(self, reader: int) -> tuple[list[int], list[int], int, int]:
        oldest, now = self.oldest(), len(self.state)
        lost = max(0, oldest - self.position[reader])
        started = list(range(max(oldest, self.position[reader]), now))
        known = self.pending[reader]
        alive = [t for t in known if t >= oldest]
        finished = [t for t in alive + started if "end" in self.state[t]]
        self.pending[reader] = [t for t in alive + started if "end" not in self.state[t]]
        self.position[reader] = now
        return started, finished, lost, len(known) - len(alive)


@given(ACTIONS)
@settings(max_examples=many(150), deadline=None)
def test_ring_and_twin_agree(actions: list[tuple[str, int]]) -> None:
    fd = create(RECORDS)
    try:
        writer = RingWriter(fd, rank=0, world_size=1)
        readers = [RingReader(fd), RingReader(fd)]
        twin, operations, late = Twin(), list[Operation](), 0
        for action, number in [*actions, ("poll", 0), ("poll", 1)]:
            if action == "start":
                for _ in range(number):
                    operations.append(writer.start(1, 1, 0, -1, len(operations) * 7, 0, 0))
                    twin.state.append("")
            elif action == "poll":
                batch = readers[number].poll()
                started, finished, lost, unfinished = twin.poll(number)
                assert batch.started["ticket"].tolist() == started
                assert batch.finished["ticket"].tolist() == finished
                assert (batch.lost, batch.unfinished) == (lost, unfinished)
                assert (batch.started["bytes"] == batch.started["ticket"] * 7).all()
                assert (batch.finished["end_ns"] >= batch.finished["start_ns"]).all()
            elif operations:
                ticket = number % len(operations)
                {
                    "wait": operations[ticket].waiting,
                    "end": operations[ticket],
                    "fail": operations[ticket].fail,
                }[action]()
                gone = ticket < twin.oldest()
                if action != "wait" and "end" not in twin.state[ticket]:
                    late += gone
                    twin.state[ticket] += "end failed" if action == "fail" else "end"
                elif action == "wait" and not gone:
                    twin.state[ticket] += "wait"
        rows = readers[0].snapshot()
        assert rows["ticket"].tolist() == list(range(twin.oldest(), len(twin.state)))
        for row in rows:
            state = twin.state[int(row["ticket"])]
            assert (row["end_ns"] != 0) == ("end" in state)
            assert (row["wait_ns"] != 0) == ("wait" in state)
            assert (row["flags"] == Flag.FAILED) == ("failed" in state)
        assert readers[0].header.late == late
        assert sum(readers[0].streams()["completed"].tolist()) == sum("end" in s for s in twin.state)
    finally:
        os.close(fd)
