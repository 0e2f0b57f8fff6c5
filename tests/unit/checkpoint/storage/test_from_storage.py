"""States brought from storage into the cache: whole and verified or not at all, and what ranks share is read once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from tests.unit.checkpoint.conftest import Served
from tests.unit.checkpoint.stored_states import same, sample_state, taken
from torch.distributed import HashStore

from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.restore.restore_service import Brought, RestoreService
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.checkpoint.storage.backend import LocalStorage, Readable
from keepstep.checkpoint.storage.manifest import data_file, folder_name, header_file
from keepstep.checkpoint.storage.persist import conclude, write_shard
from keepstep.checkpoint.storage.source import MOST_OFFERED, StorageSource
from keepstep.core.errors import CheckpointError


def store(where: Path, key: Key, states: list[Any], *, leader: bool = True) -> None:
    storage = LocalStorage(where)
    for rank, state in enumerate(states):
        header, data = taken(state, key.step, rank, len(states), key.incarnation)
        write_shard(storage, header, memoryview(data))
    if leader:
        conclude(storage, key, range(len(states)), len(states), leader=True)


@pytest.fixture
def states(served: Served) -> Iterator[CachedStates]:
    one = CachedStates(served.address, [0, 1])
    yield one
    one.close()


def bring(source: StorageSource, states: CachedStates, key: Key, rank: int, slots: int = 2) -> None:
    source.bring(key, rank, partial(states.filling, rank, slots))


def loaded(served: Served, rank: int, world_size: int = 2) -> dict[str, Any]:
    """What stands in a rank's cache."""
    found = {name: None for name in sample_state() if name != "rng"}
    worker = Worker(rank=rank, world_size=world_size, local_world_size=world_size)
    with closing(Snapshots(served.address, worker, lambda row: [row] * world_size)) as snapshots:
        assert snapshots.load(found) is not None
    return found


def test_every_bit_comes_back(served: Served, states: CachedStates, tmp_path: Path) -> None:
    store(tmp_path, Key(2, 7), [sample_state(1), sample_state(2)])
    source = StorageSource(LocalStorage(tmp_path), 2)
    assert source.keys(1) == {Key(2, 7)}
    for rank in range(2):
        bring(source, states, Key(2, 7), rank)
        assert states.held(rank) == {Key(2, 7)}
        assert same(loaded(served, rank), sample_state(rank + 1))


def test_slots_that_hold_something_are_left_alone(
    served: Served, states: CachedStates, tmp_path: Path
) -> None:
    worker = Worker(rank=0, world_size=2, local_world_size=2)
    shared = HashStore()
    with closing(Snapshots(served.address, worker, lambda row: [row] * 2, store=lambda: shared)) as snapshots:
        for step in (1, 2):
            snapshots.save({"w": torch.ones(10)}, step)
    store(tmp_path, Key(0, 5), [sample_state(1), sample_state(2)])
    bring(StorageSource(LocalStorage(tmp_path), 2), states, Key(0, 5), 0)
    assert states.held(0) == {Key(0, 1), Key(0, 2), Key(0, 5)}
    assert len(served.cache.slots(0)) == 3


@pytest.mark.parametrize("name", [data_file(1), header_file(1)])
def test_a_flipped_bit_is_found_and_nothing_is_sealed(
    states: CachedStates, tmp_path: Path, name: str
) -> None:
    store(tmp_path, Key(0, 7), [sample_state(1), sample_state(2)])
    path = tmp_path / folder_name(Key(0, 7)) / name
    data = bytearray(path.read_bytes())
    data[-40] ^= 8
    path.write_bytes(data)
    source = StorageSource(LocalStorage(tmp_path), 2)
    with pytest.raises(CheckpointError, match=name):
        bring(source, states, Key(0, 7), 1)
    assert states.held(1) == frozenset()
    bring(source, states, Key(0, 7), 0)
    assert states.held(0) == {Key(0, 7)}


class Flaky(LocalStorage):
    """Of three reads one fails and one gives a wrong byte, as long as there are any ``faults``."""

    def __init__(self, root: Path, faults: int) -> None:
        super().__init__(root)
        self.faults, self.count = faults, 0

    def open(self, folder: str, name: str) -> Readable:
        file, flaky = super().open(folder, name), self

        class File:
            seek, close = file.seek, file.close

            def readinto(self, target: memoryview) -> int:
                count = file.readinto(target)
                flaky.count += 1
                if flaky.count % 3 and flaky.count < flaky.faults:
                    if flaky.count % 3 == 1:
                        raise OSError(5, "Input/output error")
                    target[flaky.count % max(count, 1)] ^= 1
                return count

        return File()


