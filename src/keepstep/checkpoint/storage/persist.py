"""Brings steps from the node's cache to storage while training goes on, as a ``PersistPlan`` says."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import msgspec

from keepstep.checkpoint.header import MOST_HEADER_BYTES, Packed, StateHeader, encode_header
from keepstep.checkpoint.matching import same_moment
from keepstep.checkpoint.memory.slots import Key, SnapshotDamaged, damaged_storages
from keepstep.checkpoint.storage.backend import Bytes, Storage, safe_name
from keepstep.checkpoint.storage.manifest import (
    MANIFEST,
    Count,
    Manifest,
    StoredFile,
    data_file,
    encode_manifest,
    folder_name,
    header_file,
    stored_file,
)
from keepstep.checkpoint.storage.persist_plan import Conclude, PersistPlan, Task, WriteShard
from keepstep.checkpoint.storage.read import CHUNK_BYTES, check_file, look, read_whole, stored_keys
from keepstep.checkpoint.storage.rereading import look_until_sure
from keepstep.checkpoint.storage.shard_file import (
    cut,
    decode_shard,
    encode_shard,
    open_shard,
    places,
    safetensors_header,
)
from keepstep.core.errors import CheckpointError

log = logging.getLogger(__name__)

_LIST_AGAIN_S = 5.0
_LASTING_TRIES = 3  # failures in a row that are no hiccup of the storage: some seconds

Source = Callable[[Key, int], AbstractContextManager[tuple[StateHeader, memoryview]]]
"""Opens a rank's sealed state of a step in the cache; it is not overwritten while the context is open."""


class Incomplete(Exception):
    """Parts of a step, or its manifest, are not on storage yet."""


class Damaged(CheckpointError):
    """The part of ``rank`` that was written to storage is not there any more, or changed."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class _Place(msgspec.Struct):
    """The fields of a state's header that say whose state it is."""

    incarnation: Count
    step: Count
    rank: Count
    world_size: Count
    moment: Packed = 0


def write_shard(
    storage: Storage,
    header: StateHeader,
    data: memoryview,
    *,
    go_on: Callable[[], None] = lambda: None,
) -> None:
    """Write a rank's state to storage, read it back and compare. The step counts only once it has a manifest.

    Files that are already there and sound are left alone. Otherwise the JSON file, without which no manifest is
    written, is removed first and written last.

    Args:
        header: header of the state, with the checksums that the snapshot found.
        data: the state's bytes; they must not change meanwhile.
        go_on: called before each chunk; may raise to end the writing.

    Raises:
        OSError: the storage failed.
        CheckpointError: ``data`` is not what the snapshot was, or what was written cannot be read back.
    """
    folder = folder_name(Key(header.incarnation, header.step))
    pieces = cut(header)
    table = safetensors_header(header, pieces)
    if _is_there(storage, folder, header):
        return
    found = hashlib.sha256(usedforsecurity=False)

    def chunks() -> Iterator[Bytes]:
        spans = places(header, tuple(one.piece for one in pieces))
        parts = (
            data[at : min(at + CHUNK_BYTES, offset + nbytes)]
            for offset, nbytes in spans
            for at in range(offset, offset + nbytes, CHUNK_BYTES)
        )
        for chunk in (table, *parts):
            go_on()
            found.update(chunk)
            yield chunk

    storage.remove(folder, [header_file(header.rank)])
    stored = StoredFile(storage.write(folder, data_file(header.rank), chunks()), found.hexdigest())
    for index in damaged_storages(data, header, begin=0):
        raise SnapshotDamaged(
            f"storage {index} in the cache is not what the snapshot of rank {header.rank} "
            f"at step {header.step} was"
        )
    check_file(storage, folder, data_file(header.rank), stored)
    write_checked(storage, folder, header_file(header.rank), encode_shard(header, len(table), pieces, stored))


