"""Which rank sends to which in each pass: every link is tested once, and no rank is in two transfers at a time.

The number of passes does not depend on the group's size: a ring takes 2 (3 if it is odd), a tree 4 (GREYHOUND §4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from keepstep.core.validation import Topology, Transfer

Pairs = tuple[tuple[int, int], ...]


def ring_passes(size: int) -> tuple[Pairs, ...]:
    """Passes over a ring of ``size`` members, as pairs (from, to) of places in it."""
    if size < 2:
        return ()
    even = size - size % 2
    first = tuple((place, place + 1) for place in range(0, even, 2))
    second = tuple((place, (place + 1) % size) for place in range(1, size - size % 2, 2))
    return (first, second) if size == even else (first, second, ((size - 1, 0),))


def tree_passes(size: int) -> tuple[Pairs, ...]:
    """Passes over a binary tree (members in heap order): left and right children of even levels, then of odd ones."""
    passes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place in range(1, size):
        level = (place + 1).bit_length() - 1
        passes.setdefault((level % 2, (place + 1) % 2), []).append((place, (place - 1) // 2))
    return tuple(tuple(passes[key]) for key in sorted(passes))


_PASSES: Mapping[Topology, Callable[[int], tuple[Pairs, ...]]] = {"ring": ring_passes, "tree": tree_passes}


def transfers(groups: Iterable[Sequence[int]]) -> tuple[Transfer, ...]:
    """The link tests of groups of global ranks, ring and tree of each, in order of their passes.

    A link that several topologies or groups share is tested in the first of them only. Groups come one after another:
    they may share ranks.
    """
    found: list[Transfer] = []
    seen: set[tuple[int, int]] = set()
    number = 0
    for members in groups:
        for topology, passes in _PASSES.items():
            for pairs in passes(len(members)):
                for source, target in ((members[a], members[b]) for a, b in pairs):
                    if (source, target) not in seen:
                        seen.add((source, target))
                        found.append(Transfer(number, topology, source, target))
                number += 1
    return tuple(found)
