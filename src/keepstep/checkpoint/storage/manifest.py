"""The manifest, which says that a step is whole on storage: JSON, written last, with size and checksum of every file.

A step's folder ``step-0000018422-i0003`` (step 18422 as incarnation 3 of the job reached it) holds for every rank
``rank-00003.safetensors`` and ``rank-00003.json``, and ``manifest.json``. The checksums are those of ``sha256sum``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from keepstep.checkpoint.memory.slot import MOST_RANKS
from keepstep.checkpoint.memory.slots import LAST_INCARNATION, LAST_STEP, Key
from keepstep.checkpoint.storage.backend import safe_name
from keepstep.core.errors import CheckpointError

MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 256 << 20  # the manifest of a million ranks is smaller
VERSION = 1
FORMAT = "keepstep-checkpoint"

_FOLDER = re.compile(r"step-(\d{10,15})-i(\d{4,5})")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
HexDigest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's size in bytes and SHA-256 in hexadecimal digits."""

    nbytes: Count
    sha256: HexDigest


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of one step but the manifest itself, by name.

    ``checksum`` is the SHA-256 of the manifest with an empty ``checksum``.
    """

    step: Annotated[int, msgspec.Meta(ge=0, le=LAST_STEP)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=LAST_INCARNATION)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    files: dict[str, StoredFile]
    format: str = FORMAT
    version: int = VERSION
    checksum: str = ""

    @property
    def key(self) -> Key:
        return Key(self.incarnation, self.step)

    @property
    def nbytes(self) -> int:
        """Size of all files of the step but the manifest."""
        return sum(one.nbytes for one in self.files.values())


def key_of(folder: str) -> Key | None:
    """The key of the step that a folder is named after; None for other folders."""
    match = _FOLDER.fullmatch(folder)
    if not match:
        return None
    key = Key(incarnation=int(match[2]), step=int(match[1]))
    return key if folder_name(key) == folder and key.fits else None


def folder_name(key: Key) -> str:
    """Name of a step's folder: ``step-0000018422-i0003``."""
    return f"step-{key.step:010d}-i{key.incarnation:04d}"


def key_text(key: Key) -> str:
    """The name of a step for messages: ``step 18422 (incarnation 3)``."""
    return f"step {key.step} (incarnation {key.incarnation})"


def data_file(rank: int) -> str:
    """Name of a rank's tensors: ``rank-00003.safetensors``."""
    return f"rank-{rank:05d}.safetensors"


def header_file(rank: int) -> str:
    """Name of the JSON file that describes a rank's tensors: ``rank-00003.json``."""
    return f"rank-{rank:05d}.json"


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, files in order, with its checksum."""
    return _text(with_own_checksum(manifest, _text))


def _text(manifest: Manifest) -> bytes:
    ordered = msgspec.structs.replace(manifest, files=dict(sorted(manifest.files.items())))
    return msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n"


def with_own_checksum(content: _Struct, text: Callable[[_Struct], bytes]) -> _Struct:
    """``content`` with the SHA-256 of its own text, as ``text`` writes it while ``checksum`` is empty."""
    empty = msgspec.structs.replace(content, checksum="")
    return msgspec.structs.replace(content, checksum=stored_file(text(empty)).sha256)


def decode_own(data: bytes, kind: type[_Struct], text: Callable[[_Struct], bytes], where: str) -> _Struct:
    """A file of keepstep's that names its format and version and holds its own checksum (`with_own_checksum`).

    Raises:
        CheckpointError: the file cannot be read, is of another format, or was changed; ``where`` names it.
    """
    try:
        found: Any = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where}: cannot be read: {str(error)[:200]}") from None
    known = {one.name: one.default for one in msgspec.structs.fields(kind)}
    if (found.format, found.version) != (known["format"], known["version"]):
        raise CheckpointError(
            f"{where}: has format {found.format[:40]!r} {found.version}, "
            f"this keepstep reads {known['format']!r} {known['version']}"
        )
    if found.checksum != with_own_checksum(found, text).checksum:
        raise CheckpointError(f"{where}: was changed since it was written: its own checksum does not fit")
    return found


def decode_manifest(data: bytes, folder: str) -> Manifest:
    """The manifest in a file from outside: names harmless, files of all ranks listed, and of this folder.

    Raises CheckpointError, which says what is wrong, for any other content.
    """
    where = f"{folder}/{MANIFEST}"
    found = decode_own(data, Manifest, _text, where)
    if key_of(folder) != found.key:
        raise CheckpointError(f"{where}: is that of {key_text(found.key)}, not of its folder")
    for name in found.files:
        safe_name(name)
    if MANIFEST in found.files:
        raise CheckpointError(f"{where}: names itself")
    if len(found.files) < 2 * found.world_size:
        raise CheckpointError(f"{where}: names {len(found.files)} files for {found.world_size} ranks")
    for rank in range(found.world_size):
        for name in (data_file(rank), header_file(rank)):
            if name not in found.files:
                raise CheckpointError(f"{where}: lacks {name}")
    return found


def differences(manifest: Manifest, files: Mapping[str, int]) -> list[str]:
    """A line for each file of a folder's listing (sizes by name) that is not as the manifest says."""
    folder = folder_name(manifest.key)
    found = [f"{folder}/{name}: foreign, the manifest does not name it" for name in sorted(files)
             if name not in manifest.files and name != MANIFEST]  # fmt: skip
    for name, stored in manifest.files.items():
        if name not in files:
            found.append(f"{folder}/{name}: missing")
        elif files[name] != stored.nbytes:
            found.append(f"{folder}/{name}: has {files[name]} bytes instead of {stored.nbytes}")
    return found


def stored_file(content: bytes) -> StoredFile:
    """Size and checksum of a file with this content."""
    return StoredFile(len(content), hashlib.sha256(content, usedforsecurity=False).hexdigest())
