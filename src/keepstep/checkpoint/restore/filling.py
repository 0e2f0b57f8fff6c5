"""Brings a snapshot back into a live state: every byte is checked, and copied only once."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from mmap import mmap
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keepstep.checkpoint import native
from keepstep.checkpoint.header import ITEM_BYTES, ShardEntry, StateHeader, TensorEntry, join, wrong
from keepstep.checkpoint.memory.pages import Pages
from keepstep.checkpoint.state import (
    DTYPES,
    build,
    identity,
    local_of,
    placement_of,
    shard_entry,
    tensor_of,
)
from keepstep.core.errors import CheckpointError

_PARTS: dict[type[Any], Callable[[Any], Iterable[Any]]] = {
    torch.nn.Module: lambda module: (*module.parameters(), *module.buffers()),
    torch.optim.Optimizer: lambda optimizer: optimizer.param_groups,
    dict: lambda mapping: mapping.values(),
    list: iter,
    tuple: iter,
}
"""What objects of a live state consist of, as far as tensors may be in it."""


class Filling:
    """Restores the snapshot in ``slot`` into ``state``, a dict: `copy` the bytes, then `finish` if they are sound.

    Tensors in the state are filled in place; they must have the dtype, shape and placement they were saved with.
    Objects with ``load_state_dict`` get what their ``state_dict`` returned. All other values are replaced by those that
    were saved, and keys that only the snapshot has are added.
    """

    def __init__(
        self, state: Any, header: StateHeader, slot: mmap, threads: int, left: list[torch.UntypedStorage]
    ) -> None:
        """Plans the restore and changes nothing yet. Pages of ``left``, memory that nobody uses, may be reused.

        Raises CheckpointError when the state does not have the structure of the snapshot.
        """
        self._header, self._slot, self._threads, self._left = header, slot, threads, left
        self._plan = array("Q")  # rows of offset in the slot, address, nbytes
        self._whole: list[int] = []  # the storage that each row of the plan copies; -1: only a part of one
        self._parts: set[int] = set()  # storages that the plan copies in parts or not at all
        # New memory by storage, where the state has no tensor to fill.
        self._fresh: dict[int, torch.Tensor] = {}
        self._after: list[Callable[[], object]] = []
        self.damaged: list[int] = []
        self._meshes: dict[tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]], DeviceMesh] = {}
        if type(state) is not dict:
            raise CheckpointError("give load() a dict, as save() was given")
        self._find_meshes(state)
        self._value(header.tree, cast("dict[Any, Any]", state), "")

    def copy(self) -> None:
        """Copy the bytes into the state's tensors and verify every checksum; ``damaged`` lists storages that differ.

        When there are any, tensors of the state may hold wrong bytes, and another snapshot must be restored.
        """
        entries = self._header.storages
        rows = sorted(self._parts | (set(range(len(entries))) - set(self._whole)))
        plan = array("Q")
        for index in rows:
            plan.extend((native.DATA_OFFSET + entries[index].offset, entries[index].nbytes))
        summed = [*zip(rows, native.checksums(self._slot, plan, self._threads), strict=True)]
        if not any(found != entries[index].checksum for index, found in summed):
            pages = Pages(self._left)
            given = [pages.put_under(*self._plan[row + 1 : row + 3]) for row in range(0, len(self._plan), 3)]
            copied = native.copy_out(self._slot, self._plan, self._threads, not any(given))
            summed += [(index, found) for index, found in zip(self._whole, copied, strict=True) if index >= 0]
        self.damaged = sorted({index for index, found in summed if found != entries[index].checksum})

    def finish(self) -> None:
        """Restore everything but the copied bytes, once these are known to be sound."""
        for action in self._after:
            action()

    def _value(self, node: Any, target: Any, path: str) -> Any:
        """The restored value for ``node``: ``target`` itself, to be filled, if that is possible."""
        if hasattr(target, "load_state_dict") and hasattr(target, "state_dict"):
            self._object(node, target, path)
            return target
        if isinstance(node, dict):
            pairs = list(cast("dict[Any, Any]", node).items())
            return self._dict(pairs, cast("Any", target) if type(target) is dict else {}, path)
        tag, items = _tagged(node)
        if tag == "tensor":
            return self._tensor(items[0], target, path)
        if tag == "dict":
            return self._dict(_pairs(items, path), cast("Any", target) if type(target) is dict else {}, path)
        if tag == "ordered":
            there = cast("Any", target) if type(target) is OrderedDict else build(node[:2], (), path)
            return self._dict(_pairs(items[1:], path), there, path)
        if tag in ("list", "tuple"):
            return self._row(tag, items, target, path)
        if tag in ("array", "scalar", "set", "frozenset"):
            return self._private(node, path)
        return build(node, (), path)

    def _row(self, tag: str, items: list[Any], target: Any, path: str) -> Any:
        there: list[Any] = list(target) if type(target) in (list, tuple) and len(target) == len(items) else []
        there = there or [None] * len(items)
        made = [
            self._value(n, t, join(path, str(i))) for i, (n, t) in enumerate(zip(items, there, strict=True))
        ]
        if tag == "tuple":
            return tuple(made)
        if type(target) is list:
            there = cast("list[Any]", target)
            self._after.append(lambda: there.__setitem__(slice(None), made))
            return there
        return made

    def _dict(self, pairs: list[tuple[Any, Any]], target: dict[Any, Any], path: str) -> dict[Any, Any]:
        missing = target.keys() - {key for key, _ in pairs}
        if missing:
            more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{join(path, str(min(missing, key=str)))}: not in the snapshot{more}")
        made = {key: self._value(node, target.get(key), join(path, str(key))) for key, node in pairs}
        self._after.append(lambda: target.update(made))
        return target

    def _tensor(self, index: int, target: Any, path: str) -> torch.Tensor:
        entry = self._header.tensors[index]
        if not isinstance(target, torch.Tensor):
            local = tensor_of(entry, self._storage(entry.storage))
            return local if entry.shard is None else self._whole_of(local, entry.shard, path)
        local = target
        if isinstance(target, DTensor):
            local = target.to_local().detach()
            if entry.shard != shard_entry(target, path):
                raise wrong(path, "was saved with another mesh or placement; it must be resharded")
        elif entry.shard is not None:
            raise wrong(path, "was saved as a part of a DTensor, and is to become a whole tensor")
        if DTYPES.get(entry.dtype) != local.dtype or entry.shape != tuple(local.shape):
            raise CheckpointError(
                f"{path}: the snapshot has {entry.dtype} of {entry.shape}, the state {local.dtype} of "
                f"{tuple(local.shape)}"
            )
        steps = zip(entry.shape, local.stride(), entry.stride, strict=True)
        if any(count > 1 and not own and saved for count, own, saved in steps):
            raise CheckpointError(f"{path}: the state's elements share memory, those of the snapshot do not")
        self._into(entry, local)
        return target

    def _whole_of(self, local: torch.Tensor, shard: ShardEntry, path: str) -> torch.Tensor:
        """A DTensor with this local part, on an equal mesh of another DTensor in the state."""
        mesh = self._meshes.get((shard.mesh_shape, shard.mesh_names, shard.coordinate))
        if mesh is None:
            raise wrong(
                path,
                f"was saved as a part of a DTensor on a mesh of {shard.mesh_shape}, and nothing in the state "
                "is on such a mesh: put the model into the state, too",
            )
        shape = torch.Size(shard.global_shape)
        stride = torch.empty(shape, device="meta").stride()
        placements = [placement_of(word) for word in shard.placements]
        if (
            mesh.device_type != local.device.type
        ):  # else `from_local` would take the bytes along, which are yet to come
            host, local = local, torch.empty_like(local, device=mesh.device_type)
            self._after.append(lambda: _copy_into(local, host))
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def _find_meshes(self, value: Any) -> None:
        """Collect the meshes of all DTensors in a live state."""
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            names, coordinate = tuple(mesh.mesh_dim_names or ()), tuple(mesh.get_coordinate() or ())
            self._meshes.setdefault((tuple(mesh.shape), names, coordinate), mesh)
        for item in next((parts(value) for kind, parts in _PARTS.items() if isinstance(value, kind)), ()):
            self._find_meshes(item)

    def _into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        size, numel = ITEM_BYTES[entry.dtype], target.numel()
        if numel == 0:
            return
        begin = entry.offset * size
        dense = entry.reach_bytes - begin == numel * size
        if (
            dense
            and target.device.type == "cpu"
            and _strides(entry.shape, entry.stride) == _strides(entry.shape, target.stride())
        ):
            self._copy(entry.storage, begin, target.data_ptr(), numel * size)
            return
        self._parts.add(entry.storage)
        self._after.append(lambda: _copy_into(target, tensor_of(entry, self._view(entry.storage))))

    def _storage(self, index: int) -> torch.Tensor:
        if index not in self._fresh:
            nbytes = self._header.storages[index].nbytes
            self._fresh[index] = torch.empty(nbytes, dtype=torch.uint8)
            self._copy(index, 0, self._fresh[index].data_ptr(), nbytes)
        return self._fresh[index]

    def _copy(self, storage: int, begin: int, address: int, nbytes: int) -> None:
        entry = self._header.storages[storage]
        self._plan.extend((native.DATA_OFFSET + entry.offset + begin, address, nbytes))
        whole = (begin, nbytes) == (0, entry.nbytes)
        self._whole.append(storage if whole else -1)
        if not whole:
            self._parts.add(storage)

    def _view(self, storage: int) -> torch.Tensor:
        """The bytes of a storage as a tensor that shares memory with the slot."""
        entry = self._header.storages[storage]
        if entry.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        begin = native.DATA_OFFSET + entry.offset
        return torch.frombuffer(self._slot, dtype=torch.uint8, count=entry.nbytes, offset=begin)

    def _private(self, node: Any, path: str) -> Any:
        """The value of a node, whose tensors are copied from the slot at once instead of by the plan."""
        tensors = {
            index: tensor_of(
                self._header.tensors[index], self._view(self._header.tensors[index].storage).clone()
            )
            for index in _indices(node)
        }
        return build(node, cast("Any", tensors), path)

    def _object(self, node: Any, target: Any, path: str) -> None:
        if isinstance(target, torch.nn.Module):
            there: dict[str, Any] = target.state_dict()
            tensors = [*target.parameters(), *target.buffers()]
            own = {identity(local_of(tensor).untyped_storage()) for tensor in tensors}
            if all(_is_part_of(value, own) for value in there.values()):
                # The module's tensors are filled in place, because load_state_dict would copy a second time.
                self._value(node, there, path)
                return
        value = self._value(node, None, path)
        self._after.append(lambda: target.load_state_dict(value))


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    for dimension, step in enumerate(target.stride()):
        if step == 0 and target.shape[dimension] > 1:  # expanded: every element is there once
            target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    with torch.no_grad():
        target.copy_(source)


def _is_part_of(value: Any, own: set[int]) -> bool:
    local = local_of(value)
    return isinstance(local, torch.Tensor) and identity(local.untyped_storage()) in own


def _strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The strides of dimensions with more than one element; others have no meaning."""
    return [step for n, step in zip(shape, stride, strict=True) if n > 1]


def _tagged(node: Any) -> tuple[str, list[Any]]:
    """Tag and items of a node; the tag is "" for a plain value."""
    if not isinstance(node, list):
        return "", []
    items = cast("list[Any]", node)
    return items[0], items[1:]


def _pairs(items: list[Any], path: str) -> list[tuple[Any, Any]]:
    return [(build(key, (), path), value) for key, value in items]


def _indices(node: Any) -> set[int]:
    """Indices of the tensors that a node refers to, which has no dicts below it."""
    tag, items = _tagged(node)
    if tag in ("tensor", "array", "scalar"):
        return {items[0]}
    return {index for item in items for index in _indices(item)}
