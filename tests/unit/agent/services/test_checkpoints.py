"""The agent brings to storage what workers want there, through full disks and its own death, and lets go of it then."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from tests.unit.checkpoint.conftest import Served, serving
from tests.warm.forked import WarmPopen

from keepstep.agent.services import checkpoints as module
from keepstep.agent.services.checkpoints import FILE, Checkpoints, Place
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.restore.restore_service import RestoreClient, restore_address
from keepstep.checkpoint.storage.backend import Bytes, LocalStorage
from keepstep.checkpoint.storage.read import scan
from keepstep.core.errors import KeepstepError

WORKER = """
    import sys, torch
    from keepstep.checkpoint.storage.cadence import Storing
    from keepstep.checkpoint.snapshot import Snapshots, Worker
    where, every = sys.argv[2:]
    snapshots = Snapshots(sys.argv[1], Worker(), lambda row: [row], storing=Storing(where, int(every)))
    state = {"w": torch.zeros(1000), "step": 0}
    for line in sys.stdin:
        word, step = line.split()
        if word == "load":
            print(snapshots.load(state), flush=True)
            continue
        state["w"].fill_(float(step))
        state["step"] = int(step)
        snapshots.save(state, int(step), overlap=False, persist=True if word == "persist" else None)
        print(sorted(key.step for key in snapshots._cache.wanted()), flush=True)
