"""Exports a step on storage as one safetensors file, in which the tensors of all ranks are put together.

Each rank's files are read twice, the first time to compare what ranks hold in common; one rank's state is in memory
at a time. Every byte that is read is verified.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.checkpoint.header import ITEM_BYTES, StateHeader, TensorEntry
from keepstep.checkpoint.storage.backend import Storage
from keepstep.checkpoint.storage.global_view import Block, WholeTensor, whole_tensors
from keepstep.checkpoint.storage.manifest import Manifest
from keepstep.checkpoint.storage.read import StoredShard, read_shard
from keepstep.checkpoint.storage.shard_file import SAFETENSORS, Entry, safetensors_table
from keepstep.core.errors import CheckpointError

_SMALL_BYTES = 1 << 28
_MOST_REPEATS = 64

Array = np.ndarray[Any, Any]


def export_safetensors(storage: Storage, manifest: Manifest, target: Path) -> int:
    """Write all tensors of the job into one file, sharded ones put together. Returns the number of tensors.

    Plain values are left out, because safetensors cannot hold them.

    Raises:
        CheckpointError: the step cannot be read, or the file cannot be written.
    """
    # Tensors of larger elements come first, so that all are aligned; other dtypes are stored as bytes.
    tensors = sorted(
        view(storage, manifest).values(),
        key=lambda one: -ITEM_BYTES[one.dtype] if one.dtype in SAFETENSORS else -1,
    )
    entries = [
        Entry(
            one.name,
            SAFETENSORS.get(one.dtype, "U8"),
            one.shape if one.dtype in SAFETENSORS else (*one.shape, ITEM_BYTES[one.dtype]),
            _nbytes(one),
        )
        for one in tensors
    ]
    table = safetensors_table(entries, {"step": str(manifest.step), "world_size": str(manifest.world_size)})
    draft = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    try:
        with draft.open("xb") as file:
            file.write(table)
            file.truncate(len(table) + sum(entry.nbytes for entry in entries))
        _fill(storage, manifest, tensors, draft, len(table))
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror}; name another file") from None
    finally:
        draft.unlink(missing_ok=True)
    return len(tensors)


def view(storage: Storage, manifest: Manifest) -> dict[str, WholeTensor]:
    """The tensors of the whole job, by name.

    Raises CheckpointError when a rank's state cannot be read, or contradicts that of another rank.
    """
    headers: list[StateHeader] = []
    prints: list[dict[int, bytes]] = []
    for rank in range(manifest.world_size):
        shard = read_shard(storage, manifest, rank)
        headers.append(shard.header)
        prints.append(
            {
                index: hashlib.sha256(array_of(shard, tensor).tobytes(), usedforsecurity=False).digest()
                for index, tensor in enumerate(shard.header.tensors)
                if tensor.shard is None
            }
        )
    return whole_tensors(headers, lambda rank, index: prints[rank][index])


def array_of(shard: StoredShard, tensor: TensorEntry) -> Array:
    """A tensor's local part, sharing memory with the shard; its elements are opaque bytes of the dtype's size.

    Raises:
        CheckpointError: its strides repeat its storage so often that only a hostile file can mean it.
    """
    size, storage = ITEM_BYTES[tensor.dtype], shard.header.storages[tensor.storage]
    nbytes = math.prod(tensor.shape) * size
    if nbytes > max(_SMALL_BYTES, _MOST_REPEATS * storage.nbytes):
        raise CheckpointError(
            f"rank {shard.header.rank}: a tensor of {nbytes} bytes repeats the {storage.nbytes} of its storage"
        )
    kind: Any = np.dtype(f"V{size}")
    if not nbytes:
        return np.empty(tensor.shape, kind)
    return np.ndarray(
        tensor.shape,
        kind,
        shard.data,
        storage.offset + tensor.offset * size,
        tuple(step * size for step in tensor.stride),
    )


def _fill(storage: Storage, manifest: Manifest, tensors: list[WholeTensor], path: Path, begin: int) -> None:
    targets: dict[int, list[tuple[Block, Array]]] = {}
    maps: list[np.memmap[Any, Any]] = []
    with path.open("r+b") as file:
        for tensor in tensors:
            if _nbytes(tensor):
                kind: Any = np.dtype(f"V{ITEM_BYTES[tensor.dtype]}")
                whole = np.memmap(file, kind, "r+", begin, tensor.shape)
                maps.append(whole)
                for block in tensor.blocks:
                    targets.setdefault(block.rank, []).append((block, whole))
            begin += _nbytes(tensor)
    for rank, blocks in targets.items():
        shard = read_shard(storage, manifest, rank)
        for block, whole in blocks:
            part = array_of(shard, shard.header.tensors[block.tensor])
            whole[block.slices(block.whole)] = part[block.slices(block.local)]
    for whole in maps:
        whole.flush()


def _nbytes(tensor: WholeTensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
