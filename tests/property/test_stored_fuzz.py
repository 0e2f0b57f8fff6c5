"""Hostile and damaged files on storage: a CheckpointError or nothing; no crash, no wrong state, no path outside."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.unit.checkpoint.stored_states import rebuilt, same, sample_state, taken

from keepstep.checkpoint.header import ALIGNMENT
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.backend import Bytes, Readable
from keepstep.checkpoint.storage.manifest import (
    MANIFEST,
    Manifest,
    decode_manifest,
    encode_manifest,
    folder_name,
)
from keepstep.checkpoint.storage.persist import conclude, write_shard
from keepstep.checkpoint.storage.read import header_of, look, read_shard, verify
from keepstep.checkpoint.storage.shard_file import ShardFile, decode_shard
from keepstep.core.errors import CheckpointError

KEY = Key(0, 7)
FOLDER = folder_name(KEY)
RANK = "rank-00000.json"


class MemoryStorage:
    """One folder in memory."""

    where = "memory"

    def __init__(self, content: dict[str, bytes] | None = None) -> None:
        self.content = dict(content or {})

    def folders(self) -> list[str]:
        return [FOLDER]

    def files(self, folder: str) -> dict[str, int]:
        return {name: len(content) for name, content in self.content.items()}

    def open(self, folder: str, name: str) -> Readable:
        if name not in self.content:
            raise FileNotFoundError(2, "is not there", name)
        return cast("Readable", io.BytesIO(self.content[name]))

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        self.content[name] = b"".join(chunks)
        return len(self.content[name])

    def remove(self, folder: str, names: Iterable[str]) -> None:
        for name in names:
            self.content.pop(name, None)

    def remove_folder(self, folder: str) -> None:
        self.content.clear()


def made() -> dict[str, bytes]:
    storage = MemoryStorage()
    header, data = taken(sample_state(), 7)
    write_shard(storage, header, memoryview(data))
    conclude(storage, KEY, [0], 1, leader=True)
    return storage.content


SOUND = made()
STATE = sample_state()


def restored(content: dict[str, bytes]) -> Any:
    """The state, or None when it is refused."""
    storage = MemoryStorage(content)
    step = look(storage, KEY)
    assert all("\n" not in line for line in step.problems)
    if not step.manifest or step.problems:
        return None
    try:
        _, header = header_of(storage, step.manifest, 0)
        assert (
            header.data_bytes <= sum(map(len, content.values())) + 100 * ALIGNMENT
        )  # before any is allocated
        shard = read_shard(storage, step.manifest, 0)
    except CheckpointError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assert list(verify(storage, step.manifest)) or content[RANK] != SOUND[RANK]
        return None
    return rebuilt(shard.header, shard.data)


@settings(max_examples=many(400), deadline=None)
@given(st.sampled_from(sorted(SOUND)), st.randoms(use_true_random=False), st.integers(1, 4))
def test_damaged_bytes_are_never_accepted(name: str, chance: random.Random, edits: int) -> None:
    content = bytearray(SOUND[name])
    for _ in range(edits):
        at = chance.randrange(len(content) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            del content[at:]
        elif kind == 1:
            content[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif kind == 2:
            del content[at : at + chance.randrange(1, 9)]
        elif at < len(content):
            content[at] ^= 1 << chance.randrange(8)
        content = content or bytearray(b"x")
    found = restored({**SOUND, name: bytes(content)})
    assert found is None or same(found, STATE)
    if content != SOUND[name] and name != MANIFEST:
        assert found is None


def signed(shard: dict[str, Any]) -> dict[str, bytes]:
    """The files with this JSON for rank 0, every checksum made to fit, as one would who means harm."""
    try:
        own = msgspec.convert(
            {**shard, "state": msgspec.Raw(json.dumps(shard["state"]).encode()), "checksum": ""}, ShardFile
        )
    except msgspec.ValidationError:
        return {}
    sha = hashlib.sha256(msgspec.json.encode(own)).hexdigest()
    text = msgspec.json.encode(msgspec.structs.replace(own, checksum=sha))
    manifest = decode_manifest(SOUND[MANIFEST], FOLDER)
    entry = msgspec.structs.replace(
        manifest.files[RANK], nbytes=len(text), sha256=hashlib.sha256(text).hexdigest()
    )
    files = {**manifest.files, RANK: entry}
    return {**SOUND, RANK: text, MANIFEST: encode_manifest(msgspec.structs.replace(manifest, files=files))}


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(deep for key, value in inside for deep in places(value, (*path, key)))]


PLACES = [path for path in places(json.loads(SOUND[RANK])) if path]
ODD = st.sampled_from(
    [0, 1, -1, 1 << 40, (1 << 56), 1 << 63, 1 << 70, 0.5, None, "", "x", [], {}, [0], ["tensor", 0], True]
)


@settings(max_examples=many(400), deadline=None)
@given(st.sampled_from(PLACES), ODD)
def test_files_meant_to_harm_are_refused_or_harmless(path: tuple[Any, ...], odd: Any) -> None:
    shard = json.loads(SOUND[RANK])
    node = shard
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = odd
    content = signed(shard)
    if content:
        with contextlib.suppress(CheckpointError):  # what makes no state is refused when it is built
            restored(content)


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "..",
    ".hidden",
    "",
    "x" * 101,
    "a\x00b",
    "a\nb",
    "Rank",
    MANIFEST,
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    manifest = decode_manifest(SOUND[MANIFEST], FOLDER)
    entry = next(iter(manifest.files.values()))
    text = encode_manifest(msgspec.structs.replace(manifest, files={**manifest.files, name: entry}))
    with pytest.raises(CheckpointError, match=r"is no name of a checkpoint's file|names itself") as told:
        decode_manifest(text, FOLDER)
    assert "\n" not in str(told.value)


CHANGES: dict[str, Callable[[Manifest], Manifest]] = {
    "is that of step 8": lambda m: msgspec.structs.replace(m, step=8),
    "is that of step 7 .incarnation 1": lambda m: msgspec.structs.replace(m, incarnation=1),
    "names 2 files for 3 ranks": lambda m: msgspec.structs.replace(m, world_size=3),
    "has format 'other' 1": lambda m: msgspec.structs.replace(m, format="other"),
    "has format 'keepstep-checkpoint' 2": lambda m: msgspec.structs.replace(m, version=2),
    "lacks rank-00000.safetensors": lambda m: msgspec.structs.replace(
        m, files={"a": m.files[RANK], "b": m.files[RANK]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", CHANGES)
def test_manifests_that_contradict_themselves_are_refused(said: str) -> None:
    text = encode_manifest(CHANGES[said](decode_manifest(SOUND[MANIFEST], FOLDER)))
    with pytest.raises(CheckpointError, match=said):
        decode_manifest(text, FOLDER)


@pytest.mark.parametrize(
    "text", [b"", b"[" * 100_000, b'{"step":' * 50_000, b"\xff\xfe", b"null", b'{"step": 1e999}']
)
def test_texts_that_are_no_manifest_are_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode_manifest(text, FOLDER)
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode_shard(text, RANK)