def test_what_fails_for_a_while_is_read_again(served: Served, states: CachedStates, tmp_path: Path) -> None:
    for step in (6, 7):
        store(tmp_path, Key(0, step), [sample_state(1), sample_state(2)])
    source = StorageSource(Flaky(tmp_path, 12), 2)
    assert source.keys(0) == {Key(0, 6), Key(0, 7)}
    source = StorageSource(Flaky(tmp_path, 16), 2)
    bring(source, states, Key(0, 7), 1)
    assert same(loaded(served, 1), sample_state(2))


def test_what_cannot_be_read_is_given_up_in_the_end(states: CachedStates, tmp_path: Path) -> None:
    store(tmp_path, Key(0, 7), [sample_state(1)])
    source = StorageSource(Stale(tmp_path), 1, patience_s=0.3)
    with pytest.raises(CheckpointError, match="cannot be read: Stale file handle"):
        bring(source, states, Key(0, 7), 0)


def test_what_is_not_whole_or_of_another_size_is_not_offered(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    store(tmp_path, Key(0, 1), [state, state])
    store(tmp_path, Key(0, 2), [state])
    store(tmp_path, Key(1, 3), [state, state])
    (tmp_path / folder_name(Key(1, 3)) / data_file(0)).unlink()
    store(tmp_path, Key(4, 4), [state, state], leader=False)
    keys, refused, incarnation = StorageSource(LocalStorage(tmp_path), 2).look(0)
    assert keys == {Key(0, 1)}
    assert incarnation == 4  # of a step that was never finished, too: its name is taken
    assert [line.split(":")[0] for line in refused] == [
        f"{folder_name(Key(1, 3))}/{data_file(0)}",
        f"{folder_name(Key(0, 2))} is of 1 ranks, this job has 2",
    ]
    assert "torch.distributed.checkpoint.load" in refused[1]


def test_only_the_newest_are_offered(tmp_path: Path) -> None:
    for step in range(MOST_OFFERED + 3):
        store(tmp_path, Key(0, step), [{"step": step}])
    keys, _, _ = StorageSource(LocalStorage(tmp_path), 1).look(0)
    assert sorted(keys) == [Key(0, step) for step in range(3, MOST_OFFERED + 3)]


def test_a_storage_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be listed: Not a directory"):
        StorageSource(LocalStorage(tmp_path / "file"), 1).keys(0)


class Stale(LocalStorage):
    """Fails when a manifest is read."""

    def open(self, folder: str, name: str) -> Readable:
        raise OSError(116, "Stale file handle")


def test_a_step_that_cannot_be_read_now_is_not_one_that_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        store(tmp_path, Key(0, step), [{"step": step}])
    with pytest.raises(CheckpointError, match="cannot be listed: Stale file handle"):
        StorageSource(Stale(tmp_path), 1, patience_s=0.3).keys(0)


def test_a_rank_that_asks_again_is_offered_what_has_come_since(tmp_path: Path) -> None:
    source = StorageSource(LocalStorage(tmp_path), 2)
    state = {"w": torch.ones(3)}
    for step in range(3):
        store(tmp_path, Key(0, step), [state, state])
        newest = [max(source.keys(rank)) for rank in (0, 1)]
        assert newest == [Key(0, step)] * 2
    store(tmp_path, Key(0, 3), [state, state])
    assert source.keys(0) == source.keys(1)


def test_a_name_that_no_step_can_have_is_passed_over(tmp_path: Path) -> None:
    store(tmp_path, Key(0, 1), [{"step": 1}])
    (tmp_path / "step-0000000009-i99999").mkdir()
    assert StorageSource(LocalStorage(tmp_path), 1).look(0) == (frozenset({Key(0, 1)}), (), 0)


class Counting(LocalStorage):
    """Counts the bytes that are read of safetensors files; the readers begin together."""

    def __init__(self, root: Path, together: int) -> None:
        super().__init__(root)
        self.read_bytes = 0
        self._barrier = threading.Barrier(together, timeout=30)
        self._guard = threading.Lock()

    def open(self, folder: str, name: str) -> Readable:
        file = super().open(folder, name)
        if not name.endswith(".safetensors"):
            return file
        self._barrier.wait()
        real, counting = file.readinto, self

        class Counted:
            seek, close = file.seek, file.close

            def readinto(self, target: memoryview) -> int:
                count = real(target)
                with counting._guard:
                    counting.read_bytes += count
                return count

        return Counted()


def test_what_two_ranks_share_is_read_once(served: Served, states: CachedStates, tmp_path: Path) -> None:
    model = torch.randn(1000, 100)
    store(tmp_path, Key(0, 7), [{"model": model, "own": torch.full((5,), float(rank))} for rank in range(2)])
    storage = Counting(tmp_path, 2)
    source = StorageSource(storage, 2)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(bring, source, states, Key(0, 7), rank) for rank in range(2)]:
            done.result()
    assert storage.read_bytes == model.nbytes + 2 * 5 * 4
    for rank in range(2):
        with states.source(Key(0, 7), rank) as (header, data):
            assert len(header.storages) == 2
            assert model.numpy().tobytes() in bytes(data)
        assert states.held(rank) == {Key(0, 7)}


