"""A StorageWriter and a StorageReader of ``torch.distributed.checkpoint`` (DCP) on keepstep's storage.

    dcp.save(state, storage_writer=DcpWriter("/checkpoints/run", step))
    dcp.load(state, storage_reader=DcpReader("/checkpoints/run"))

Each rank's items are one safetensors file, as in any step of keepstep, so that ``keepstep checkpoint`` lists, verifies
and exports them; ``dcp.json`` says which file holds which of DCP's entries. DCP itself plans and reshards. Plain values
are pickled by DCP and stored as bytes: keepstep verifies them, and only DCP unpickles them.
"""

from __future__ import annotations

import dataclasses
import io
import os
import time
from typing import Annotated, Any, cast

import msgspec
import torch
from torch import distributed
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from keepstep.checkpoint import native
from keepstep.checkpoint.header import ShardEntry, StateHeader, TensorEntry, tensor_paths, with_checksums
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.state import DTYPES, flatten, laid_out, tensor_of
from keepstep.checkpoint.storage.backend import Storage, open_storage
from keepstep.checkpoint.storage.manifest import Count, Manifest, folder_name, key_of, key_text
from keepstep.checkpoint.storage.persist import Incomplete, conclude, remove, write_checked, write_shard
from keepstep.checkpoint.storage.read import ShardReader, check_file, look, read_whole, scan, why
from keepstep.core.errors import CheckpointError

DCP_FILE = "dcp.json"
MOST_DCP_BYTES = 1 << 29
_TRIES, _TRY_AGAIN_S = 30, 1.0

Counts = tuple[Count, ...]
Path = str | os.PathLike[str]


class _Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of a tensor, stored as the tensor ``name`` in the state of ``rank``."""

    offsets: Counts
    sizes: Counts
    rank: Count
    name: str


class _Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    size: Counts
    chunks: tuple[_Chunk, ...]


class _Object(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    rank: Count
    name: str


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of ``dcp.json``; ``paths``: the keys that lead to each entry in the state that DCP was given."""

    tensors: dict[str, _Tensor]
    objects: dict[str, _Object]
    paths: dict[str, tuple[str | int, ...]]
    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1


