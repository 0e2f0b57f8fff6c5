"""A rank's state as two files: its tensors as safetensors, and all that safetensors cannot say as JSON.

The data of the safetensors file is the bytes of the state's storages, cut into pieces. A contiguous tensor is a piece
named by the path that leads to it in the state, so that any reader of safetensors finds it. A tensor that is not
contiguous is stored as the memory that it spans (``PATH#memory``), one row of elements; a dtype that safetensors lacks
is stored as bytes (``U8``, with one dimension more); bytes that no tensor covers are ``#bytes.STORAGE.START``. Tensors
that share memory are stored once. Pieces of larger elements come first, so that all are aligned.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from keepstep.checkpoint.header import (
    ALIGNMENT,
    ITEM_BYTES,
    MOST_HEADER_BYTES,
    StateHeader,
    TensorEntry,
    decode_header,
    encode_header,
    tensor_paths,
)
from keepstep.checkpoint.storage.manifest import Count, StoredFile, decode_own, with_own_checksum
from keepstep.core.errors import CheckpointError

FORMAT = "keepstep-shard"
VERSION = 1
MOST_SAFETENSORS_HEADER = 100_000_000  # the longest table that the safetensors library reads

SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
"""Names of the dtypes that every reader of safetensors knows, by torch's names."""


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """``nbytes`` bytes of a storage from ``start`` on; in the file, pieces follow each other without gaps."""

    storage: Count
    start: Count
    nbytes: Count


class NamedPiece(NamedTuple):
    """A piece with the name, dtype and shape that readers of safetensors see, and its alignment in bytes."""

    piece: Piece
    name: str
    dtype: str
    shape: tuple[int, ...]
    align: int


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a rank's JSON file.

    ``checksum`` is that of the content itself, so that the node which writes the manifest certifies no damage.
    """

    data: StoredFile  # size and checksum of the safetensors file
    begin: Annotated[int, msgspec.Meta(ge=8, le=8 + MOST_SAFETENSORS_HEADER)]  # offset of the first piece
    pieces: tuple[Piece, ...]
    state: msgspec.Raw  # the encoded StateHeader
    format: str = FORMAT
    version: int = VERSION
    checksum: str = ""


def cut(header: StateHeader) -> list[NamedPiece]:
    """Cut a state into pieces, in file order, which together cover each byte of each storage once."""
    claimed: list[list[NamedPiece]] = [[] for _ in header.storages]
    named = list(zip(header.tensors, tensor_paths(header), strict=True))
    for tensor, path in sorted(named, key=lambda one: not _contiguous(one[0])):
        _claim(claimed[tensor.storage], tensor, path)
    pieces: list[NamedPiece] = []
    for index, (storage, own) in enumerate(zip(header.storages, claimed, strict=True)):
        at = 0
        for one in [*own, None]:
            end = one.piece.start if one else storage.nbytes
            if end > at:
                gap = Piece(index, at, end - at)
                pieces.append(NamedPiece(gap, f"#bytes.{index}.{at}", "U8", (gap.nbytes,), 1))
            if one:
                pieces.append(one)
                at = one.piece.start + one.piece.nbytes
    return sorted(pieces, key=lambda one: -one.align)


class Entry(NamedTuple):
    """A tensor in the table of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def safetensors_header(header: StateHeader, pieces: list[NamedPiece]) -> bytes:
    """The bytes before the first piece of a rank's safetensors file."""
    about = {name: str(getattr(header, name)) for name in ("step", "incarnation", "rank", "world_size")}
    return safetensors_table(
        [Entry(one.name, one.dtype, one.shape, one.piece.nbytes) for one in pieces], about
    )


