"""Takes a state apart into a `StateHeader` and the storages of its tensors, and puts it together again.

Storages, not tensors, are what is copied, so tensors that share memory share it again after a restore. Only the bytes
of a storage between the first and the last that its tensors reach are kept.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from keepstep.checkpoint.header import (
    ALIGNMENT,
    ITEM_BYTES,
    MOST_DEPTH,
    ShardEntry,
    StateHeader,
    StorageEntry,
    TensorEntry,
    join,
    key_text,
    plain_value,
    split_of,
    wrong,
)
from keepstep.core.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RARE: dict[type[Any], Callable[[Any], list[Any] | None]] = {
    complex: lambda value: ["complex", *(_finite(part) for part in (value.real, value.imag))],
    bytes: lambda value: ["bytes", base64.b64encode(value).decode()],
    torch.dtype: lambda value: ["dtype", _NAMES[value]] if value in _NAMES else None,
    torch.Size: lambda value: ["size", *value],
    torch.device: lambda value: ["device", str(value)],
}
"""How values of less common types are written; None: this one cannot be."""
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WORDS = range(-(1 << 63), 1 << 64)  # integers that JSON readers keep exactly


def _finite(part: float) -> Any:
    return part if math.isfinite(part) else ["float", repr(part)]


@dataclass(slots=True)
class Span:
    """The bytes of a live storage that a `StorageEntry` describes. A span keeps its storage alive."""

    storage: torch.UntypedStorage
    start: int  # offset in the storage, in bytes
    nbytes: int

    @property
    def pointer(self) -> int:
        """Address of the first byte, on ``storage.device``."""
        return self.storage.data_ptr() + self.start

    def extend(self, first: int, last: int) -> None:
        """Have the span also reach from ``first`` (rounded down to 64) to ``last``, exclusive."""
        start, end = first // ALIGNMENT * ALIGNMENT, last
        if self.nbytes:
            start, end = min(start, self.start), max(end, self.start + self.nbytes)
        self.start, self.nbytes = start, end - start

    def view(self) -> torch.Tensor:
        """The bytes as a uint8 tensor of shape (nbytes,) that shares their memory."""
        empty: Any = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.start, (self.nbytes,))


def with_state_dicts(state: Any) -> Any:
    """``state`` with every object in its dicts, lists and tuples that has a ``state_dict()`` replaced by it."""
    if hasattr(state, "state_dict") and hasattr(state, "load_state_dict"):
        return state.state_dict()
    if type(state) is dict:
        return {key: with_state_dicts(value) for key, value in cast("dict[Any, Any]", state).items()}
    if type(state) in (list, tuple):
        return type(state)(with_state_dicts(value) for value in state)
    return state


def flatten(
    state: Any,
    *,
    step: int,
    incarnation: int = 0,
    rank: int = 0,
    world_size: int = 1,
    layout: str = "",
    first: bool = False,
    moment: int = 0,
) -> tuple[StateHeader, list[Span]]:
    """The header of ``state`` and the spans of its storages, in the order of ``header.storages``. Copies no tensor.

    Values must be of exactly the types that a header knows: a value of a subclass would come back as something else.
    Tensors lose autograd (a parameter comes back as a plain tensor); a DTensor is represented by its local part.
    Raises CheckpointError, naming the path, when a value in the state cannot be saved without running code.
    """
    taken = _Taken()
    tree = taken.node(state, "", 0)
    offset, storages = 0, list[StorageEntry]()
    spans = taken.spans
    for span in spans:
        storages.append(StorageEntry(offset, span.nbytes))
        offset = -(-(offset + span.nbytes) // ALIGNMENT) * ALIGNMENT
    tensors = tuple(
        msgspec.structs.replace(
            # Of a tensor without elements it is 0 already.
            entry,
            offset=max(0, entry.offset - spans[entry.storage].start // ITEM_BYTES[entry.dtype]),
        )
        for entry in taken.tensors
    )
    header = StateHeader(
        step=step,
        incarnation=incarnation,
        rank=rank,
        world_size=world_size,
        layout=layout,
        data_bytes=storages[-1].offset + storages[-1].nbytes if storages else 0,
        tree=tree,
        storages=tuple(storages),
        tensors=tensors,
        first=first,
        moment=moment,
    )
    return header, spans


def with_families(
    header: StateHeader, spans: Sequence[Span], families: Iterable[tuple[Sequence[int], bool, bool]]
) -> StateHeader:
    """The header with those of the `optimizers.Family` that are whole, and whose storages are all among ``spans``."""
    index = {identity(span.storage): number for number, span in enumerate(spans)}
    there = [
        (tuple([index[one] for one in ones]), decays)
        for ones, is_whole, decays in families
        if is_whole and all(map(index.__contains__, ones))
    ]
    # A storage belongs to one family; parameters that share a storage are left out.
    count = Counter(chain.from_iterable(numbers for numbers, _ in there))
    found = sorted(one for one in there if all(count[number] == 1 for number in one[0]))
    decaying = tuple(place for place, (_, decays) in enumerate(found) if decays)
    return msgspec.structs.replace(header, families=tuple(numbers for numbers, _ in found), decaying=decaying)


def laid_out(header: StateHeader, spans: Sequence[Span]) -> torch.Tensor:
    """A copy of the spans' bytes, placed as ``header.storages`` says: uint8 of shape (data_bytes,), on the CPU."""
    data = torch.zeros(header.data_bytes, dtype=torch.uint8)
    for entry, span in zip(header.storages, spans, strict=True):
        data[entry.offset : entry.offset + entry.nbytes].copy_(span.view())
    return data