"""


class Worker:
    """A rank in a process of its own."""

    def __init__(self, address: str, where: Path, every: int) -> None:
        self.process = WarmPopen(
            [sys.executable, "-c", textwrap.dedent(WORKER), address, str(where), str(every)],
            stdin=PIPE,
            stdout=PIPE,
            text=True,
        )

    def do(self, word: str, step: int = 0) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{word} {step}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


class Disk(LocalStorage):
    full = False

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        if Disk.full:
            raise OSError(28, "No space left on device")
        return super().write(folder, name, chunks)


class Node:
    """An agent without its threads, and a worker."""

    def __init__(self, cache: Served, folder: Path, every: int, keep: int = 0) -> None:
        self.storage = folder / "ckpt"
        (folder / "node").mkdir(exist_ok=True)
        self.place = Place(cache.address, (0,), 0, 1, folder / "node", str(self.storage), keep)
        self.agents = [Checkpoints(self.place)]
        self.agents[0]._service.start()
        self.worker = Worker(cache.address, self.storage, every)

    def work(self) -> None:
        """Until nothing more can be done now."""
        agent = self.agents[-1]
        assert agent._persister
        for _ in range(10):
            agent.look()
            while agent._persister.work():
                pass
        agent._tell_s = 0.0
        agent.look()

    def agent_dies(self) -> None:
        self.agents[-1]._service.stop()
        self.agents[-1].states.close()
        self.agents.append(Checkpoints(self.place))
        self.agents[-1]._service.start()

    def stored(self) -> list[Key]:
        return sorted(step.key for step in scan(LocalStorage(self.storage)) if step.whole)

    def close(self) -> None:
        self.worker.process.communicate()
        self.agents[-1].stop()
        self.agents[-1].states.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


@pytest.fixture
def make(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Node]]:
    nodes: list[Node] = []
    monkeypatch.setattr(module, "open_storage", lambda where: Disk(Path(where)))
    monkeypatch.setattr(Disk, "full", False)

    def one(every: int, keep: int = 0) -> Node:
        nodes.append(Node(served, tmp_path, every, keep))
        return nodes[-1]

    yield one  # type: ignore[misc]
    for node in nodes:
        node.close()


def test_steps_that_are_due_get_to_storage_and_their_slots_are_let_go(make) -> None:
    node = make(every=3)
    said = [node.worker.do("save", step) for step in (1, 2, 3, 4, 5)]
    assert said == ["[]", "[]", "[3]", "[3]", "[3]"]
    node.work()
    assert node.stored() == [Key(0, 3)]
    assert node.worker.do("save", 6) == "[6]"
    assert node.worker.do("save", 7) == "[6]"
    node.work()
    assert node.stored() == [Key(0, 3), Key(0, 6)]
    told = json.loads((node.place.folder / FILE).read_text())
    assert (told["newest"], told["on_the_way"], told["troubles"]) == (6, [], [])


def test_training_goes_on_with_a_full_disk_and_nothing_wanted_is_lost(make) -> None:
    node = make(every=2)
    Disk.full = True
    said = [node.worker.do("save", step) for step in range(1, 10)]
    assert said == ["[]", *["[2]"] * 8]  # 4 to 9 were due and wait for 2
    node.work()
    told = json.loads((node.place.folder / FILE).read_text())
    assert told["on_the_way"] == [2]
    assert "No space left on device" in told["troubles"][0]
    Disk.full = False
    node.agent_dies()
    node.work()
    assert node.stored() == [Key(0, 2)]
    assert node.worker.do("save", 10) == "[10]"
    node.work()
    assert node.stored() == [Key(0, 2), Key(0, 10)]


def test_a_cache_that_cannot_be_looked_at_is_told(make, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make(every=2)
    node.worker.do("save", 1)
    node.worker.do("save", 2)
    node.agents[-1].look()

    def fails() -> None:
        node.agents[-1]._stopped.set()
        raise KeepstepError("too many open files")

    monkeypatch.setattr(node.agents[-1].states, "wished", fails)
    node.agents[-1]._tell_s = 0.0
    node.agents[-1]._run()
    told = json.loads((node.place.folder / FILE).read_text())
    assert (told["on_the_way"], told["troubles"]) == ([2], ["too many open files"])


def test_a_damaged_snapshot_is_given_up_and_later_ones_go_on(make, served: Served) -> None:
    node = make(every=2)
    node.worker.do("save", 1)
    node.worker.do("save", 2)
    os.pwrite(served.cache.slots(0)[1], b"damaged", 4096 + 100)
    node.work()
    assert node.stored() == []
    assert node.worker.do("save", 3) == "[]"
    assert node.worker.do("save", 4) == "[4]"
    node.work()
    assert node.stored() == [Key(0, 4)]


def test_old_steps_are_removed_once_newer_ones_are_whole(make) -> None:
    node = make(every=1, keep=2)
    for step in range(1, 6):
        node.worker.do("save", step)
        Disk.full = step == 5
        node.work()
    assert node.stored() == [Key(0, 3), Key(0, 4)]
    Disk.full = False
    node.agent_dies()
    node.work()
    assert node.stored() == [Key(0, 4), Key(0, 5)]


def test_a_new_job_goes_on_from_storage_and_counts_on(make, served: Served) -> None:
    node = make(every=2)
    for step in (1, 2, 3):
        node.worker.do("save", step)
    node.work()
    node.worker.process.communicate()
    for slot in served.cache._slots.pop(0):  # the cache goes with the launcher
        os.close(slot)
    os.pwrite(served.cache.board, bytes(64), 0)
    node.agent_dies()
    node.worker = Worker(served.address, node.storage, 2)
    assert node.worker.do("load") == "2"
    assert len(served.cache.slots(0)) == 3
    assert node.worker.do("save", 3) == "[]"
    assert node.worker.do("save", 4) == "[4]"
    node.work()
    assert node.stored() == [Key(0, 2), Key(1, 4)]


def test_without_storage_it_is_said_that_there_is_nothing(served: Served, tmp_path: Path) -> None:
    agent = Checkpoints(Place(served.address, (0,), 0, 1, tmp_path))
    agent.start()
    offered = RestoreClient(restore_address(served.address)).offers(0)
    assert (offered.sources, offered.incarnation) == ((), -1)
    agent.stop()


def test_a_storage_that_nothing_reaches_is_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(KeepstepError, match="nowhere"):
        Checkpoints(Place(served.address, (0,), 0, 1, tmp_path, "nowhere://bucket"))
