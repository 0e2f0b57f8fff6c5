"""Storage as a source of states: what is whole there, and a rank's state brought into a slot of the node's cache.

Ranks of a node that bring the same step at once read what they have in common once: storages of the same checksum and
size (what is replicated: a DDP model) are read by the first and copied by the others.

An older step is not gone on from because a read failed once: what cannot be read, or is read as damaged, is read again,
until it has been found damaged twice in the same way, or for as long as a call may take.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from keepstep.checkpoint import native
from keepstep.checkpoint.header import encode_header, with_checksums
from keepstep.checkpoint.memory.incoming import Room
from keepstep.checkpoint.memory.slots import Key, Record
from keepstep.checkpoint.storage.backend import Storage
from keepstep.checkpoint.storage.manifest import Manifest, folder_name, key_of, key_text
from keepstep.checkpoint.storage.patient_storage import PatientStorage
from keepstep.checkpoint.storage.read import CHUNK_BYTES, ShardReader, StoredStep, Unread, look_again
from keepstep.core.errors import CheckpointError

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_OFFERED = 16
_LISTED_S = 2.0  # the ranks of a node ask at the same moment
_PATIENCE_S = 120.0  # of an NFS server that begins anew
_LISTING_S = 30.0  # of one that fails
_FINAL = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR)  # it would fail again
_MOST_LOOKS = 8  # at a manifest that is read differently each time
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0  # before what failed is read again

Same = tuple[int, int]
"""Checksum and size of a storage."""


class StorageSource:
    """A `StateSource`. Offers the newest steps that are whole and of a job of ``world_size`` ranks.

    A storage that does not answer for ``patience_s``, or fails for so long, is out of reach.
    """

    def __init__(self, storage: Storage, world_size: int, *, patience_s: float = _PATIENCE_S) -> None:
        self._storage, self._world_size = PatientStorage(storage, patience_s), world_size
        self._patience_s = patience_s
        self._guard = threading.Lock()
        self._listed_s = -_LISTED_S
        self._keys: frozenset[Key] = frozenset()
        self._refused: tuple[str, ...] = ()
        self._trouble = ""
        self._incarnation = -1
        self._common: dict[Key, _Common] = {}

    @property
    def where(self) -> str:
        return f"storage {self._storage.where}"

    def keys(self, rank: int) -> frozenset[Key]:
        """The same for all ranks: a step is whole for all or for none. Raises CheckpointError: not to be listed."""
        return self.look()[0]

    def look(self) -> tuple[frozenset[Key], tuple[str, ...], int]:
        """What is offered, a line for each newer step that is not, and the highest incarnation of any (-1: none).

        Steps that were not written to the end are passed over without a word: nobody was promised them.

        Raises:
            CheckpointError: the storage cannot be listed.
        """
        with self._guard:
            if time.monotonic() - self._listed_s >= _LISTED_S:
                self._list()
                self._listed_s = time.monotonic()
            if self._trouble:
                raise CheckpointError(self._trouble)
            return self._keys, self._refused, self._incarnation

    def bring(self, key: Key, rank: int, room: Room) -> str:
        """See `StateSource`."""
        again = _Again(self._patience_s)
        with self._together(key) as common:
            reader = again.until(lambda: ShardReader(self._storage, self._whole(key), rank))
            header = reader.header
            text = encode_header(with_checksums(header, (0,) * len(header.storages)))
            table = array("Q", [entry.checksum for entry in header.storages]).tobytes()
            checksum = native.checksum(table, native.checksum(text))
            record = Record(
                key.step, key.incarnation, header.data_bytes, len(text), len(header.storages), checksum
            )
            with room(record) as incoming:
                body = incoming.body
                for begin, part in ((record.header_at, text), (record.table_at, table)):
                    at = begin - native.DATA_OFFSET
                    body[at : at + len(part)] = part
                with body[: header.data_bytes] as data:
                    common.fill(reader, data, again)
                incoming.seal()
        return self.where

    def _list(self) -> None:
        try:
            keys, whole, refused = _Again(min(self._patience_s, _LISTING_S)).until(self._listed)
        except CheckpointError as error:
            self._trouble = str(error)
            return
        self._trouble = ""
        self._keys, self._refused = frozenset(whole), tuple(refused)
        self._incarnation = max((key.incarnation for key in keys), default=-1)

    def _listed(self) -> tuple[list[Key], list[Key], list[str]]:
        """All steps, those that are offered, and why newer ones are not."""
        try:
            keys = sorted(filter(None, map(key_of, self._storage.folders())), reverse=True)
            return keys, *self._look_at(keys)
        except OSError as error:
            kind = CheckpointError if error.errno in _FINAL else Unread
            why = error.strerror or str(error)[:200]
            raise kind(f"{self.where}: cannot be listed: {why}") from None

    def _look_at(self, keys: Iterable[Key]) -> tuple[list[Key], list[str]]:
        """Steps that are offered, and why newer ones are not. Raises OSError: that cannot be told."""
        whole: list[Key] = []
        refused: list[str] = []
        for key in keys:
            step = self._seen(key)
            if step.manifest is None and step.unfinished:
                continue
            if step.manifest is None or step.problems:
                refused.append(step.problems[0])
            elif step.manifest.world_size != self._world_size:
                refused.append(self._resize(step.manifest))
            else:
                whole.append(key)
            if len(whole) == MOST_OFFERED or len(refused) == MOST_OFFERED:
                break
        return whole, refused

    def _seen(self, key: Key) -> StoredStep:
        """What is twice the same: it may be misread. Raises OSError: that cannot be told."""
        seen: set[tuple[str, ...]] = set()
        while True:
            step = look_again(self._storage, key)
            if step.whole or step.unfinished or step.problems in seen or len(seen) == _MOST_LOOKS:
                return step
            seen.add(step.problems)

    def _resize(self, manifest: Manifest) -> str:
        return (
            f"{folder_name(manifest.key)} is of {manifest.world_size} ranks, this job has {self._world_size}: "
            f"`keepstep checkpoint export {self._storage.where} --dcp FOLDER --step {manifest.step}` and "
            "torch.distributed.checkpoint.load reshard it; or use that many ranks, or another --checkpoint-dir"
        )

    def _whole(self, key: Key) -> Manifest:
        try:
            step = look_again(self._storage, key)
        except OSError as error:
            why = error.strerror or str(error)[:200]
            raise Unread(f"{folder_name(key)}: cannot be read: {why}") from None
        if step.manifest is None or step.problems:
            raise CheckpointError(step.problems[0] if step.problems else f"{key_text(key)} is not there")
        if step.manifest.world_size != self._world_size:
            raise CheckpointError(self._resize(step.manifest))
        return step.manifest

    @contextmanager
    def _together(self, key: Key) -> Generator[_Common]:
        with self._guard:
            common = self._common.setdefault(key, _Common())
            common.users += 1
        try:
            yield common
        finally:
            with self._guard:
                common.users -= 1
                if not common.users:
                    del self._common[key]


class _Common:
    """The storages of a step that ranks of this node are reading, by what is the same."""

    def __init__(self) -> None:
        self.users = 0
        self._guard = threading.Lock()
        self._read: dict[Same, Future[memoryview]] = {}

    def fill(self, reader: ShardReader, data: memoryview, again: _Again) -> None:
        """Bring the bytes of all storages: read, or copied from what another rank reads.

        Who waits has read all of its own before, so nobody waits in a circle. What is copied is verified with
        everything else by the seal.

        Raises:
            CheckpointError: what is on storage is not what was written.
        """
        entries = reader.header.storages
        parts = [data[entry.offset : entry.offset + entry.nbytes] for entry in entries]
        own: dict[int, Future[memoryview]] = {}
        others: dict[int, Future[memoryview]] = {}
        with self._guard:
            for index, entry in enumerate(entries):
                same = (entry.checksum, entry.nbytes)
                if same in self._read:
                    others[index] = self._read[same]
                else:
                    own[index] = self._read[same] = Future[memoryview]()
        try:
            for index in again.read(reader, {index: parts[index] for index in own}):
                own[index].set_result(parts[index])
        finally:
            for future in own.values():
                if not future.done():
                    future.set_exception(CheckpointError("the rank that read it could not"))
        left = {index: parts[index] for index, future in others.items() if not _copied(future, parts[index])}
        for _ in again.read(reader, left):
            pass


class _Again:
    """Reads again what could not be read or was read as damaged; see the module. One for each state that is brought."""

    def __init__(self, patience_s: float) -> None:
        self._until_s = time.monotonic() + patience_s
        self._pause_s = _PAUSE_S
        self._damage: set[str] = set()

    def until(self, read: Callable[[], T]) -> T:
        """What ``read`` gives in the end. Raises CheckpointError: as it did."""
        while True:
            try:
                return read()
            except CheckpointError as error:  # noqa: PERF203
                self._wait(error)

    def read(self, reader: ShardReader, into: Mapping[int, memoryview]) -> Iterator[int]:
        """As `ShardReader.read`; of what failed, only what is not there yet is read again."""
        left = dict(into)
        while left:
            try:
                for index in reader.read(dict(left)):
                    del left[index]
                    yield index
            except CheckpointError as error:  # noqa: PERF203
                self._wait(error)

    def _wait(self, error: CheckpointError) -> None:
        is_sure = not isinstance(error, Unread) and str(error) in self._damage
        if is_sure or time.monotonic() >= self._until_s:
            raise error
        self._damage.add(str(error))
        log.warning("%s; it is read again", error)
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def _copied(future: Future[memoryview], target: memoryview) -> bool:
    try:
        source = future.result()
    except CheckpointError:
        return False
    for at in range(0, len(target), CHUNK_BYTES):  # in parts: a copy keeps all other threads waiting
        target[at : at + CHUNK_BYTES] = source[at : at + CHUNK_BYTES]
    return True
