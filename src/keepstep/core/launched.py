"""Collectives that ranks have launched in NCCL's communicators, as NCCL counts them. Which have ended is not told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launched:
    """What one rank has launched in one communicator.

    Attributes:
        communicator: its name, the same on all ranks.
        size: how many ranks it has.
        counts: collectives by kind, as NCCL writes it ("AllReduce").
    """

    communicator: str
    size: int
    counts: dict[str, int]


def differing(counts: Mapping[int, Mapping[str, int]]) -> dict[int, Mapping[str, int]]:
    """The counts by rank and kind, of kinds in which ranks differ; without ranks of which not all of these are told."""
    kinds = sorted({kind for told in counts.values() for kind in told})
    differ = [kind for kind in kinds if len({told.get(kind) for told in counts.values()}) > 1]
    return {
        rank: {kind: told[kind] for kind in differ}
        for rank, told in counts.items()
        if all(kind in told for kind in differ)
    }