def unflatten(header: StateHeader, storages: Sequence[torch.Tensor]) -> Any:
    """The state whose bytes ``storages`` holds: one uint8 tensor of shape (nbytes,) per storage entry.

    The tensors of the result share memory with ``storages``, and are on their devices. In place of a DTensor stands its
    local part; ``header.tensors[i].shard`` describes the whole. ``header`` must come from `flatten` or `decode_header`.
    Raises CheckpointError when a storage is too short for its entry, or a dtype is unknown to this torch.
    """
    for index, (entry, storage) in enumerate(zip(header.storages, storages, strict=True)):
        if storage.dtype != torch.uint8 or storage.dim() != 1 or storage.numel() < entry.nbytes:
            raise CheckpointError(f"storage {index}: not a row of {entry.nbytes} bytes")
    tensors = [tensor_of(entry, storages[entry.storage]) for entry in header.tensors]
    return build(header.tree, tensors, "")


def tensor_of(entry: TensorEntry, storage: torch.Tensor) -> torch.Tensor:
    """The tensor that an entry describes; it shares memory with ``storage``, a uint8 tensor.

    Raises CheckpointError when the dtype is unknown to this torch.
    """
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"dtype {entry.dtype} is unknown to torch {torch.__version__}: use a newer one")
    start = int(storage.storage_offset()) // ITEM_BYTES[entry.dtype]
    empty: Any = torch.empty(0, dtype=DTYPES[entry.dtype], device=storage.device)
    return empty.set_(storage.untyped_storage(), start + entry.offset, entry.shape, entry.stride)


def build(node: Any, tensors: Sequence[Any], path: str) -> Any:
    """The value that a node of a header's tree stands for; ``tensors`` are those of ``header.tensors``.

    Raises CheckpointError when the tree is not sound, or holds a value that this torch does not know.
    """
    try:
        return _build(node, tensors, path)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise wrong(path, f"holds a value that cannot be made here: {error}") from None


def _build(node: Any, tensors: Sequence[Any], path: str) -> Any:
    if node is None or isinstance(node, str | bool | int | float):
        return node
    if isinstance(node, dict):
        return {key: _build(value, tensors, join(path, key)) for key, value in cast("Any", node).items()}
    tag, items = node[0], node[1:]
    match tag:
        case "tensor":
            return tensors[items[0]]
        case "array":
            return tensors[items[0]].numpy()
        case "scalar":
            return tensors[items[0]].numpy()[()]
        case "list" | "tuple" | "set" | "frozenset":
            made = [_build(item, tensors, join(path, str(index))) for index, item in enumerate(items)]
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[tag](made)
        case "dict":
            return dict(_built_pairs(items, tensors, path))
        case "ordered":
            ordered = OrderedDict(_built_pairs(items[1:], tensors, path))
            if items[0] is not None:
                cast("Any", ordered)._metadata = _build(items[0], (), join(path, "_metadata"))
            return ordered
        case "dtype":
            return DTYPES[plain_value(tag, items, path)]
        case "size":
            return torch.Size(plain_value(tag, items, path))
        case "device":
            return torch.device(plain_value(tag, items, path))
        case _:
            return plain_value(tag, items, path)