class DcpWriter(StorageWriter):
    """Writes one step to storage.

    Args:
        where: path or URL of the storage, in which each step is a folder.
        step: number of the training step.
        incarnation: number of the job's incarnation.
    """

    def __init__(self, where: Path, step: int, incarnation: int = 0) -> None:
        self._storage = open_storage(os.fspath(where))
        self._key = Key(incarnation, step)
        self._key.pack()

    def reset(self, checkpoint_id: Path | None = None) -> None:
        if checkpoint_id is not None:
            self._storage, self._key = _parsed(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if look(self._storage, self._key).whole:
            raise CheckpointError(f"{self._storage.where}: {key_text(self._key)} is there already")
        remove(self._storage, self._key)  # files of an earlier save that was cut off
        return [dataclasses.replace(plan, storage_data=(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank, world_size = plan.storage_data
        names = _names(plan.items)
        tensors = [_resolved(planner.resolve_data(item)) for item in plan.items]
        header, data = _taken(dict(zip(names, tensors, strict=True)), self._key, rank, world_size)
        write_shard(self._storage, _placed(header, dict(zip(names, plan.items, strict=True))), data)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(item.index, tensor.nbytes, (rank, name))
                for item, tensor, name in zip(plan.items, tensors, names, strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        content = msgspec.json.encode(_content(metadata, results)) + b"\n"
        if len(content) > MOST_DCP_BYTES:
            raise CheckpointError(
                f"{DCP_FILE} would have {len(content)} bytes; at most {MOST_DCP_BYTES} are read"
            )
        stored = write_checked(self._storage, folder_name(self._key), DCP_FILE, content)
        for tries in range(_TRIES):
            try:
                conclude(self._storage, self._key, (), len(results), leader=True, besides={DCP_FILE: stored})
                return
            except Incomplete:  # NFS may return a listing that is a few seconds old
                if tries == _TRIES - 1:
                    raise
            time.sleep(_TRY_AGAIN_S)

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return key_of(os.path.basename(os.fspath(checkpoint_id))) is not None


class DcpReader(StorageReader):
    """Reads one step that `DcpWriter` wrote; every byte that is read is verified.

    Args:
        where: path or URL of the storage.
        step: number of the step to read; None: the newest whole one, which rank 0 chooses for all ranks.
    """

    def __init__(self, where: Path, step: int | None = None) -> None:
        self._storage = open_storage(os.fspath(where))
        self._step = step
        self._key: Key | None = None
        self._manifest: Manifest | None = None

    @property
    def key(self) -> Key | None:
        """The key of the step that was read; None before."""
        return self._manifest.key if self._manifest else None

    def reset(self, checkpoint_id: Path | None = None) -> None:
        self._manifest = None
        if checkpoint_id is not None:
            self._storage, self._key = _parsed(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._manifest = self._chosen()
        folder, stored = folder_name(self._manifest.key), self._manifest.files[DCP_FILE]
        try:
            check_file(self._storage, folder, DCP_FILE, stored)
            data = read_whole(self._storage, folder, DCP_FILE, stored.nbytes, MOST_DCP_BYTES)
            content = msgspec.json.decode(data, type=_Content)
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise CheckpointError(f"{folder}/{DCP_FILE}: cannot be read: {str(error)[:200]}") from None
        return _metadata(content, folder)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._places: dict[MetadataIndex, tuple[int, str]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_rank: dict[int, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            rank, name = self._places[item.storage_index]
            by_rank.setdefault(rank, []).append((name, item))
        for rank, items in by_rank.items():
            self._read(rank, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return DcpWriter.validate_checkpoint_id(checkpoint_id)

    def _chosen(self) -> Manifest:
        key = self._key
        if key is None:
            several = distributed.is_initialized() and distributed.get_world_size() > 1
            choice = [self._newest() if not several or distributed.get_rank() == 0 else None]
            if several:
                distributed.broadcast_object_list(choice, src=0)
            key = choice[0]
        problem, found = "no whole step saved through DCP is there", None
        try:
            found = look(self._storage, key) if key else None
            problem = next(iter(found.problems if found else ()), problem)
        except OSError as error:
            problem = f"{folder_name(key)}: cannot be read: {why(error)}" if key else problem
        if found is None or found.manifest is None or found.problems:
            wanted = "the newest step" if self._step is None else f"step {self._step}"
            raise CheckpointError(f"{self._storage.where}: {wanted} cannot be loaded: {problem}")
        if DCP_FILE not in found.manifest.files:
            raise CheckpointError(
                f"{self._storage.where}: {key_text(found.key)} was not saved through DCP; "
                "`keepstep checkpoint export --dcp` makes a folder that DCP loads"
            )
        return found.manifest

    def _newest(self) -> Key | None:
        for one in scan(self._storage):
            named = self._step is not None and self._step == one.key.step
            through_dcp = one.manifest is not None and DCP_FILE in one.manifest.files
            if one.whole and (named or (self._step is None and through_dcp)):
                return one.key
        return None

    def _read(self, rank: int, items: list[tuple[str, ReadItem]], planner: LoadPlanner) -> None:
        assert self._manifest
        if rank >= self._manifest.world_size:
            raise CheckpointError(f"{DCP_FILE} refers to rank {rank} of {self._manifest.world_size}")
        reader = ShardReader(self._storage, self._manifest, rank)
        entries = dict(zip(tensor_paths(reader.header), reader.header.tensors, strict=True))
        wanted: dict[int, list[tuple[TensorEntry, ReadItem]]] = {}
        for name, item in items:
            if name not in entries:
                raise CheckpointError(f"{DCP_FILE} refers to {name[:100]!r}, which rank {rank} has not")
            wanted.setdefault(entries[name].storage, []).append((entries[name], item))
        for storage, parts in wanted.items():
            whole = torch.empty(reader.header.storages[storage].nbytes, dtype=torch.uint8)
            for _ in reader.read({storage: memoryview(cast("Any", whole.numpy()))}):
                for entry, item in parts:
                    _give(tensor_of(entry, whole), item, planner)


def _give(tensor: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(tensor.numpy().tobytes()))
        return
    for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if start + length > tensor.shape[axis]:
            raise CheckpointError(f"{item.storage_index.fqn}: {DCP_FILE} claims more of it than is there")
        tensor = tensor.narrow(axis, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != tensor.shape:
        raise CheckpointError(
            f"{item.storage_index.fqn}: has shape {tuple(tensor.shape)}, not {tuple(target.shape)}"
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def _names(items: list[WriteItem]) -> list[str]:
    """A unique name for each item in the rank's state; further blocks of a tensor get their offsets as a suffix."""
    found: dict[str, None] = {}  # a set that keeps its order
    for item in items:
        name = item.index.fqn
        if name in found:
            name += "@" + "-".join(map(str, item.index.offset or ()))
        while name in found:
            name += "'"
        found[name] = None
    return list(found)


def _resolved(value: torch.Tensor | io.BytesIO) -> torch.Tensor:
    if isinstance(value, io.BytesIO):
        return torch.frombuffer(bytearray(value.getbuffer()) or bytearray(1), dtype=torch.uint8)
    # A view of something larger is copied, because `flatten` takes all of a storage that its tensors reach.
    value = value.detach().cpu().contiguous()
    return value.clone() if value.untyped_storage().nbytes() != value.nbytes else value


def _taken(
    state: dict[str, torch.Tensor], key: Key, rank: int, world_size: int
) -> tuple[StateHeader, memoryview]:
    header, spans = flatten(
        state, step=key.step, incarnation=key.incarnation, rank=rank, world_size=world_size
    )
    view = memoryview(cast("Any", laid_out(header, spans).numpy()))
    sums = [native.checksum(view[one.offset : one.offset + one.nbytes]) for one in header.storages]
    return with_checksums(header, tuple(sums)), view


def _placed(header: StateHeader, items: dict[str, WriteItem]) -> StateHeader:
    """The header with the place of each block in the tensor that it is a part of."""
    tensors: list[TensorEntry] = []
    for name, entry in zip(tensor_paths(header), header.tensors, strict=True):
        data = items[name].tensor_data
        if data and tuple(data.size) != entry.shape:
            shard = ShardEntry(tuple(data.size), tuple(data.chunk.offsets), (), (), (), ())
            entry = msgspec.structs.replace(entry, shard=shard)
        tensors.append(entry)
    return msgspec.structs.replace(header, tensors=tuple(tensors))


def _content(metadata: Metadata, results: list[list[WriteResult]]) -> _Content:
    places = {
        result.index: cast("tuple[int, str]", result.storage_data) for each in results for result in each
    }
    tensors: dict[str, _Tensor] = {}
    objects: dict[str, _Object] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            objects[name] = _Object(*places[MetadataIndex(name)])
            continue
        chunks = tuple(
            _Chunk(tuple(one.offsets), tuple(one.sizes), *places[MetadataIndex(name, one.offsets)])
            for one in entry.chunks
        )
        tensors[name] = _Tensor(str(entry.properties.dtype)[6:], tuple(entry.size), chunks)
    paths: Any = metadata.planner_data
    return _Content(tensors, objects, msgspec.convert(paths or {}, dict[str, tuple[str | int, ...]]))


def _metadata(content: _Content, folder: str) -> Metadata:
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in content.objects}
    places = {MetadataIndex(name): (one.rank, one.name) for name, one in content.objects.items()}
    for name, tensor in content.tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{folder}/{DCP_FILE}: dtype {tensor.dtype[:40]!r} is unknown to this torch"
            )
        chunks = [
            ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in tensor.chunks
        ]
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.size), chunks)
        for one in tensor.chunks:
            places[MetadataIndex(name, one.offsets)] = (one.rank, one.name)
    return Metadata(entries, planner_data=content.paths, storage_data=places, storage_meta=StorageMeta())


def _parsed(checkpoint_id: Path) -> tuple[Storage, Key]:
    parent, _, folder = os.fspath(checkpoint_id).rstrip("/").rpartition("/")
    key = key_of(folder)
    if key is None:
        raise CheckpointError(
            f"checkpoint_id {os.fspath(checkpoint_id)}: is no step's folder; leave it out, or give "
            f"…/{folder_name(Key(0, 100))}"
        )
    return open_storage(parent or "."), key