def conclude(
    storage: Storage,
    key: Key,
    ranks: Iterable[int],
    world_size: int,
    *,
    leader: bool,
    besides: Mapping[str, StoredFile] | None = None,
) -> None:
    """Check that all ranks' parts of a step are on storage and, as the leader, write the manifest.

    Args:
        ranks: ranks of this node, whose parts were written.
        leader: whether this node writes the manifest.
        besides: files of the step that belong to no rank.

    Raises:
        Incomplete: other ranks' parts are missing, or the leader has not written the manifest yet.
        Damaged: a part of this node is not there any more, or changed.
        CheckpointError: another node's part is damaged, there is a file that belongs to no rank, or the ranks
            did not save the step at the same moment.
        OSError: the storage failed.
    """
    if look(storage, key).whole:
        return
    files = storage.files(folder_name(key))
    entries: dict[str, StoredFile] = dict(besides or {})
    moments: list[int] = []
    for rank in ranks:
        try:
            entries.update(_entries(storage, key, rank, world_size, files, moments))
        except (Incomplete, CheckpointError) as error:  # noqa: PERF203
            raise Damaged(str(error), rank) from None
    if not leader:
        raise Incomplete("no sound manifest is there yet")
    for rank in range(world_size):
        if data_file(rank) not in entries:
            entries.update(_entries(storage, key, rank, world_size, files, moments))
    if not same_moment(moments):
        raise CheckpointError(
            f"{folder_name(key)}: the ranks have not saved it at the same moment: "
            "give save() the same step on all ranks"
        )
    manifest = Manifest(key.step, key.incarnation, world_size, entries)
    write_checked(storage, folder_name(key), MANIFEST, encode_manifest(manifest))
    problems = look(storage, key).problems
    if problems:
        raise CheckpointError(problems[0])


def remove(storage: Storage, key: Key) -> None:
    """Remove a step from storage, its manifest first, so that a removal that is cut short offers nothing.

    Raises:
        OSError: the storage failed.
        CheckpointError: a file's name is not one that keepstep writes; nothing is removed.
    """
    names = sorted(map(safe_name, storage.files(folder_name(key))), key=lambda name: name != MANIFEST)
    storage.remove(folder_name(key), names)
    storage.remove_folder(folder_name(key))


