"""Storages that fail, cut short and flip bits: nothing wrong is restored, nothing that was promised is lost."""

from __future__ import annotations

import errno
import io
import random
from collections.abc import Iterable
from typing import Any, cast

import pytest
from tests.manual_clock import ManualClock
from tests.unit.checkpoint.stored_states import Cache, newest, rebuilt, same, sample_state

from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.backend import Bytes, Readable
from keepstep.checkpoint.storage.persist import Persister
from keepstep.checkpoint.storage.persist_plan import Backoff, PersistPlan
from keepstep.checkpoint.storage.read import scan, verify
from keepstep.core.errors import CheckpointError

SEEDS = 150
RANKS = 2


class FaultyStorage:
    """Files in memory behind a device that fails: at each call an error, or bytes lost or flipped on their way."""

    where = "faulty"

    def __init__(self, chance: random.Random) -> None:
        self._files: dict[str, dict[str, bytes]] = {}
        self._chance = chance
        self.rate = 0.25
        self.reads_lie = False
        self.faults = 0

    def _strikes(self, share: float = 1.0) -> bool:
        if self._chance.random() >= self.rate * share:
            return False
        self.faults += 1
        return True

    def _may_fail(self) -> None:
        if self._strikes(0.5):
            raise OSError(
                self._chance.choice([errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EDQUOT]), "injected"
            )

    def folders(self) -> list[str]:
        self._may_fail()
        return sorted(self._files)

    def files(self, folder: str) -> dict[str, int]:
        self._may_fail()
        return {name: len(content) for name, content in self._files.get(folder, {}).items()}

    def open(self, folder: str, name: str) -> Readable:
        self._may_fail()
        try:
            content = self._files[folder][name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "is not there", name) from None
        file = cast("Readable", io.BytesIO(content))
        return _LyingFile(file, self._chance) if self.reads_lie and self._strikes() else file

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        self._may_fail()
        content = bytearray(b"".join(chunks))
        size = len(content)
        if self._strikes(0.4):
            del content[self._chance.randrange(len(content)) :]  # and nobody says so
        elif self._strikes(0.4):
            content[self._chance.randrange(len(content))] ^= 1 << self._chance.randrange(8)
        self._files.setdefault(folder, {})[name] = bytes(content)
        self._may_fail()
        return size

    def remove(self, folder: str, names: Iterable[str]) -> None:
        for name in names:
            self._may_fail()
            self._files.get(folder, {}).pop(name, None)

    def remove_folder(self, folder: str) -> None:
        self._files.pop(folder, None)


class _LyingFile:
    def __init__(self, file: Readable, chance: random.Random) -> None:
        self._file, self._chance = file, chance

    def readinto(self, target: memoryview) -> int:
        count = self._file.readinto(target)
        self._spoil(target[:count])
        return count

    def seek(self, offset: int) -> object:
        return self._file.seek(offset)

    def _spoil(self, found: memoryview) -> None:
        if len(found) and self._chance.random() < 0.3:
            found[self._chance.randrange(len(found))] ^= 1 << self._chance.randrange(8)

    def close(self) -> None:
        self._file.close()


def state_of(key: Key, rank: int) -> dict[str, Any]:
    return sample_state(1000 * key.incarnation + 10 * key.step + rank)


def assert_restores_nothing_wrong(storage: FaultyStorage, promised: set[Key]) -> None:
    for rank in range(RANKS):
        try:
            found, refused = newest(storage, rank, world_size=RANKS)
        except CheckpointError:
            continue
        assert all("\n" not in line for line in refused)
        if found:
            key = Key(found.header.incarnation, found.header.step)
            assert same(rebuilt(found.header, found.data), state_of(key, rank))
            assert storage.rate or not promised or key >= max(promised), refused
        else:
            assert storage.rate or not promised


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_wrong_is_restored_and_nothing_promised_is_lost(seed: int) -> None:
    chance = random.Random(seed)
    storage, clock, cache = FaultyStorage(chance), ManualClock(), Cache()

    def node(rank: int) -> Persister:
        plan = PersistPlan([rank], leader=rank == 0, backoff=Backoff(1.0, 8.0), seed=seed)
        return Persister(plan, storage, cache.source, world_size=RANKS, clock=clock)

    nodes = [node(rank) for rank in range(RANKS)]
    keys = [Key(0, 5), Key(0, 10), Key(1, 8)]
    promised: set[Key] = set()
    declared: list[Key] = []
    for turn in range(400):
        if turn in (0, 20, 40):
            key = keys[turn // 20]
            declared.append(key)
            for rank in range(RANKS):
                cache.seal(key, rank, RANKS, state_of(key, rank))
                nodes[rank].follow([(one, rank) for one in declared])
                nodes[rank].want(declared)
        if chance.random() < 0.02 and turn < 350:  # an agent dies and comes back
            rank = chance.randrange(RANKS)
            nodes[rank] = node(rank)
            nodes[rank].want(declared)
            nodes[rank].follow([(one, rank) for one in declared])
        if turn == 200:
            storage.rate = 0.0
        chance.choice(nodes).work()
        clock.advance(chance.random() * 2)
        promised = set(nodes[0].whole or ())
        if turn % 40 == 0:
            storage.reads_lie = True
            assert_restores_nothing_wrong(storage, promised)
            storage.reads_lie = False
    assert storage.faults > 20
    assert promised == set(keys), [line for one in nodes for line in one.troubles()]
    assert nodes[0].follow([(key, 0) for key in keys]) == frozenset()
    assert_restores_nothing_wrong(storage, promised)
    for step in scan(storage):
        assert step.whole
        assert step.manifest
        assert list(verify(storage, step.manifest)) == []