class FirstReads(LocalStorage):
    """Rank 1 comes when rank 0 has begun to read, which goes on when rank 1 reads what is its own."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._begun, self._joined = threading.Event(), threading.Event()

    def open(self, folder: str, name: str) -> Readable:
        if name == header_file(1):
            assert self._begun.wait(30)
        elif name == data_file(1):
            self._joined.set()
        elif name == data_file(0):
            self._begun.set()
            assert self._joined.wait(30)
        return super().open(folder, name)


def test_when_the_rank_that_reads_fails_the_other_reads_its_own(
    served: Served, states: CachedStates, tmp_path: Path
) -> None:
    model = torch.randn(1000, 100)
    store(tmp_path, Key(0, 7), [{"model": model, "rank": torch.full((9,), float(rank))} for rank in range(2)])
    path = tmp_path / folder_name(Key(0, 7)) / data_file(0)
    data = bytearray(path.read_bytes())
    data[data.index(model.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    source = StorageSource(FirstReads(tmp_path), 2)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(bring, source, states, Key(0, 7), rank) for rank in range(2))
        assert "not those that were written" in str(first.exception())
        assert second.exception() is None
    assert (states.held(0), states.held(1)) == (frozenset(), {Key(0, 7)})


class Hanging(LocalStorage):
    """Hangs when told to, listing or in the middle of a read, until it is let go."""

    def __init__(self, root: Path, *, listing: bool = False, reads: int = 1 << 30) -> None:
        super().__init__(root)
        self.listing, self.reads_left = listing, reads
        self.let_go, self.hung = threading.Event(), threading.Event()
        self.woke = threading.Event()

    def folders(self) -> list[str]:
        if self.listing:
            self.wait()
        return super().folders()

    def open(self, folder: str, name: str) -> Readable:
        file: Any = super().open(folder, name)
        if not name.endswith(".safetensors"):
            return cast("Readable", file)
        storage = self

        class File:
            def readinto(self, target: memoryview) -> int:
                storage.reads_left -= 1
                if storage.reads_left >= 0:
                    return cast("int", file.readinto(target))
                storage.wait()
                target[:] = b"\xff" * len(target)
                storage.woke.set()
                return len(target)

            def seek(self, offset: int) -> object:
                return file.seek(offset)

            def close(self) -> None:
                file.close()

        return File()

    def wait(self) -> None:
        self.hung.set()
        assert self.let_go.wait(60)


def test_a_storage_that_hangs_is_named_and_the_next_source_serves(
    served: Served, states: CachedStates, tmp_path: Path
) -> None:
    store(tmp_path, Key(0, 7), [sample_state(1), sample_state(2)])
    hangs = Hanging(tmp_path, reads=1)
    sources = [StorageSource(hangs, 2, patience_s=0.3), StorageSource(LocalStorage(tmp_path), 2)]
    service = RestoreService([0, 1], sources, states)
    request = {"type": "Bring", "rank": 0, "key": Key(0, 7).pack(), "slots": 2}
    answer = msgspec.json.decode(service.answer(msgspec.json.encode(request)), type=Brought)
    assert hangs.hung.is_set()
    assert answer.where == f"storage {tmp_path}"
    assert len(answer.passed) == 1
    assert f"storage {tmp_path}: " in answer.passed[0]
    assert "hangs: no answer within 0.3 s" in answer.passed[0]
    hangs.let_go.set()  # what comes so late reaches no slot
    assert hangs.woke.wait(60)
    assert same(loaded(served, 0), sample_state(1))


def test_a_storage_that_hangs_when_listed_is_out_of_reach_for_all_ranks(tmp_path: Path) -> None:
    store(tmp_path, Key(0, 7), [{"w": torch.ones(3)}])
    hangs = Hanging(tmp_path, listing=True)
    source = StorageSource(hangs, 1, patience_s=0.1)
    for rank in range(2):
        with pytest.raises(CheckpointError, match=f"storage {tmp_path}: cannot be listed: hangs: no answer"):
            source.keys(rank)
    hangs.let_go.set()
