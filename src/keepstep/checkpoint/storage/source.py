"""Storage as a source of states: which steps are whole there, and how a rank's state comes into a slot of the cache.

Ranks of a node that bring the same step at the same time read what they have in common once: storages of equal checksum
and size (what is replicated: a DDP model) are read by the first rank and copied by the others.

A read that failed once is no reason to fall back to an older step: it is tried again (`read_again`).
"""

from __future__ import annotations

import errno
import threading
import time
from array import array
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

from keepstep.checkpoint import native
from keepstep.checkpoint.header import encode_header, with_checksums
from keepstep.checkpoint.memory.incoming import Room
from keepstep.checkpoint.memory.slots import Key, Record
from keepstep.checkpoint.storage.backend import Storage
from keepstep.checkpoint.storage.manifest import Manifest, folder_name
from keepstep.checkpoint.storage.read import (
    CHUNK_BYTES,
    ShardReader,
    StoredStep,
    Unread,
    look,
    stored_keys,
    why,
)
from keepstep.checkpoint.storage.rereading import PatientStorage, look_until_sure, read_again
from keepstep.core.errors import OTHER_RANKS, CheckpointError

MOST_OFFERED = 16
_LISTED_S = 2.0  # age of a listing that serves other ranks of the node too: they ask at the same moment
_PATIENCE_S = 120.0  # how long a storage may fail: an NFS server that restarts takes minutes
_LISTING_S = 30.0  # how long a listing that fails is tried again
_FINAL = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR)  # errors that another try does not mend

_Seen = tuple[frozenset[Key], tuple[str, ...], int]


class StorageSource:
    """A `StateSource` that offers the newest steps that are whole and were saved by a job of ``world_size`` ranks.

    A storage that does not answer for ``patience_s``, or fails for so long, is out of reach.
    """

    def __init__(self, storage: Storage, world_size: int, *, patience_s: float = _PATIENCE_S) -> None:
        self._storage, self._world_size = PatientStorage(storage, patience_s), world_size
        self.where, self._patience_s = f"storage {storage.where}", patience_s
        self._guard = threading.Lock()
        self._listed_s = -_LISTED_S
        self._served: set[int] = (
            set()
        )  # ranks that got the listing; one that asks again may wait for newer steps
        self._seen: _Seen | CheckpointError = CheckpointError("")
        self._common: dict[Key, _Common] = {}

    def keys(self, rank: int) -> frozenset[Key]:
        """The steps offered to any rank. Raises CheckpointError when the storage cannot be listed."""
        return self.look(rank)[0]

    def look(self, rank: int) -> _Seen:
        """The offered steps, a line for each newer step that is refused, and the highest incarnation seen (-1: none).

        Steps that were not written to the end are passed over without a word: nobody was promised them.
        Raises CheckpointError when the storage cannot be listed.
        """
        with self._guard:
            if rank in self._served or time.monotonic() - self._listed_s >= _LISTED_S:
                self._served.clear()
                try:
                    until_s = time.monotonic() + min(self._patience_s, _LISTING_S)
                    self._seen = read_again(self._list, until_s)
                except CheckpointError as error:
                    self._seen = error
                self._listed_s = time.monotonic()
            self._served.add(rank)
            if isinstance(self._seen, CheckpointError):
                raise CheckpointError(str(self._seen))
            return self._seen

    def bring(self, key: Key, rank: int, room: Room) -> str:
        until_s = time.monotonic() + self._patience_s
        with self._together(key) as common:
            reader = read_again(lambda: ShardReader(self._storage, self._whole(key), rank), until_s)
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
                    common.fill(reader, data, until_s)
                incoming.seal()
        return self.where

    def _list(self) -> _Seen:
        """The result of `look`, read from the storage once."""
        whole: list[Key] = []
        refused: list[str] = []
        try:
            keys = stored_keys(self._storage)
            for key in keys:
                step = look_until_sure(self._storage, key)
                if step.unfinished:
                    continue
                if refusal := self._refusal(step):
                    refused.append(refusal)
                else:
                    whole.append(key)
                if MOST_OFFERED in (len(whole), len(refused)):
                    break
        except OSError as error:
            kind = CheckpointError if error.errno in _FINAL else Unread
            raise kind(f"{self.where}: cannot be listed: {why(error)}") from None
        return frozenset(whole), tuple(refused), max((key.incarnation for key in keys), default=-1)

    def _refusal(self, step: StoredStep) -> str:
        """The reason why a step is not offered; "" when it is."""
        if step.manifest is None or step.problems:
            return step.problems[0]
        if step.manifest.world_size == self._world_size:
            return ""
        return (
            f"{folder_name(step.key)} is of {step.manifest.world_size} {OTHER_RANKS} {self._world_size}: "
            f"`keepstep checkpoint export {self._storage.where} --dcp FOLDER --step {step.key.step}` and "
            "torch.distributed.checkpoint.load reshard it; or use that many ranks, or another --checkpoint-dir"
        )

    def _whole(self, key: Key) -> Manifest:
        try:
            step = look(self._storage, key)
        except OSError as error:
            raise Unread(f"{folder_name(key)}: cannot be read: {why(error)}") from None
        if refusal := self._refusal(step):
            raise CheckpointError(refusal)
        assert step.manifest
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
    """The storages of a step that ranks of this node are reading now, by checksum and size."""

    def __init__(self) -> None:
        self.users = 0
        self._guard = threading.Lock()
        self._read: dict[tuple[int, int], Future[memoryview]] = {}

    def fill(self, reader: ShardReader, data: memoryview, until_s: float) -> None:
        """Bring the bytes of all storages: read, or copied from what another rank reads.

        A rank waits for others only after it has read all of its own, so no ranks wait for each other in a
        circle. What is copied is verified with everything else by the seal. Raises CheckpointError when what
        is on storage is not what was written.
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
            mine = {index: parts[index] for index in own}
            _read(reader, mine, until_s, lambda index: own[index].set_result(parts[index]))
        finally:
            for future in own.values():
                if not future.done():
                    future.set_exception(CheckpointError("the rank that read it could not"))
        left = {index: parts[index] for index, future in others.items() if not _copied(future, parts[index])}
        _read(reader, left, until_s, lambda _: None)


def _read(
    reader: ShardReader, into: Mapping[int, memoryview], until_s: float, done: Callable[[int], object]
) -> None:
    """Read storages; after a failure only those that are not there yet are read again. ``done`` gets each index."""
    left = dict(into)

    def rest() -> None:
        for index in reader.read(dict(left)):
            del left[index]
            done(index)

    read_again(rest, until_s)


def _copied(future: Future[memoryview], target: memoryview) -> bool:
    try:
        source = future.result()
    except CheckpointError:
        return False
    for at in range(0, len(target), CHUNK_BYTES):  # in parts, because a copy holds the interpreter's lock
        target[at : at + CHUNK_BYTES] = source[at : at + CHUNK_BYTES]
    return True
