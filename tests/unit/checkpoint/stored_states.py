"""States of ranks as headers and bytes, and storages to put them on, for the tests of what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from keepstep.checkpoint import native
from keepstep.checkpoint.header import StateHeader, with_checksums
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.state import flatten, laid_out, unflatten
from keepstep.checkpoint.storage.backend import Storage
from keepstep.checkpoint.storage.manifest import folder_name
from keepstep.checkpoint.storage.read import StoredShard, read_shard, scan
from keepstep.core.errors import CheckpointError


def sample_state(seed: int = 0) -> dict[str, Any]:
    """Nested, of many dtypes and strides, with shared memory, zero-sized tensors and plain values."""
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(17, 5, generator=made)
    flat = torch.randn(40, generator=made, dtype=torch.float64)
    return {
        "model": {"weight": weight, "tied": weight, "transposed": torch.randn(6, 3, generator=made).t(),
                  "bf16": torch.randn(7, generator=made).bfloat16(),
                  "empty": torch.zeros(0, 4), "scalar": torch.tensor(3)},
        "flat": flat, "views": [flat[:10].view(2, 5), flat[10:13], flat[::2]],
        "late": torch.arange(100, dtype=torch.int16)[90:],
        "odd": {"c128": torch.randn(3, generator=made, dtype=torch.complex128),
                "fp8": torch.randn(9, generator=made).to(torch.float8_e4m3fnuz),
                "bool": torch.rand(11, generator=made) > 0.5},
        "optimizer": {"state": {0: {"step": torch.tensor(9.0), "exp_avg": torch.randn(17, 5, generator=made)}},
                      "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "nan": float("nan"), "big": 1 << 90}]},
        "rng": torch.get_rng_state(),
    }  # fmt: skip


def taken(
    state: Any, step: int, rank: int = 0, world_size: int = 1, incarnation: int = 0
) -> tuple[StateHeader, bytes]:
    """Header and bytes of a state, as a snapshot has them."""
    header, spans = flatten(state, step=step, rank=rank, world_size=world_size, incarnation=incarnation)
    data = laid_out(header, spans).numpy().tobytes()
    sums = [native.checksum(data[one.offset : one.offset + one.nbytes]) for one in header.storages]
    return with_checksums(header, tuple(sums)), data


def rebuilt(header: StateHeader, data: memoryview | bytes) -> Any:
    """The state that header and bytes stand for."""
    whole = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)
    storages = [whole[one.offset : one.offset + one.nbytes].clone() for one in header.storages]
    return unflatten(header, storages)


def same(a: Any, b: Any) -> bool:
    """Whether two states are alike to the last bit, shapes, dtypes and strides included."""
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape) or (a.numel() and a.stride() != b.stride()):
            return False
        return a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


class Cache:
    """A node's cache: sealed states by step and rank."""

    def __init__(self) -> None:
        self.sealed: dict[tuple[Key, int], tuple[StateHeader, bytes]] = {}

    def seal(self, key: Key, rank: int, world_size: int, state: Any) -> None:
        self.sealed[key, rank] = taken(state, key.step, rank, world_size, key.incarnation)

    @contextmanager
    def source(self, key: Key, rank: int) -> Iterator[tuple[StateHeader, memoryview]]:
        header, data = self.sealed[key, rank]
        yield header, memoryview(data)


def newest(storage: Storage, rank: int, *, world_size: int) -> tuple[StoredShard | None, list[str]]:
    """The newest step whose part of this rank is sound, and why newer ones are not."""
    refused: list[str] = []
    for step in scan(storage):
        if step.manifest is None or step.problems:
            refused.extend(step.problems[:1])
        elif step.manifest.world_size != world_size:
            refused.append(
                f"{folder_name(step.key)}: was saved by {step.manifest.world_size} ranks, the job has {world_size}"
            )
        else:
            try:
                return read_shard(storage, step.manifest, rank), refused
            except CheckpointError as error:
                refused.append(str(error))
    return None, refused
