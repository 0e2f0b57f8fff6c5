"""The header of a snapshot: a tree of plain values, and the place of each tensor's bytes.

A state is any nesting of dicts, lists, tuples, plain Python values and tensors. Its bytes are the storages of its
tensors, one behind the other (each begins at a multiple of 64). Everything else is a `StateHeader`, kept as JSON. The
JSON claims no lengths, so reading it allocates in proportion to its own size, whatever it says; and it names no code.

In the tree None, bool, str, finite floats, 64-bit integers and dicts whose keys are strings stand for themselves; any
other value is a list that begins with a tag::

    ["list", ...] ["tuple", ...] ["set", ...] ["frozenset", ...]     ["dict", [key, value], ...]
    ["ordered", metadata, [key, value], ...]                          an OrderedDict and its ``_metadata``
    ["int", "-0x1f"] ["float", "nan"] ["complex", real, imag] ["bytes", "base64"]
    ["tensor", i] ["array", i] ["scalar", i]                          entry i of ``tensors``; numpy's array and scalar
    ["dtype", "bfloat16"] ["size", 2, 3] ["device", "cuda:0"]         values of torch

This module does not import torch, because launcher and agent read headers, too.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, cast

import msgspec

from keepstep.core.errors import CheckpointError

VERSION = 1
ALIGNMENT = 64
MOST_HEADER_BYTES = 1 << 28
MOST_DEPTH = 100
MOST_DIMENSIONS = 64
MOST_BYTES = 1 << 56  # limit for one storage, and for all together

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element by dtype, as torch names it."""

_PLACEMENT = re.compile(r"R|(_?)S\((\d{1,2})(?:, (\d{1,9}))?\)", re.ASCII)

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
Word = Annotated[int, msgspec.Meta(ge=0)]
Packed = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Counts = tuple[Count, ...]


class StorageEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The bytes of one storage that its tensors reach, and their CRC-64/NVME, which is 0 until they are copied."""

    offset: Count  # offset in the data of the snapshot
    nbytes: Count
    checksum: Word = 0


class ShardEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Describes the whole tensor that a rank's tensor is the local part of (a DTensor).

    Attributes:
        global_shape: shape of the whole tensor.
        offset: first index of the local part in the whole; () when the local part is not one block of it.
        mesh_shape: shape of the device mesh.
        mesh_names: names of the mesh's dimensions; () when it has none.
        coordinate: this rank's place in the mesh.
        placements: one word per mesh dimension: "R", "S(dim)" or "_S(dim, split_factor)".
    """

    global_shape: Counts
    offset: Counts
    mesh_shape: Counts
    mesh_names: tuple[str, ...]
    coordinate: Counts
    placements: tuple[str, ...]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor in a storage, or a DTensor's local part. ``shape``, ``stride`` and ``offset`` count elements."""

    storage: Count
    dtype: str
    shape: Counts
    stride: Counts
    offset: Count  # offset in the storage entry
    device: str = "cpu"  # the tensor's device when it was saved
    shard: ShardEntry | None = None

    @property
    def reach_bytes(self) -> int:
        """Bytes from the beginning of the storage entry to the end of the last element; 0 without elements."""
        if 0 in self.shape:
            return 0
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * ITEM_BYTES[self.dtype]


class StateHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in a snapshot of one rank but the bytes of its storages."""

    step: Count
    incarnation: Count
    rank: Count
    world_size: Count
    layout: str  # the job's layout as ``ParallelLayout`` writes it; "" when not known
    data_bytes: Count  # length of all storages with the gaps between them
    tree: Any
    storages: tuple[StorageEntry, ...]
    tensors: tuple[TensorEntry, ...]
    version: int = VERSION
    # Storages that belong together: of a parameter, first, and of what its optimizer keeps for it.
    families: tuple[Counts, ...] = ()
    decaying: Counts = ()  # those of the families that weight decay may change without a gradient
    # What a rank knows of itself stays at the end, where `RankSlots.digest` leaves it out.
    first: bool = False  # whether no snapshot of this training was known to be whole on all ranks before
    moment: Packed = 0  # when the rank saved, as `matching.Moment` packs it; 0: not known


def encode_header(header: StateHeader) -> bytes:
    """The header as JSON. Raises CheckpointError when it would be longer than any reader accepts."""
    data = msgspec.json.encode(header)
    if len(data) > MOST_HEADER_BYTES:
        raise CheckpointError(
            f"the header of the state takes {len(data)} bytes, at most {MOST_HEADER_BYTES} are possible: "
            "keep bulk data in tensors"
        )
    return data


_decoder = msgspec.json.Decoder(StateHeader)


def decode_header(data: bytes | bytearray | memoryview) -> StateHeader:
    """The header that `encode_header` wrote, checked: whatever it refers to is there and inside ``data_bytes``.

    Raises CheckpointError when ``data`` is anything else.
    """
    if len(data) > MOST_HEADER_BYTES:
        raise CheckpointError(f"a header of {len(data)} bytes; at most {MOST_HEADER_BYTES} are possible")
    try:
        header = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"no header of a snapshot: {error}") from None
    if header.version != VERSION:
        raise CheckpointError(
            f"a header of version {header.version}, this keepstep reads {VERSION}: "
            "restore with the version that saved"
        )
    _check_storages(header)
    for index, tensor in enumerate(header.tensors):
        _check_tensor(header, index, tensor)
    for _ in references(header):
        pass
    _check_families(header)
    return header


def with_checksums(header: StateHeader, checksums: tuple[int, ...]) -> StateHeader:
    """The header with the checksums of its storages, in order. Raises CheckpointError for another count."""
    if len(checksums) != len(header.storages):
        raise CheckpointError(f"{len(checksums)} checksums for {len(header.storages)} storages")
    storages = tuple(
        StorageEntry(entry.offset, entry.nbytes, checksum)
        for entry, checksum in zip(header.storages, checksums, strict=True)
    )
    return msgspec.structs.replace(header, storages=storages)


def references(header: StateHeader) -> Iterator[tuple[str, str, int]]:
    """(path, tag, index) of each tensor, array and scalar, in the order of the tree.

    A path is written as the keys that lead there, joined by dots: ``model.layers.0.weight``. Raises
    CheckpointError when the tree breaks the format that this module describes.
    """
    yield from _references(header.tree, "", len(header.tensors), 0)


def tensor_paths(header: StateHeader) -> tuple[str, ...]:
    """A unique name for each entry of ``tensors``: the first path that leads to it, with ``#2``, ``#3``… if taken.

    Raises CheckpointError when the tree is not sound.
    """
    found: dict[int, str] = {}
    used: dict[str, int] = {}
    for path, _, index in references(header):
        if index in found:
            continue
        name = path or "state"
        while name in used:
            used[path] = used.get(path, 1) + 1
            name = f"{path or 'state'}#{used[path]}"
        used.setdefault(name, 1)
        found[index] = name
    return tuple(found.get(index, f"unnamed#{index}") for index in range(len(header.tensors)))


def _check_storages(header: StateHeader) -> None:
    end = 0
    for index, entry in enumerate(header.storages):
        if entry.offset % ALIGNMENT or entry.offset < end:
            raise CheckpointError(f"storage {index} of the header begins inside another, or is not aligned")
        if entry.checksum >= 1 << 64:
            raise CheckpointError(f"storage {index} of the header has a checksum of more than 64 bits")
        end = entry.offset + entry.nbytes
    if end > header.data_bytes:
        raise CheckpointError(
            f"the storages of the header end at {end}, behind its {header.data_bytes} bytes"
        )


def _check_families(header: StateHeader) -> None:
    numbers = [number for family in header.families for number in family]
    if len(set(numbers)) < len(numbers) or max(numbers, default=-1) >= len(header.storages):
        raise CheckpointError("a family of the header names a storage twice, or one that is not there")
    if not all(header.families) or max(header.decaying, default=-1) >= len(header.families):
        raise CheckpointError("a family of the header is empty, or one is said to decay that is not there")


def _check_tensor(header: StateHeader, index: int, tensor: TensorEntry) -> None:
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"tensor {index} of the header {why}")

    if tensor.dtype not in ITEM_BYTES:
        raise refuse(f"has dtype {tensor.dtype[:40]!r}, which this keepstep does not know")
    if tensor.storage >= len(header.storages):
        raise refuse(f"refers to storage {tensor.storage} of {len(header.storages)}")
    if len(tensor.shape) != len(tensor.stride) or len(tensor.shape) > MOST_DIMENSIONS:
        raise refuse(f"has {len(tensor.shape)} sizes and {len(tensor.stride)} strides")
    # Sizes of 0 count as 1, as they do when torch computes strides.
    numel = math.prod(size or 1 for size in tensor.shape)
    if numel > MOST_BYTES or tensor.reach_bytes > header.storages[tensor.storage].nbytes:
        raise refuse("reaches behind its storage")
    shard = tensor.shard
    if shard is None:
        return
    dimensions = len(shard.mesh_shape)
    if len(shard.global_shape) != len(tensor.shape) or len(shard.offset) not in (0, len(tensor.shape)):
        raise refuse("and its shard entry have different numbers of dimensions")
    if not len(shard.coordinate) == len(shard.placements) == dimensions <= MOST_DIMENSIONS:
        raise refuse("has a shard entry whose mesh, coordinate and placements differ in length")
    if shard.mesh_names and len(shard.mesh_names) != dimensions:
        raise refuse("has a shard entry with more or fewer names than mesh dimensions")


def _references(node: Any, path: str, tensors: int, depth: int) -> Iterator[tuple[str, str, int]]:
    if node is None or isinstance(node, str | bool | float):
        return
    if isinstance(node, int):
        if not -(1 << 63) <= node < 1 << 64:
            raise wrong(path, "an integer of more than 64 bits without its tag")
        return
    if depth > MOST_DEPTH:
        raise CheckpointError(f"{path[:200]}: nested deeper than {MOST_DEPTH}")
    if isinstance(node, dict):
        for key, value in cast("dict[str, Any]", node).items():
            yield from _references(value, join(path, key), tensors, depth + 1)
        return
    tag, items = _tagged(node, path)
    if tag in ("tensor", "array", "scalar"):
        if len(items) != 1 or type(items[0]) is not int or not 0 <= items[0] < tensors:
            raise wrong(path, "refers to no tensor of the header")
        yield path, tag, items[0]
    elif tag in ("list", "tuple", "set", "frozenset"):
        for index, item in enumerate(items):
            yield from _references(item, join(path, str(index)), tensors, depth + 1)
    elif tag in ("dict", "ordered"):
        pairs = items[1:] if tag == "ordered" else items
        if (tag == "ordered" and not items) or any(not isinstance(p, list) or len(p) != 2 for p in pairs):  # pyright: ignore[reportUnknownArgumentType]
            raise wrong(path, "a dict of something else than pairs")
        for pair in pairs:
            for _ in _references(pair[0], path, 0, depth + 1):
                raise AssertionError  # cannot happen: with 0 tensors any reference in a key was refused
            yield from _references(pair[1], join(path, key_text(pair[0])), tensors, depth + 1)
        if tag == "ordered":
            yield from _references(items[0], join(path, "_metadata"), 0, depth + 1)
    else:
        plain_value(tag, items, path)


def _tagged(node: Any, path: str) -> tuple[str, list[Any]]:
    if isinstance(node, list) and node and isinstance(node[0], str):
        items = cast("list[Any]", node)
        return cast("str", items[0]), items[1:]
    raise wrong(path, "neither a plain value nor a list that begins with a tag")


def plain_value(tag: str, items: list[Any], path: str) -> Any:
    """The value behind an ``int``, ``float``, ``complex`` or ``bytes`` tag; for torch's tags the name or sizes.

    Raises CheckpointError when the tag is not known, or its items are wrong.
    """
    try:
        match tag, items:
            case "int", [str(text)]:
                return int(text, 16)
            case "float", [("nan" | "inf" | "-inf") as text]:
                return float(text)
            case "complex", [real, imag]:
                return complex(_part(real), _part(imag))
            case "bytes", [str(text)]:
                return base64.b64decode(text, validate=True)
            case "dtype", [str(name)] if name in ITEM_BYTES:
                return name
            case "device", [str(name)] if len(name) <= 40:
                return name
            case "size", sizes if all(type(n) is int and 0 <= n <= MOST_BYTES for n in sizes):
                return tuple(sizes)
            case _:
                pass
    except (ValueError, binascii.Error):
        pass
    raise wrong(path, f"a {tag[:40]!r} that this keepstep cannot read")


def _part(node: Any) -> float:
    if type(node) is float:
        return node
    tag, items = _tagged(node, "")
    if tag != "float":
        raise ValueError(tag)
    return plain_value(tag, items, "")


def split_of(word: str) -> tuple[int, int]:
    """The axis that a word of ``ShardEntry.placements`` splits (-1: none) and its factor, 1: a plain split.

    Raises CheckpointError when the word is no placement.
    """
    found = _PLACEMENT.fullmatch(word)
    if found is None or bool(found[1]) != bool(int(found[3] or 0)):
        raise CheckpointError(f"a placement {word[:40]!r}, which this keepstep does not know")
    return (-1, 1) if word == "R" else (int(found[2]), int(found[3] or 0) or 1)


def wrong(path: str, why: str) -> CheckpointError:
    """The error about a value of a state, which is at ``path``."""
    return CheckpointError(f"{path or 'the state'}: {why}")


def join(path: str, key: str) -> str:
    """The path of the value under ``key`` in the dict at ``path``."""
    return f"{path}.{key}" if path else key


def key_text(node: Any) -> str:
    """The word in a path for a dict's key, given as a node of the tree."""
    if isinstance(node, list):
        items = cast("list[Any]", node)[1:]
        return "(" + ",".join(key_text(item) for item in items) + ")"
    return str(node)
