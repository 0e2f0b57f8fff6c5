"""How fast the replicas of a model are, as measured in some iterations, and which shares fit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np

from keepstep.core.iteration_table import medians, medians_of, table_of
from keepstep.core.microbatch_shares import Split, fits
from keepstep.core.summary import GroupInfo, IterationSummary
from keepstep.mitigate.allocation import allocate_microbatches

_LEAST_S = 1e-7  # least time of a micro-batch, as it must be above 0
_ALIKE = 1.1  # replicas are alike if none takes more than this times the median for a micro-batch


@dataclass(frozen=True, slots=True)
class Replicas:
    """All replicas, by number: their shares, seconds for a micro-batch, and seconds besides micro-batches."""

    shares: tuple[int, ...]
    seconds: tuple[float, ...]
    fixed_s: tuple[float, ...]
    shared_s: float  # time of an iteration beyond that of the slowest replica, as to reduce gradients

    @property
    def alike(self) -> bool:
        """Whether no replica is much slower than the others."""
        return max(self.seconds) <= _ALIKE * float(np.median(self.seconds))

    def iteration_s(self, shares: Sequence[int]) -> float:
        """The time of an iteration with these shares."""
        busy = zip(shares, self.seconds, self.fixed_s, strict=True)
        return self.shared_s + max(share * each + rest for share, each, rest in busy)

    def alike_s(self, shares: Sequence[int]) -> float:
        """The time of an iteration if all replicas were as fast as the (lower) median one."""
        return replace(self, seconds=(median_low(self.seconds),) * len(self.seconds)).iteration_s(shares)

    def best(self, multiple_of: int = 1, at_most: int = 0) -> list[int]:
        """The shares with which an iteration takes least."""
        return allocate_microbatches(
            *(self.seconds, sum(self.shares), multiple_of, at_most or None), fixed_seconds=self.fixed_s
        )


def measure(
    rows: Sequence[IterationSummary], splits: Mapping[int, Split], groups: Mapping[str, GroupInfo]
) -> Replicas | None:
    """The replicas, measured in iterations with the shares of ``splits`` (by rank); None if a rank or share is missing.

    A rank spends its own time, less its optimizer step, on its micro-batches. A replica is as fast as its slowest rank
    (the slowest stage of a pipeline). What else it takes before it waits for other replicas (filling the pipeline,
    waits among its stages) does not depend on its share.

    On a GPU a transfer may overlap with computing: what is waited for in all is then known, and of transfers only their
    length. Not all iterations tell transfers, and the optimizer's time is not known apart from the micro-batches'.
    """
    if not len(rows):
        return None
    table = table_of(rows)
    own, each = medians(rows, "self_s"), rank_seconds(rows, splits)
    if not each.keys() >= splits.keys():
        return None
    replica_of = {rank: split.replica for rank, split in splits.items()}
    across = np.array([_is_across(groups.get(name), replica_of) for name in table.names])
    which, streams = table.flat()
    waits = np.where(across[streams["group"]], streams["blocked_s"], 0.0)
    durations, ranks = table.column("duration_s"), table.column("rank")
    waited = np.bincount(which, weights=waits, minlength=len(table))
    on_device, is_told = table.column("ahead_s") >= 0, table.column("streams") > 0
    waited = np.where(on_device, np.minimum(waited, durations - table.column("self_s")), waited)
    known = is_told | ~on_device
    active = medians_of(ranks[known], (durations - waited)[known])
    first = next(iter(splits.values()))
    count = first.replicas
    shares, seconds, fixed = [0] * count, [0.0] * count, [0.0] * count
    until = [0.0] * count
    for rank, split in splits.items():
        place = split.replica
        shares[place] = split.share
        seconds[place] = max(seconds[place], each[rank])
        until[place] = max(until[place], active.get(rank, 0.0), own[rank])
    if not fits(shares, first.count, count, first.multiple_of, first.at_most):
        return None
    for place in range(count):
        fixed[place] = max(until[place] - shares[place] * seconds[place], 0.0)
    shared_s = max(float(np.median(durations)) - max(until), 0.0)
    return Replicas(tuple(shares), tuple(seconds), tuple(fixed), shared_s)


def rank_seconds(rows: Sequence[IterationSummary], splits: Mapping[int, Split]) -> dict[int, float]:
    """Seconds for a micro-batch by rank: its own time, less its optimizer step, over its share.

    Where own times are a GPU's, the optimizer's is the host's, which says nothing of them, and nothing is left out.
    """
    table = table_of(rows)
    own = medians(table, "self_s")
    on_host = np.where(table.column("ahead_s") < 0, table.column("optimizer_s"), 0.0)
    optimizer = medians_of(table.column("rank"), on_host)
    return {
        rank: max((own[rank] - optimizer[rank]) / split.share, _LEAST_S)
        for rank, split in splits.items()
        if rank in own
    }


def _is_across(group: GroupInfo | None, replica_of: Mapping[int, int]) -> bool:
    """Whether a group has ranks of several replicas; not for an unknown group."""
    if group is None:
        return False
    first = replica_of.get(group.members[0]) if group.members else None
    return any(replica_of.get(rank) != first for rank in group.members)
