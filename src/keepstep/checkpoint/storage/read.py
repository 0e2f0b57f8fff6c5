"""Reads steps back from storage: a step that is not whole is named and not offered, and every byte is verified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

from keepstep.checkpoint import native
from keepstep.checkpoint.header import MOST_HEADER_BYTES, StateHeader
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.backend import Readable, StorageReader
from keepstep.checkpoint.storage.manifest import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    Manifest,
    StoredFile,
    data_file,
    decode_manifest,
    differences,
    folder_name,
    header_file,
    key_of,
    stored_file,
)
from keepstep.checkpoint.storage.shard_file import Piece, ShardFile, decode_shard, places
from keepstep.core.errors import CheckpointError

CHUNK_BYTES = 8 << 20


class Unread(CheckpointError):
    """A file could not be read, which says nothing about what is in it."""


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step's folder: its manifest when it can be read, and a line for everything that is wrong with it.

    ``unfinished``: the manifest, which is written last, is not there, so nobody was promised this step.
    """

    key: Key
    manifest: Manifest | None
    problems: tuple[str, ...]
    unfinished: bool = False

    @property
    def whole(self) -> bool:
        """Whether the step is offered for a restore."""
        return self.manifest is not None and not self.problems


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A rank's state from storage; ``data`` is laid out as ``header.storages`` says, every byte verified."""

    header: StateHeader
    data: memoryview


def stored_keys(storage: StorageReader) -> list[Key]:
    """The keys of all steps that have a folder, newest first. Raises OSError when the storage cannot be listed."""
    return sorted(filter(None, map(key_of, storage.folders())), reverse=True)


def scan(storage: StorageReader) -> list[StoredStep]:
    """All steps, newest first, judged by manifests, file names and sizes; a step that cannot be read has a problem.

    Raises CheckpointError when the storage cannot be listed.
    """
    try:
        keys = stored_keys(storage)
    except OSError as error:
        raise CheckpointError(f"{storage.where}: cannot be listed: {why(error)}") from None
    steps: list[StoredStep] = []
    for key in keys:
        try:
            steps.append(look(storage, key))
        except OSError as error:  # noqa: PERF203
            steps.append(StoredStep(key, None, (f"{folder_name(key)}: cannot be read: {why(error)}",)))
    return steps


def look(storage: StorageReader, key: Key) -> StoredStep:
    """One step, judged by its manifest, file names and sizes. Raises OSError when its folder cannot be read."""
    folder = folder_name(key)
    try:
        files = storage.files(folder)
        if MANIFEST not in files:
            problem = f"{folder}: has no manifest, it was not written to the end"
            return StoredStep(key, None, (problem,), unfinished=True)
        data = read_whole(storage, folder, MANIFEST, files[MANIFEST], MOST_MANIFEST_BYTES)
        manifest = decode_manifest(data, folder)
    except CheckpointError as error:
        return StoredStep(key, None, (str(error),))
    return StoredStep(key, manifest, tuple(differences(manifest, files)))


def verify(storage: StorageReader, manifest: Manifest) -> Iterator[str]:
    """Read all files of a step to their last byte; yields a line for each that is not what the manifest says."""
    folder = folder_name(manifest.key)
    ranks = {header_file(rank): rank for rank in range(manifest.world_size)}
    for name, stored in sorted(manifest.files.items()):
        try:
            if name in ranks:
                header_of(storage, manifest, ranks[name])
            else:
                check_file(storage, folder, name, stored)
        except OSError as error:  # noqa: PERF203
            yield f"{folder}/{name}: cannot be read: {why(error)}"
        except CheckpointError as error:
            yield str(error)


def check_file(storage: StorageReader, folder: str, name: str, stored: StoredFile) -> None:
    """Read a file to its end. Raises CheckpointError when size or checksum are not ``stored``; OSError."""
    found = hashlib.sha256(usedforsecurity=False)
    scratch = memoryview(bytearray(min(CHUNK_BYTES, stored.nbytes + 1)))
    size = 0
    with closing(storage.open(folder, name)) as file:
        while count := file.readinto(scratch):
            size += count
            if size > stored.nbytes:
                break
            found.update(scratch[:count])
    _compare(f"{folder}/{name}", stored, StoredFile(size, found.hexdigest()))


def read_shard(storage: StorageReader, manifest: Manifest, rank: int) -> StoredShard:
    """The state of a rank. Raises CheckpointError, naming the file that is missing, cut short or changed."""
    folder, name = folder_name(manifest.key), data_file(rank)
    shard, header = header_of(storage, manifest, rank)
    stored = manifest.files[name]
    try:
        size = storage.files(folder).get(name, 0)
        if size != stored.nbytes:
            raise CheckpointError(f"{folder}/{name}: has {size} bytes instead of {stored.nbytes}")
        data = memoryview(bytearray(header.data_bytes))
        with closing(storage.open(folder, name)) as file:
            found = hashlib.sha256(usedforsecurity=False)
            read = _fill(file, memoryview(bytearray(shard.begin)), found.update)
            for offset, nbytes in places(header, shard.pieces):
                read += _fill(file, data[offset : offset + nbytes], found.update)
            read += file.readinto(memoryview(bytearray(1)))
    except OSError as error:
        raise CheckpointError(f"{folder}/{name}: cannot be read: {why(error)}") from None
    _compare(f"{folder}/{name}", stored, StoredFile(read, found.hexdigest()))
    return StoredShard(header, data)


