"""Exports a step on storage as a ``torch.distributed.checkpoint`` (DCP) folder, which any number of ranks can load.

One process gives DCP's writer the items of each rank in turn, as the ranks of a job would.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import _nested_dict, planner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from keepstep.checkpoint.header import tensor_paths
from keepstep.checkpoint.state import DTYPES, build, tensor_of
from keepstep.checkpoint.storage.backend import Storage
from keepstep.checkpoint.storage.export_safetensors import view
from keepstep.checkpoint.storage.global_view import Block, WholeTensor
from keepstep.checkpoint.storage.manifest import Manifest
from keepstep.checkpoint.storage.read import StoredShard, read_shard
from keepstep.core.errors import CheckpointError


def export_dcp(storage: Storage, manifest: Manifest, target: Path) -> int:
    """Write a folder that ``torch.distributed.checkpoint.load`` reads. Returns the number of its entries.

    Entries are named as DCP names them: the keys that lead there, joined by dots. An entry that is not sharded and
    differs between ranks stands under its own name for the lowest rank, and as ``NAME@rank3`` for others.

    Raises:
        CheckpointError: the step cannot be read, or the folder cannot be written or is not empty.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: is not empty; name another folder")
    collected = _Collected(view(storage, manifest))
    writer = FileSystemWriter(target, thread_count=1)
    writer.set_up_storage_writer(True)
    results: list[list[WriteResult]] = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        empty = [SavePlan([]) for _ in range(manifest.world_size)]
        for rank, plan in enumerate(writer.prepare_global_plan(empty)):
            items = collected.items(read_shard(storage, manifest, rank))
            if items:
                plan = dataclasses.replace(plan, items=[item for item, _ in items])
                results.append(writer.write_data(plan, cast("Any", _Resolver(items))).wait())
        writer.finish(Metadata(collected.entries, planner_data=collected.places), results)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror}; name another folder") from None
    return len(collected.entries)


_Items = list[tuple[WriteItem, torch.Tensor | io.BytesIO]]


class _Resolver:
    """The part of DCP's planner that its writer calls."""

    def __init__(self, items: _Items) -> None:
        self._values = {item.index: value for item, value in items}

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._values[item.index]


class _Collected:
    """Collects DCP's metadata while the states of the ranks are read one after the other."""

    def __init__(self, tensors: dict[str, WholeTensor]) -> None:
        self.entries: dict[str, Any] = {}
        self.places: dict[str, tuple[str | int, ...]] = {}
        self._owned: dict[tuple[int, int], list[tuple[WholeTensor, Block]]] = {}
        for whole in tensors.values():
            for block in whole.blocks:
                self._owned.setdefault((block.rank, block.tensor), []).append((whole, block))
        self._plain: dict[str, list[bytes]] = {}

    def items(self, shard: StoredShard) -> _Items:
        """The items that a rank writes, with their content."""
        rank = shard.header.rank
        whole_data = torch.frombuffer(shard.data or bytearray(1), dtype=torch.uint8)
        storages = [whole_data[one.offset : one.offset + one.nbytes] for one in shard.header.storages]
        tensors = [tensor_of(entry, storages[entry.storage]) for entry in shard.header.tensors]
        state: Any = build(shard.header.tree, tensors, "")
        index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
        paths = tensor_paths(shard.header)
        flattened: Any = cast("Any", _nested_dict).flatten_state_dict(
            cast("Any", state if isinstance(state, dict) else {"state": state})
        )
        flat: dict[str, Any] = flattened[0]
        places: dict[str, tuple[str | int, ...]] = flattened[1]
        found: _Items = []
        for name, value in flat.items():
            index = index_of.get(id(value))
            if index is None:
                self._add_plain(found, rank, name, places[name], value)
                continue
            for whole, block in self._owned.get((rank, index), ()):
                # The tensor may have several names in the state; each keeps the suffix ("@rank3") of the first.
                shown = name + whole.name[len(paths[index]) :]
                self.places[shown] = places[name] if shown == name else (shown,)
                self._add_block(found, shown, whole, block, tensors[index])
        return found

    def _add_block(
        self, found: _Items, name: str, whole: WholeTensor, block: Block, tensor: torch.Tensor
    ) -> None:
        chunk = ChunkStorageMetadata(torch.Size(block.whole), torch.Size(block.sizes))
        properties = TensorProperties(dtype=DTYPES[whole.dtype])
        entry = self.entries.setdefault(name, TensorStorageMetadata(properties, torch.Size(whole.shape), []))
        entry.chunks.append(chunk)
        item = WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, entry.size),
        )
        found.append((item, tensor[block.slices(block.local)]))

    def _add_plain(
        self, found: _Items, rank: int, name: str, place: tuple[str | int, ...], value: Any
    ) -> None:
        content = io.BytesIO()
        torch.save(value, content)
        known = self._plain.setdefault(name, [])
        if content.getvalue() in known:
            return
        shown = f"{name}@rank{rank}" if known else name
        known.append(content.getvalue())
        self.entries[shown] = BytesStorageMetadata()
        self.places[shown] = place if shown == name else (shown,)
        size: dict[str, Any] = {}
        if hasattr(planner, "BytesIOWriteData"):  # torch 2.7 does not ask for it
            size["bytes_io_data"] = planner.BytesIOWriteData(len(content.getvalue()))
        found.append((WriteItem(MetadataIndex(shown), WriteItemType.BYTE_IO, **size), content))
