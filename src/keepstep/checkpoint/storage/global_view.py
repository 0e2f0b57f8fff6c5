"""Puts the tensors of the whole job together from the headers of all ranks: which bytes of a rank go where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from keepstep.checkpoint.header import ShardEntry, StateHeader, TensorEntry, split_of, tensor_paths
from keepstep.core.errors import CheckpointError

MOST_RUNS = 4096
MOST_BLOCKS = 1 << 20

Run = tuple[int, int]
"""First index and count of neighbouring indices."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a sharded tensor that one rank holds.

    Attributes:
        tensor: index of the tensor in the rank's header.
        local: first index of the block in the rank's local part, by dimension.
        whole: first index of the block in the whole tensor.
        sizes: number of elements in each dimension.
    """

    rank: int
    tensor: int
    local: tuple[int, ...]
    whole: tuple[int, ...]
    sizes: tuple[int, ...]

    def slices(self, begin: tuple[int, ...]) -> tuple[slice, ...]:
        """Index for the block's elements in an array in which they begin at ``begin``: ``local`` or ``whole``."""
        return tuple(slice(at, at + size) for at, size in zip(begin, self.sizes, strict=True))


@dataclass(slots=True)
class WholeTensor:
    """A tensor of the job; its blocks cover it without overlap."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: list[Block] = field(default_factory=list[Block])


def whole_tensors(
    headers: Sequence[StateHeader], fingerprint: Callable[[int, int], bytes]
) -> dict[str, WholeTensor]:
    """All tensors of the job by name, in the order in which ranks name them.

    A part that several ranks hold is taken from the lowest of them. A tensor that is not sharded and differs between
    ranks (random number states, say) is there once for each different content: that of the lowest rank under its own
    name, those of others as ``NAME@rank3``.

    ``fingerprint`` gives a hash of a tensor's content, from a rank and the index in the rank's header.

    Raises:
        CheckpointError: parts of one tensor contradict each other, or do not cover it.
    """
    found: dict[str, WholeTensor] = {}
    starts: dict[str, set[tuple[int, ...]]] = {}
    contents: dict[str, list[bytes]] = {}
    for rank, header in enumerate(headers):
        for index, (tensor, path) in enumerate(zip(header.tensors, tensor_paths(header), strict=True)):
            shape = tensor.shard.global_shape if tensor.shard else tensor.shape
            whole = found.get(path)
            if not tensor.shard:
                content = f"{tensor.dtype}{shape}".encode() + fingerprint(rank, index)
                if content in contents.setdefault(path, []):
                    continue
                contents[path].append(content)
                name = path if whole is None else f"{path}@rank{rank}"
                zeros = (0,) * len(shape)
                found[name] = WholeTensor(
                    name, tensor.dtype, shape, [Block(rank, index, zeros, zeros, shape)]
                )
                continue
            if whole is None:
                whole = found[path] = WholeTensor(path, tensor.dtype, shape)
            if (whole.dtype, whole.shape) != (tensor.dtype, shape) or path in contents:
                raise CheckpointError(
                    f"{path}: rank {rank} has another shape or dtype of it than lower ranks"
                )
            for block in _blocks(rank, index, tensor, tensor.shard):
                if block.whole not in starts.setdefault(path, set()):
                    starts[path].add(block.whole)
                    whole.blocks.append(block)
    for path in starts:
        shape, blocks = found[path].shape, found[path].blocks
        wanted, have = math.prod(shape), sum(math.prod(block.sizes) for block in blocks)
        if wanted != have:
            raise CheckpointError(
                f"{path}: the ranks' parts have {have} of its {wanted} elements; a rank's part is missing"
            )
    return found


def _blocks(rank: int, index: int, tensor: TensorEntry, shard: ShardEntry) -> Iterator[Block]:
    # `DcpWriter` gives a block's place without a mesh.
    if shard.offset and not shard.placements:
        yield Block(rank, index, (0,) * len(tensor.shape), shard.offset, tensor.shape)
        return
    axes = local_runs(shard)
    for size, runs in zip(tensor.shape, axes, strict=True):
        if sum(count for _, count in runs) != size:
            raise CheckpointError(
                f"rank {rank}: the local part of tensor {index} has shape {tensor.shape}, which its placements "
                f"{', '.join(shard.placements)} do not give"
            )
    if math.prod(map(len, axes)) > MOST_BLOCKS:
        raise CheckpointError(f"placements {', '.join(shard.placements)} cut a tensor too finely")
    starts = [list(itertools.accumulate((count for _, count in runs), initial=0)) for runs in axes]
    for choice in itertools.product(*(range(len(runs)) for runs in axes)):
        yield Block(
            rank,
            index,
            local=tuple(starts[axis][at] for axis, at in enumerate(choice)),
            whole=tuple(axes[axis][at][0] for axis, at in enumerate(choice)),
            sizes=tuple(axes[axis][at][1] for axis, at in enumerate(choice)),
        )


def local_runs(shard: ShardEntry) -> list[list[Run]]:
    """The indices of the whole tensor that the local part holds: for each dimension, runs in the local part's order.

    ``_S(axis, factor)`` means that this mesh dimension splits the axis after later mesh dimensions have, as FSDP2
    splits what tensor parallelism left it. Where no later splits make up the factor, it means that each of ``factor``
    equal parts of the axis is split.

    Raises:
        CheckpointError: a placement is not known, or does not fit the shape.
    """
    axes: list[list[Run]] = [[(0, size)] if size else [] for size in shard.global_shape]
    splits = [split_of(word) for word in shard.placements]
    for word, (axis, factor) in zip(shard.placements, splits, strict=True):
        if axis >= len(axes) or factor > MOST_RUNS:
            raise CheckpointError(f"placement {word!r} does not fit a tensor of {len(axes)} dimensions")
    for axis in range(len(axes)):
        cuts = [
            (factor, count, at)
            for (own, factor), count, at in zip(splits, shard.mesh_shape, shard.coordinate, strict=True)
            if own == axis
        ]
        # When all factors equal the later splits, the mesh dimensions split the axis in reverse order.
        later = [math.prod(count for _, count, _ in cuts[index + 1 :]) for index in range(len(cuts))]
        reverse = all(factor in (1, parts) for (factor, _, _), parts in zip(cuts, later, strict=True))
        for factor, count, at in [cut for cut in cuts if cut[0] == 1 or not reverse]:
            axes[axis] = _part(axes[axis], factor, count, at)
        for _, count, at in reversed([cut for cut in cuts if cut[0] > 1 and reverse]):
            axes[axis] = _part(axes[axis], 1, count, at)
    return axes


def _part(runs: list[Run], factor: int, count: int, at: int) -> list[Run]:
    """Cut the runs into ``factor`` chunks and each of these into ``count``; the ``at``-th of each, joined."""
    if at >= count:
        raise CheckpointError(f"coordinate {at} on a mesh dimension of {count}")
    found: list[Run] = []
    for turn in range(factor):
        for start, size in _chunk(list(_chunk(runs, factor, turn)), count, at):
            if found and sum(found[-1]) == start:
                found[-1] = (found[-1][0], found[-1][1] + size)
            else:
                found.append((start, size))
    if len(found) > MOST_RUNS:
        raise CheckpointError(f"a dimension is cut into more than {MOST_RUNS} runs")
    return found


def _chunk(runs: list[Run], chunks: int, at: int) -> Iterator[Run]:
    """The ``at``-th of ``chunks`` parts of the runs, cut as by ``torch.chunk``: the last may be shorter or empty."""
    size = -(-sum(count for _, count in runs) // chunks)
    first, behind = at * size, (at + 1) * size
    passed = 0
    for start, count in runs:
        low, high = max(first, passed), min(behind, passed + count)
        if low < high:
            yield start + low - passed, high - low
        passed += count
