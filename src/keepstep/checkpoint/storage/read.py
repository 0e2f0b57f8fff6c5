"""Steps on storage, read back: what is not whole is named and not offered, and no byte is given out unverified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    digest,
    folder_name,
    header_file,
    key_of,
)
from keepstep.checkpoint.storage.shard_file import Piece, ShardFile, decode_shard, places
from keepstep.core.errors import CheckpointError

CHUNK_BYTES = 8 << 20


class Unread(CheckpointError):
    """It could not be read; that says nothing about what is there."""


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step's folder: its manifest when it can be read, and a line for everything that is wrong with it.

    ``unfinished``: it has no manifest, which comes last; nobody was promised this step.
    """

    key: Key
    manifest: Manifest | None
    problems: tuple[str, ...]
    unfinished: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is offered for a restore."""
        return self.manifest is not None and not self.problems


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A rank's state from storage; ``data`` is laid out as ``header.storages`` says, every byte verified."""

    header: StateHeader
    data: memoryview


def scan(storage: StorageReader) -> list[StoredStep]:
    """All steps, newest first, judged by manifests, names and sizes. Raises CheckpointError: not reachable."""
    try:
        keys = [key for key in map(key_of, storage.folders()) if key is not None]
    except OSError as error:
        raise CheckpointError(f"{storage.where}: cannot be listed: {_why(error)}") from None
    return [look(storage, key) for key in sorted(keys, reverse=True)]


def scan_again(storage: StorageReader) -> list[StoredStep]:
    """As ``scan``, but what cannot be read is an OSError; what is read as damaged is read once more."""
    keys = sorted(filter(None, map(key_of, storage.folders())), reverse=True)
    steps = [look_again(storage, key) for key in keys]
    return [
        step if step.whole or step.unfinished else look_again(storage, key)
        for key, step in zip(keys, steps, strict=True)
    ]


def look(storage: StorageReader, key: Key) -> StoredStep:
    """One step, judged by its manifest, names and sizes."""
    try:
        return look_again(storage, key)
    except OSError as error:
        return StoredStep(key, None, (f"{folder_name(key)}: cannot be read: {_why(error)}",))


def look_again(storage: StorageReader, key: Key) -> StoredStep:
    """As ``look``, but what cannot be read is an OSError, not a finding."""
    try:
        files = storage.files(folder_name(key))
        if MANIFEST not in files:
            problem = f"{folder_name(key)}: has no manifest, it was not written to the end"
            return StoredStep(key, None, (problem,), unfinished=True)
        manifest = decode_manifest(
            read_whole(storage, folder_name(key), MANIFEST, files[MANIFEST], MOST_MANIFEST_BYTES),
            folder_name(key),
        )
    except CheckpointError as error:
        return StoredStep(key, None, (str(error),))
    return StoredStep(key, manifest, tuple(differences(manifest, files)))


def verify(storage: StorageReader, manifest: Manifest) -> Iterator[str]:
    """A line for every file that is not what the manifest says, each read to its last byte."""
    folder = folder_name(manifest.key)
    ranks = {header_file(rank): rank for rank in range(manifest.world_size)}
    for name, stored in sorted(manifest.files.items()):
        try:
            if name in ranks:
                header_of(storage, manifest, ranks[name])
            else:
                check_file(storage, folder, name, stored)
        except OSError as error:  # noqa: PERF203
            yield f"{folder}/{name}: cannot be read: {_why(error)}"
        except CheckpointError as error:
            yield str(error)


def check_file(storage: StorageReader, folder: str, name: str, stored: StoredFile) -> None:
    """Read a file to its end and compare.

    Raises:
        CheckpointError: size or checksum differ.
        OSError: it cannot be read.
    """
    found = digest()
    scratch = memoryview(bytearray(min(CHUNK_BYTES, stored.nbytes + 1)))
    size = 0
    with closing(storage.open(folder, name)) as file:
        while count := file.readinto(scratch):
            size += count
            if size > stored.nbytes:
                break
            found.update(scratch[:count])
    _compare(f"{folder}/{name}", stored, size, found.hexdigest())


def read_shard(
    storage: StorageReader, manifest: Manifest, rank: int, into: Callable[[int], memoryview] | None = None
) -> StoredShard:
    """A rank's state.

    Args:
        storage: where it lies.
        manifest: as ``scan`` found it.
        rank: below the manifest's world size.
        into: gives room for that many bytes, zeroed; asked only once the files are known to have as many.

    Raises:
        CheckpointError: a file is missing, cut short or changed; names it. What ``into`` gave is then worthless.
    """
    folder, name = folder_name(manifest.key), data_file(rank)
    shard, header = header_of(storage, manifest, rank)
    stored = manifest.files[name]
    try:
        size = storage.files(folder).get(name, 0)
        if size != stored.nbytes:
            raise CheckpointError(f"{folder}/{name}: has {size} bytes instead of {stored.nbytes}")
        data = into(header.data_bytes) if into else memoryview(bytearray(header.data_bytes))
        with closing(storage.open(folder, name)) as file:
            found = digest()
            read = _skip(file, shard.begin, found.update)
            for offset, nbytes in places(header, shard.pieces):
                read += _fill(file, data[offset : offset + nbytes], found.update)
            read += len(file.read(1))
    except OSError as error:
        raise CheckpointError(f"{folder}/{name}: cannot be read: {_why(error)}") from None
    _compare(f"{folder}/{name}", stored, read, found.hexdigest())
    return StoredShard(header, data)


