"""Whatever bytes come to the service, it answers in bounds and goes on; what a source says is bounded, too."""

from __future__ import annotations

from typing import NoReturn

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.incoming import Room
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.restore.restore_service import (
    MOST_MESSAGE_BYTES,
    Bring,
    Offers,
    RestoreService,
    _answers,
)
from keepstep.core.errors import CheckpointError


class Source:
    """Has what it is told to have, and gives nothing."""

    def __init__(self, where: str, keys: frozenset[Key], error: Exception) -> None:
        self.where, self._keys, self._error = where, keys, error

    def keys(self, rank: int) -> frozenset[Key]:
        return self._keys

    def bring(self, key: Key, rank: int, room: Room) -> str:
        raise self._error


class NoMemory(CachedStates):
    """A cache without any room."""

    def __init__(self) -> None:
        super().__init__("", ())

    def held(self, owner: int) -> frozenset[Key]:
        return frozenset()

    def filling(self, *_: object) -> NoReturn:
        raise CheckpointError("no memory")


keys = st.frozensets(st.builds(Key, st.integers(0, (1 << 15) - 1), st.integers(0, 1 << 40)), max_size=40)
errors = st.text().flatmap(
    lambda text: st.sampled_from([CheckpointError(text), OSError(5, text), ValueError(text)])
)
services = st.lists(st.builds(Source, st.text(max_size=2000), keys, errors), max_size=8).map(
    lambda sources: RestoreService([0, 3], sources, NoMemory())
)


@given(services, st.binary(max_size=300))
def test_bytes_are_answered(service: RestoreService, data: bytes) -> None:
    assert _answers.decode(service.answer(data))


@given(
    services,
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
)
def test_any_json_is_answered(service: RestoreService, value: object) -> None:
    assert _answers.decode(service.answer(msgspec.json.encode(value)))


@given(services, st.integers(-5, 5), st.integers(0, 1 << 63), st.integers(-1, 10))
def test_requests_are_answered_in_bounds(service: RestoreService, rank: int, key: int, slots: int) -> None:
    for request in (Offers(rank), Bring(rank, key, slots)):
        data = service.answer(msgspec.json.encode(request))
        assert len(data) < MOST_MESSAGE_BYTES
        _answers.decode(data)