def safetensors_table(entries: list[Entry], about: dict[str, str]) -> bytes:
    """The bytes before the data of a safetensors file: the length of the table of tensors, and the table.

    Raises CheckpointError when the table is longer than readers of safetensors accept.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    at = 0
    for one in entries:
        name = one.name
        while name in table:
            name += "'"
        table[name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [at, at + one.nbytes]}
        at += one.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    if len(text) > MOST_SAFETENSORS_HEADER:
        raise CheckpointError(
            f"the table of {len(entries)} tensors takes {len(text)} bytes; readers of safetensors take "
            f"{MOST_SAFETENSORS_HEADER}"
        )
    return len(text).to_bytes(8, "little") + text


def encode_shard(header: StateHeader, begin: int, pieces: list[NamedPiece], data: StoredFile) -> bytes:
    """The content of a rank's JSON file; ``data`` describes its safetensors file."""
    shard = ShardFile(data, begin, tuple(one.piece for one in pieces), msgspec.Raw(encode_header(header)))
    return msgspec.json.encode(with_own_checksum(shard, msgspec.json.encode)) + b"\n"


def decode_shard(data: bytes, where: str) -> tuple[ShardFile, StateHeader]:
    """A rank's JSON file. Its pieces cover each byte of each storage once, and fill the safetensors file.

    Raises CheckpointError, which says what is wrong, for any other file.
    """
    shard = open_shard(data, where)
    try:
        header = decode_header(bytes(shard.state))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if shard.begin + sum(one.nbytes for one in shard.pieces) != shard.data.nbytes:
        raise CheckpointError(f"{where}: its pieces do not fill the safetensors file")
    if header.data_bytes > shard.data.nbytes + ALIGNMENT * len(header.storages):
        raise CheckpointError(f"{where}: claims more bytes of state than the safetensors file has")
    uneven = CheckpointError(f"{where}: its pieces overlap, leave bytes out or belong to no storage")
    reached = [0] * len(header.storages)
    for one in sorted(shard.pieces, key=lambda piece: (piece.storage, piece.start)):
        if one.storage >= len(reached) or one.start != reached[one.storage]:
            raise uneven
        reached[one.storage] += one.nbytes
    if reached != [storage.nbytes for storage in header.storages]:
        raise uneven
    return shard, header


def open_shard(data: bytes, where: str) -> ShardFile:
    """A rank's JSON file, with its checksum verified (CheckpointError) but its state not decoded."""
    if len(data) > 2 * MOST_HEADER_BYTES:
        raise CheckpointError(f"{where}: has {len(data)} bytes, more than any state's header")
    return decode_own(data, ShardFile, msgspec.json.encode, where)


def places(header: StateHeader, pieces: tuple[Piece, ...]) -> Iterator[tuple[int, int]]:
    """(offset, nbytes) of each piece in the state's data, in file order."""
    for one in pieces:
        yield header.storages[one.storage].offset + one.start, one.nbytes


def _contiguous(tensor: TensorEntry) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and step != expected:
            return 0 in tensor.shape
        expected *= size
    return True


def _claim(claimed: list[NamedPiece], tensor: TensorEntry, path: str) -> None:
    """Make the tensor a piece of its storage unless it overlaps a piece; ``claimed`` stays in order."""
    size = ITEM_BYTES[tensor.dtype]
    start = tensor.offset * size if 0 not in tensor.shape else 0
    nbytes = tensor.reach_bytes - start if 0 not in tensor.shape else 0
    at = bisect.bisect_left(claimed, (start, nbytes), key=lambda one: (one.piece.start, one.piece.nbytes))
    before = claimed[at - 1].piece if at else Piece(0, 0, 0)
    behind = next((one.piece for one in claimed[at:] if one.piece.nbytes), None)
    if nbytes and (before.start + before.nbytes > start or (behind and behind.start < start + nbytes)):
        return
    known = SAFETENSORS.get(tensor.dtype)
    shape, name = (tensor.shape, path) if _contiguous(tensor) else ((nbytes // size,), f"{path}#memory")
    claimed.insert(
        at,
        NamedPiece(
            piece=Piece(tensor.storage, start, nbytes),
            name=name,
            dtype=known or "U8",
            shape=shape if known else (*shape, size),
            align=size if known else 1,
        ),
    )
