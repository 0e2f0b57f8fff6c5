"""Storage as a source of states: what is whole there, and a rank's state brought into a slot of the node's cache.

Ranks of a node that bring the same step at once read what they have in common once: storages of the same checksum and
size (what is replicated: a DDP model) are read by the first and copied by the others.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager

from keepstep.checkpoint import _native as native  # pyright: ignore[reportMissingModuleSource]
from keepstep.checkpoint.header import encode_header, with_checksums
from keepstep.checkpoint.incoming import Room
from keepstep.checkpoint.manifest import Manifest, folder_name, key_of, key_text
from keepstep.checkpoint.patient_storage import PatientStorage
from keepstep.checkpoint.slots import Key, Record
from keepstep.checkpoint.storage import Storage
from keepstep.checkpoint.stored import CHUNK_BYTES, ShardReader, look, look_again
from keepstep.core.errors import CheckpointError

MOST_OFFERED = 16
_LISTED_S = 2.0  # the ranks of a node ask at the same moment
_PATIENCE_S = 120.0  # of an NFS server that begins anew

Same = tuple[int, int]
"""Checksum and size of a storage."""


class StorageSource:
    """A `StateSource`. Offers the newest steps that are whole and of a job of ``world_size`` ranks.

    A storage that does not answer for ``patience_s`` is out of reach.
    """

    def __init__(self, storage: Storage, world_size: int, *, patience_s: float = _PATIENCE_S) -> None:
        self._storage, self._world_size = PatientStorage(storage, patience_s), world_size
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
        manifest = self._whole(key)
        with self._together(key) as common:
            reader = ShardReader(self._storage, manifest, rank)
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
                    common.fill(reader, data)
                incoming.seal()
        return self.where

    def _list(self) -> None:
        try:
            keys = sorted(filter(None, map(key_of, self._storage.folders())), reverse=True)
            whole, refused = self._look_at(keys)
        except OSError as error:
            self._trouble = f"{self.where}: cannot be listed: {error.strerror or str(error)[:200]}"
            return
        self._trouble = ""
        self._keys, self._refused = frozenset(whole), tuple(refused)
        self._incarnation = max((key.incarnation for key in keys), default=-1)

    def _look_at(self, keys: Iterable[Key]) -> tuple[list[Key], list[str]]:
        """Steps that are offered, and why newer ones are not. Raises OSError: that cannot be told."""
        whole: list[Key] = []
        refused: list[str] = []
        for key in keys:
            step = look_again(self._storage, key)
            if not step.whole and not step.unfinished:
                step = look_again(self._storage, key)  # it may have been misread
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

    def _resize(self, manifest: Manifest) -> str:
        return (
            f"{folder_name(manifest.key)} is of {manifest.world_size} ranks, this job has {self._world_size}: "
            f"`keepstep checkpoint export {self._storage.where} --dcp FOLDER --step {manifest.step}` and "
            "torch.distributed.checkpoint.load reshard it; or use that many ranks, or another --checkpoint-dir"
        )

    def _whole(self, key: Key) -> Manifest:
        step = look(self._storage, key)
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

    def fill(self, reader: ShardReader, data: memoryview) -> None:
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
            for index in reader.read({index: parts[index] for index in own}):
                own[index].set_result(parts[index])
        finally:
            for future in own.values():
                if not future.done():
                    future.set_exception(CheckpointError("the rank that read it could not"))
        left = {index: parts[index] for index, future in others.items() if not _copied(future, parts[index])}
        for _ in reader.read(left):
            pass


def _copied(future: Future[memoryview], target: memoryview) -> bool:
    try:
        source = future.result()
    except CheckpointError:
        return False
    for at in range(0, len(target), CHUNK_BYTES):  # in parts: a copy keeps all other threads waiting
        target[at : at + CHUNK_BYTES] = source[at : at + CHUNK_BYTES]
    return True
