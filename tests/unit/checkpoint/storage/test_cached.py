"""From the node's cache to storage: what is wanted stays in the cache until it is there, however long that takes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from tests.manual_clock import ManualClock
from tests.unit.checkpoint.conftest import Served
from tests.unit.checkpoint.stored_states import newest, rebuilt
from tests.warm.forked import WarmPopen

from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.backend import Bytes, LocalStorage
from keepstep.checkpoint.storage.persist import Persister
from keepstep.checkpoint.storage.persist_plan import PersistPlan
from keepstep.core.errors import CheckpointError

WORKER = """
    import sys, torch
    from keepstep.checkpoint.snapshot import Snapshots, Worker
    snapshots = Snapshots(sys.argv[1], Worker(), lambda row: [row], slots=3)
    for line in sys.stdin:
        step = int(line)
        snapshots.save({"w": torch.full((100,), float(step)), "step": step}, step, overlap=False)
        snapshots.wait()
        print(step, flush=True)
"""


class Worker:
    """A rank in a process of its own, that saves when told."""

    def __init__(self, address: str) -> None:
        self.process = WarmPopen(
            [sys.executable, "-c", textwrap.dedent(WORKER), address],
            stdin=PIPE,
            stdout=PIPE,
            text=True,
        )

    def save(self, *steps: int) -> None:
        assert self.process.stdin
        assert self.process.stdout
        for step in steps:
            self.process.stdin.write(f"{step}\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == f"{step}\n"


@pytest.fixture
def worker(served: Served) -> Iterator[Worker]:
    one = Worker(served.address)
    yield one
    one.process.communicate()


class FullStorage(LocalStorage):
    full = True

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(folder, name, chunks)


def test_a_wanted_step_outlasts_later_saves_until_it_is_on_storage(
    served: Served, worker: Worker, tmp_path: Path
) -> None:
    worker.save(1, 2)
    storage, clock = FullStorage(tmp_path), ManualClock()
    states = CachedStates(served.address, [0])
    persister = Persister(PersistPlan([0], leader=True), storage, states.source, world_size=1, clock=clock)
    try:
        persister.want([Key(0, 2)])
        states.pin(persister.follow(states.sealed()))
        assert persister.follow(states.sealed()) == {Key(0, 2)}
        assert persister.work()
        worker.save(3, 4, 5, 6, 7)
        states.pin(persister.follow(states.sealed()))
        assert Key(0, 2) in states.held(0)
        assert "No space left on device" in persister.troubles()[0]
        storage.full = False
        clock.advance(10)
        while persister.work():
            pass
        assert persister.whole == {Key(0, 2)}
        found, refused = newest(storage, 0, world_size=1)
        assert found
        assert refused == []
        state = rebuilt(found.header, found.data)
        assert (state["step"], state["w"].unique().tolist()) == (2, [2.0])
        states.pin(persister.follow(states.sealed()))
        worker.save(8, 9, 10)
        assert Key(0, 2) not in states.held(0)
        with (
            pytest.raises(
                CheckpointError, match=r"step 2 .incarnation 0. of rank 0 is not in the cache any more"
            ),
            states.source(Key(0, 2), 0),
        ):
            pass
        states.pin(persister.follow(states.sealed()))
        assert persister.troubles() == []
    finally:
        states.close()