class Persister:
    """Carries out a plan, which nobody else may use, in a thread. Methods may be called from any thread."""

    def __init__(
        self,
        plan: PersistPlan,
        storage: Storage,
        source: Source,
        *,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._storage, self._source = plan, storage, source
        self._ranks, self._world_size, self._leader = plan.ranks, world_size, plan.leader
        self._clock = clock
        self._changed = threading.Condition()
        self._stopped = False
        self._listed = self._ever_listed = False
        self._list_trouble = ""
        self._damaged: set[tuple[Key, int]] = set()
        self._list_s = 0.0  # time before which the storage is not listed
        self._thread: threading.Thread | None = None

    def want(self, keys: Iterable[Key], *, remove_others: bool = False) -> None:
        """Declare the steps that are to be on storage, as ``PersistPlan.want``."""
        with self._changed:
            self._plan.want(keys, remove_others=remove_others)
            self._listed = self._listed and not remove_others
            self._changed.notify()

    def follow(self, cached: Iterable[tuple[Key, int]]) -> frozenset[Key]:
        """Note which states, by key and rank, the cache holds. Returns the steps that it must keep."""
        with self._changed:
            self._plan.cached = frozenset(cached)
            self._changed.notify()
            return self._plan.pinned

    @property
    def whole(self) -> frozenset[Key] | None:
        """All steps that are whole on storage; None until the storage was listed for the first time."""
        with self._changed:
            return self._plan.whole if self._ever_listed else None

    def damaged(self) -> list[tuple[Key, int]]:
        """Step and rank of each state that was found damaged in the cache since the last call."""
        with self._changed:
            found, self._damaged = sorted(self._damaged), set()
            return found

    def troubles(self) -> list[str]:
        """A line for everything that keeps wanted steps from storage."""
        with self._changed:
            unlisted = [self._list_trouble] if self._list_trouble else []
            return unlisted + self._plan.troubles(self._clock())

    def lasting_trouble(self) -> str:
        """What keeps steps from storage and does not go away by itself, in a line; "": nothing."""
        with self._changed:
            found = self._plan.lasting(_LASTING_TRIES)
            if found is None:
                return self._list_trouble
        task, why = found
        return f"{self._storage.where}: step {task.key.step} of the training is not there: {why}"

    def start(self) -> None:
        """Start the thread that carries out the plan."""
        self._thread = threading.Thread(target=self._run, name="keepstep-persist", daemon=True)
        self._thread.start()

    def stop(self, patience_s: float | None = None) -> None:
        """End the thread after its current task; wait at most ``patience_s`` for it.

        Steps that are not on storage yet stay wanted; the next persister begins them anew.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread:
            self._thread.join(patience_s)

    def work(self) -> bool:
        """Carry out one task that is due. Returns whether there was one."""
        if not self._listed and not self._list():
            return False
        with self._changed:
            task = self._plan.next(self._clock())
        if task is None:
            return False
        failure: Exception | None = None
        try:
            self._carry_out(task)
        except Exception as error:  # whatever a cache or a storage raises must not end the thread
            failure = error
            if not isinstance(error, Damaged | Incomplete | SnapshotDamaged):
                log.warning("%s: %s: %s", self._storage.where, task, error, exc_info=_unexpected(error))
        with self._changed:
            if failure is None:
                self._plan.done(task)
            elif isinstance(failure, Incomplete) and isinstance(task, Conclude):
                self._plan.waits(task, self._clock())
            else:
                self._plan.failed(task, _in_a_line(failure), self._clock())
            if isinstance(failure, Damaged):
                self._plan.again(task.key, failure.rank)
            if isinstance(failure, SnapshotDamaged) and isinstance(task, WriteShard):
                self._damaged.add((task.key, task.rank))
        return True

    def _run(self) -> None:
        while not self._stopped:
            if self.work():
                continue
            with self._changed:
                due_s = self._plan.wake_s() if self._listed else self._list_s
                if not self._stopped:
                    self._changed.wait(None if due_s is None else max(0.0, due_s - self._clock()))

    def _carry_out(self, task: Task) -> None:
        if isinstance(task, WriteShard):
            with self._source(task.key, task.rank) as (header, data):
                if (header.incarnation, header.step, header.rank) != (*task.key, task.rank):
                    raise CheckpointError(
                        f"the cache gave step {header.step} of rank {header.rank} (incarnation {header.incarnation})"
                    )
                write_shard(self._storage, header, data, go_on=self._go_on)
        elif isinstance(task, Conclude):
            conclude(self._storage, task.key, self._ranks, self._world_size, leader=self._leader)
        else:
            remove(self._storage, task.key)

    def _list(self) -> bool:
        if self._clock() < self._list_s:
            return False
        try:
            steps = [look_until_sure(self._storage, key) for key in stored_keys(self._storage)]
        except Exception as error:  # a storage may raise anything
            self._list_trouble = f"{self._storage.where}: cannot be listed: {_in_a_line(error)}"
            log.warning("%s", self._list_trouble, exc_info=_unexpected(error))
            self._list_s = self._clock() + _LIST_AGAIN_S
            return False
        # A step with a manifest that is not whole may have been misread, so it is never removed.
        stored = {step.key: step.whole for step in steps if step.whole or step.unfinished}
        with self._changed:
            self._plan.listed(stored)
            self._listed = self._ever_listed = True
            self._list_trouble = ""
        return True

    def _go_on(self) -> None:
        if self._stopped:
            raise InterruptedError("told to stop")


def _is_there(storage: Storage, folder: str, header: StateHeader) -> bool:
    """Whether exactly this state is on storage already. Raises OSError when the storage cannot be read."""
    name = header_file(header.rank)
    nbytes = storage.files(folder).get(name)
    if nbytes is None:
        return False
    try:
        shard, _ = decode_shard(read_whole(storage, folder, name, nbytes, 2 * MOST_HEADER_BYTES), name)
        if bytes(shard.state) != encode_header(header):
            return False
        check_file(storage, folder, data_file(header.rank), shard.data)
    except (CheckpointError, FileNotFoundError):
        return False
    return True


def write_checked(storage: Storage, folder: str, name: str, content: bytes) -> StoredFile:
    """Write a small file, read it back and compare. Raises OSError, CheckpointError."""
    storage.write(folder, name, [content])
    stored = stored_file(content)
    check_file(storage, folder, name, stored)
    return stored


def _entries(
    storage: Storage, key: Key, rank: int, world_size: int, files: dict[str, int], moments: list[int]
) -> dict[str, StoredFile]:
    """The manifest's entries for a rank's two files, from its JSON file, whose moment is added to ``moments``.

    Raises Incomplete when a file is missing.
    """
    folder, name, data = folder_name(key), header_file(rank), data_file(rank)
    where = f"{folder}/{name}"
    absent = next((one for one in (data, name) if one not in files), None)
    if absent:
        raise Incomplete(f"{folder}/{absent} is not there yet")
    content = read_whole(storage, folder, name, files[name], 2 * MOST_HEADER_BYTES)
    shard = open_shard(content, where)
    try:
        place = msgspec.json.decode(shard.state, type=_Place)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{where}: cannot be read: {str(error)[:200]}") from None
    if (place.incarnation, place.step, place.rank, place.world_size) != (*key, rank, world_size):
        raise CheckpointError(
            f"{where}: is that of rank {place.rank} of {place.world_size} at step {place.step}"
        )
    if files[data] != shard.data.nbytes:
        raise CheckpointError(f"{folder}/{data}: has {files[data]} bytes instead of {shard.data.nbytes}")
    moments.append(place.moment)
    return {name: stored_file(content), data: shard.data}


def _unexpected(error: Exception) -> Exception | None:
    """The error itself, to be logged with its traceback, unless it is one that a cache or storage raises; else None."""
    return None if isinstance(error, CheckpointError | OSError) else error


def _in_a_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}" if not isinstance(error, CheckpointError) else lines[0]