def header_of(storage: StorageReader, manifest: Manifest, rank: int) -> tuple[ShardFile, StateHeader]:
    """What is said of a rank's state, verified. Raises CheckpointError naming the file."""
    folder, name = folder_name(manifest.key), header_file(rank)
    where, stored = f"{folder}/{name}", manifest.files[name]
    try:
        data = read_whole(storage, folder, name, stored.nbytes, 2 * MOST_HEADER_BYTES)
    except OSError as error:
        raise Unread(f"{where}: cannot be read: {_why(error)}") from None
    found = digest()
    found.update(data)
    _compare(where, stored, len(data), found.hexdigest())
    shard, header = decode_shard(data, where)
    said = (header.incarnation, header.step, header.rank, header.world_size)
    if said != (*manifest.key, rank, manifest.world_size):
        raise CheckpointError(
            f"{where}: is that of rank {header.rank} of {header.world_size} at step {header.step} "
            f"(incarnation {header.incarnation})"
        )
    if shard.data != manifest.files[data_file(rank)]:
        raise CheckpointError(f"{where}: belongs to other tensors than {data_file(rank)}")
    return shard, header


def read_whole(storage: StorageReader, folder: str, name: str, nbytes: int, most: int) -> bytes:
    """A small file; at most one byte more than ``nbytes`` is read, so that a longer one is noticed."""
    if nbytes > most:
        raise CheckpointError(f"{folder}/{name}: has {nbytes} bytes; at most {most} are read")
    parts: list[bytes] = []
    left = nbytes + 1
    with closing(storage.open(folder, name)) as file:
        while left and (part := file.read(min(left, CHUNK_BYTES))):
            parts.append(part)
            left -= len(part)
    return b"".join(parts)


def _skip(file: Readable, nbytes: int, each: Callable[[bytes], None]) -> int:
    left = nbytes
    while left and (part := file.read(min(left, CHUNK_BYTES))):
        each(part)
        left -= len(part)
    return nbytes - left


def read_storages(
    storage: StorageReader, manifest: Manifest, rank: int, wanted: Iterable[int]
) -> Iterator[tuple[int, bytearray]]:
    """Some storages of a rank's state, each verified by the snapshot's own checksum, not the whole file by its.

    Raises:
        CheckpointError: a file is missing, cut short or changed; names it.
    """
    reader = ShardReader(storage, manifest, rank)
    for index in wanted:
        data = bytearray(reader.header.storages[index].nbytes)
        for _ in reader.read({index: memoryview(data)}):
            yield index, data


class ShardReader:
    """A rank's state on storage, read by storages. ``header``: what is said of it, verified."""

    def __init__(self, storage: StorageReader, manifest: Manifest, rank: int) -> None:
        """Raises CheckpointError: what is said of the state is missing, damaged, or cannot be read; names the file."""
        self._storage, self._folder, self._name = storage, folder_name(manifest.key), data_file(rank)
        self._shard, self.header = header_of(storage, manifest, rank)

    def read(self, into: Mapping[int, memoryview]) -> Iterator[int]:
        """Fill the memory given for storages, by index; gives each index once its bytes are there and verified.

        Raises:
            Unread: the file cannot be read.
            CheckpointError: it is missing, cut short or changed; names it.
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
            raise Unread(f"{where}: cannot be read: {_why(error)}") from None


def _fill(file: Readable, target: memoryview, each: Callable[[memoryview], None]) -> int:
    done = 0
    while done < len(target):
        part = target[done : done + CHUNK_BYTES]
        count = file.readinto(part)
        if not count:
            break
        each(part[:count])
        done += count
    return done


def _compare(where: str, stored: StoredFile, nbytes: int, sha256: str) -> None:
    if nbytes != stored.nbytes:
        more = "more than" if nbytes > stored.nbytes else f"{nbytes} of"
        raise CheckpointError(f"{where}: has {more} {stored.nbytes} bytes")
    if sha256 != stored.sha256:
        raise CheckpointError(f"{where}: its bytes are not those that were written (SHA-256 {sha256[:12]}…)")


def _why(error: OSError) -> str:
    return (error.strerror or str(error) or type(error).__name__)[:200]