def _built_pairs(pairs: list[Any], tensors: Sequence[Any], path: str) -> list[tuple[Any, Any]]:
    try:
        found = [
            (_build(key, (), path), _build(value, tensors, join(path, key_text(key)))) for key, value in pairs
        ]
        if len(dict(found)) == len(found):
            return found
    except TypeError:
        pass
    raise wrong(path, "a dict with a key twice, or one that cannot be a key")


@dataclass(slots=True)
class _Taken:
    """The tensors and storages met so far on the way through a state.

    The offsets of ``tensors`` count from the beginning of the live storage, until all of its reach is known.
    """

    tensors: list[TensorEntry] = field(default_factory=list[TensorEntry])
    spans: list[Span] = field(default_factory=list[Span])  # one per storage
    _storages: dict[int, int] = field(default_factory=dict[int, int])  # index in spans, by identity
    _seen: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict[int, tuple[torch.Tensor, int]])

    def node(self, value: Any, path: str, depth: int) -> Any:
        kind = cast("type[Any]", type(value))
        if value is None or kind is bool:
            return value
        if kind is str:
            return _text(value, path)
        if kind is int:
            return value if value in _WORDS else ["int", hex(value)]
        if kind is float:
            return _finite(value)
        if depth >= MOST_DEPTH:
            raise wrong(path[:200], f"nested deeper than {MOST_DEPTH}, or in itself; give a flat state")
        if isinstance(value, torch.Tensor):
            return ["tensor", self._tensor(value, path)]
        if kind is dict:
            return self._dict(cast("dict[Any, Any]", value), path, depth)
        if kind is OrderedDict:
            return self._ordered(cast("OrderedDict[Any, Any]", value), path, depth)
        if kind in (list, tuple, set, frozenset):
            return [
                kind.__name__,
                *(self.node(v, join(path, str(i)), depth + 1) for i, v in enumerate(value)),
            ]
        return self._rare(value, path)

    def _rare(self, value: Any, path: str) -> Any:
        encode = _RARE.get(cast("type[Any]", type(value)))  # a proxy's `__class__` is not its type
        if encode is not None and (found := encode(value)) is not None:
            return found
        if type(value) is np.ndarray or isinstance(value, np.generic):
            tag = "array" if type(cast("Any", value)) is np.ndarray else "scalar"
            return [tag, self._array(cast("Any", value), path)]
        if isinstance(value, torch.Generator):
            raise wrong(path, "a torch.Generator; give its get_state()")
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        advice = "give its state_dict()" if hasattr(value, "state_dict") else "give plain values or tensors"
        raise wrong(path, f"a {name} cannot be saved without running code: {advice}")

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str for key in value):
            return {_text(k, path): self.node(v, join(path, k), depth + 1) for k, v in value.items()}
        return ["dict", *self._pairs(value, path, depth)]

    def _ordered(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Any:
        metadata = getattr(value, "_metadata", None)
        before = len(self.tensors)
        said = self.node(metadata, join(path, "_metadata"), depth + 1)
        if len(self.tensors) != before:
            raise wrong(join(path, "_metadata"), "has tensors; only plain values can be kept there")
        return ["ordered", said, *self._pairs(value, path, depth)]

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[list[Any]]:
        pairs: list[list[Any]] = []
        for key, item in value.items():
            before = len(self.tensors)
            node = self.node(key, path, depth + 1)
            if len(self.tensors) != before:
                raise wrong(path, "a tensor as a key of a dict; use a plain value")
            pairs.append([node, self.node(item, join(path, key_text(node)), depth + 1)])
        return pairs

    def _array(self, array: Any, path: str) -> int:
        try:
            # The array is copied because torch takes none that is read-only or has negative strides.
            return self._tensor(torch.as_tensor(np.array(array, copy=True, order="C")), path)
        except TypeError:
            raise wrong(
                path, f"a numpy array of dtype {array.dtype}; only plain numbers can be kept"
            ) from None

    def _tensor(self, tensor: torch.Tensor, path: str) -> int:
        seen = self._seen.get(id(tensor))
        if seen:
            return seen[1]
        local, shard = tensor, None
        if isinstance(tensor, DTensor):
            local, shard = tensor.to_local().detach(), shard_entry(tensor, path)
        if hasattr(local, "wait") and type(local).__name__ == "AsyncCollectiveTensor":
            local = cast("torch.Tensor", cast("Any", local).wait())
        index = self._local(local, shard, path)
        self._seen[id(tensor)] = (tensor, index)
        return index

    def _local(self, tensor: torch.Tensor, shard: ShardEntry | None, path: str) -> int:
        if type(tensor) not in _PLAIN_TENSORS or tensor.layout != torch.strided or tensor.is_meta:
            kind = f"{type(tensor).__name__} ({tensor.layout}, {tensor.device})"
            raise wrong(path, f"a {kind} has no plain bytes; give the tensors it is made of")
        if tensor.dtype not in _NAMES:
            raise wrong(path, f"tensors of {tensor.dtype} cannot be kept; convert it")
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        name = _NAMES[tensor.dtype]
        storage = tensor.untyped_storage()
        place = self._storages.setdefault(identity(storage), len(self.spans))
        if place == len(self.spans):
            self.spans.append(Span(storage, 0, 0))
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        if 0 in shape:
            offset, stride = 0, (0,) * len(shape)
        entry = TensorEntry(place, name, shape, stride, offset, str(tensor.device), shard)
        if entry.reach_bytes:
            self.spans[place].extend(offset * ITEM_BYTES[name], entry.reach_bytes)
        self.tensors.append(entry)
        return len(self.tensors) - 1


def identity(storage: torch.UntypedStorage) -> int:
    """A number that all tensors of a storage share, and no tensor of another storage, while the storage lives."""
    return cast("Any", storage)._cdata


def local_of(value: Any) -> Any:
    """The local part of a DTensor; any other value itself."""
    return getattr(value, "_local_tensor", value)


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(path, "text with half a character; give bytes") from None
    return value


def shard_entry(tensor: DTensor, path: str) -> ShardEntry:
    """Describes the whole tensor that the local part of ``tensor`` belongs to.

    Raises CheckpointError when ``tensor`` is a partial sum, or on a mesh without this rank.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise wrong(path, "a DTensor on a mesh without this rank; leave it out of this rank's state")
    words: list[str] = []
    for placement in tensor.placements:
        # _StridedShard is a subclass of Shard in some versions of torch only.
        strided = getattr(placement, "split_factor", None)
        if isinstance(placement, Replicate):
            words.append("R")
        elif strided is not None:
            words.append(f"_S({cast('Any', placement).dim}, {strided})")
        elif isinstance(placement, Shard):
            words.append(f"S({cast('Any', placement).dim})")
        else:
            raise wrong(path, f"a DTensor with placement {placement}, which is no state yet; reduce it first")
    offset: tuple[int, ...] = ()
    if not any(word.startswith("_S") for word in words):
        offset = tuple(compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)[1])
    return ShardEntry(
        global_shape=tuple(tensor.shape),
        offset=offset,
        mesh_shape=tuple(mesh.shape),
        mesh_names=tuple(mesh.mesh_dim_names or ()),
        coordinate=tuple(coordinate),
        placements=tuple(words),
    )


def placement_of(word: str) -> Placement:
    """The placement that a word of ``ShardEntry.placements`` stands for; CheckpointError: it is none."""
    axis, factor = split_of(word)
    if axis < 0:
        return Replicate()
    if not word.startswith("_"):
        return Shard(axis)
    from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

    return _StridedShard(axis, split_factor=factor)