def header_of(storage: StorageReader, manifest: Manifest, rank: int) -> tuple[ShardFile, StateHeader]:
    """A rank's JSON file and the header in it, verified. Raises CheckpointError, which names the file."""
    folder, name = folder_name(manifest.key), header_file(rank)
    where, stored = f"{folder}/{name}", manifest.files[name]
    try:
        data = read_whole(storage, folder, name, stored.nbytes, 2 * MOST_HEADER_BYTES)
    except OSError as error:
        raise Unread(f"{where}: cannot be read: {why(error)}") from None
    _compare(where, stored, stored_file(data))
    shard, header = decode_shard(data, where)
    place = (header.incarnation, header.step, header.rank, header.world_size)
    if place != (*manifest.key, rank, manifest.world_size):
        raise CheckpointError(
            f"{where}: is that of rank {header.rank} of {header.world_size} at step {header.step} "
            f"(incarnation {header.incarnation})"
        )
    if shard.data != manifest.files[data_file(rank)]:
        raise CheckpointError(f"{where}: belongs to other tensors than {data_file(rank)}")
    return shard, header


def read_whole(storage: StorageReader, folder: str, name: str, nbytes: int, most: int) -> bytes:
    """The content of a small file; one byte more than ``nbytes`` is read, so that a longer file is noticed."""
    if nbytes > most:
        raise CheckpointError(f"{folder}/{name}: has {nbytes} bytes; at most {most} are read")
    content = bytearray()
    scratch = memoryview(bytearray(min(CHUNK_BYTES, nbytes + 1)))
    with closing(storage.open(folder, name)) as file:
        while count := file.readinto(scratch[: nbytes + 1 - len(content)]):
            content += scratch[:count]
    return bytes(content)


class ShardReader:
    """Reads a rank's state from storage, one storage of the state at a time; ``header`` was verified.

    The bytes are verified by the snapshot's checksum of each storage, so that the file need not be read as a whole.
    """

    def __init__(self, storage: StorageReader, manifest: Manifest, rank: int) -> None:
        """Raises CheckpointError, naming the file, when the header is missing, damaged, or cannot be read."""
        self._storage, self._folder, self._name = storage, folder_name(manifest.key), data_file(rank)
        self._shard, self.header = header_of(storage, manifest, rank)

    def read(self, into: Mapping[int, memoryview]) -> Iterator[int]:
        """Fill the memory given for each storage, by index; yields an index once its bytes are there and verified.

        Raises:
            Unread: the file cannot be read.
            CheckpointError: the file is missing, cut short or changed; the message names it.
        """
        if not into:
            return
        where = f"{self._folder}/{self._name}"
        parts: dict[int, list[tuple[int, Piece]]] = {index: [] for index in into}
        at = self._shard.begin
        for piece in self._shard.pieces:
            if piece.storage in parts:
                parts[piece.storage].append((at, piece))
            at += piece.nbytes
        try:
            if self._storage.files(self._folder).get(self._name) != self._shard.data.nbytes:
                raise CheckpointError(f"{where}: missing, or not {self._shard.data.nbytes} bytes")
            with closing(self._storage.open(self._folder, self._name)) as file:
                for index, target in into.items():
                    for begin, piece in parts[index]:
                        file.seek(begin)
                        _fill(file, target[piece.start : piece.start + piece.nbytes], lambda _: None)
                    found = native.checksum(target)
                    if found != self.header.storages[index].checksum:
                        raise CheckpointError(
                            f"{where}: bytes of storage {index} are not those that were written"
                            f" (checksum {found:016x})"
                        )
                    yield index
        except OSError as error:
            raise Unread(f"{where}: cannot be read: {why(error)}") from None


def why(error: OSError) -> str:
    """The reason for an error of a storage, without its number and path."""
    return (error.strerror or str(error) or type(error).__name__)[:200]


def _fill(file: Readable, target: memoryview, each: Callable[[memoryview], None]) -> int:
    """Read the next bytes into ``target``, calling ``each`` with every part; how many there were."""
    done = 0
    while done < len(target) and (count := file.readinto(target[done : done + CHUNK_BYTES])):
        each(target[done : done + count])
        done += count
    return done


def _compare(where: str, stored: StoredFile, found: StoredFile) -> None:
    if found.nbytes != stored.nbytes:
        more = "more than" if found.nbytes > stored.nbytes else f"{found.nbytes} of"
        raise CheckpointError(f"{where}: has {more} {stored.nbytes} bytes")
    if found.sha256 != stored.sha256:
        raise CheckpointError(
            f"{where}: its bytes are not those that were written (SHA-256 {found.sha256[:12]}…)"
        )
