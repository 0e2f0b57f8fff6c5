"""The indices of a local part against what torch's own placements cut out of a row of indices."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from keepstep.checkpoint.header import ShardEntry
from keepstep.checkpoint.storage.global_view import local_runs


def indices(size: int, counts: tuple[int, ...], at: tuple[int, ...], words: tuple[str, ...]) -> list[int]:
    (runs,) = local_runs(ShardEntry((size,), (), counts, (), at, words))
    assert all(count > 0 for _, count in runs)
    return [start + step for start, count in runs for step in range(count)]


@settings(deadline=None)
@given(
    size=st.integers(0, 2),
    mesh=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 2, 4])), min_size=1, max_size=3),
)
def test_runs_are_those_of_torch(size: int, mesh: list[tuple[int, int]]) -> None:
    counts = tuple(count for count, _ in mesh)
    size *= math.prod(
        count * max(factor, 1) for count, factor in mesh
    )  # with uneven parts torch's order of splits is not that of FSDP2
    words = tuple("R" if not factor else "S(0)" if factor == 1 else f"_S(0, {factor})" for _, factor in mesh)
    for at in itertools.product(*map(range, counts)):
        whole = torch.arange(size)
        for (count, factor), index in zip(mesh, at, strict=True):
            if factor:
                placement: Any = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
                whole = placement._split_tensor(whole, count, with_padding=False)[0][index]
        assert indices(size, counts, at, words) == whole.tolist()


@settings(deadline=None)
@given(size=st.integers(0, 40), replicas=st.integers(1, 5), parts=st.integers(2, 4))
def test_fsdp_splits_what_tensor_parallelism_left(size: int, replicas: int, parts: int) -> None:
    for at in itertools.product(range(replicas), range(parts)):
        whole = torch.arange(size)
        for count, index in ((parts, at[1]), (replicas, at[0])):
            whole = Shard(0)._split_tensor(whole, count, with_padding=False)[0][index]
        assert indices(size, (replicas, parts), at, (f"_S(0, {parts})", "S(0)")) == whole.tolist()


@settings(deadline=None)
@given(size=st.integers(0, 70), count=st.integers(1, 5), factor=st.integers(2, 6))
def test_uneven_parts_alone(size: int, count: int, factor: int) -> None:
    for at in range(count):
        split = _StridedShard(0, split_factor=factor)._split_tensor(
            torch.arange(size), count, with_padding=False
        )
        assert indices(size, (count,), (at,), (f"_S(0, {factor})",)) == split[0][at].tolist()
