"""Gathers the checksums of each save from all nodes, and has the ranks' copies of tensors compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from keepstep.checkpoint.memory.slots import Key
from keepstep.wire.messages import Checksums, Families, RankChecksums

if TYPE_CHECKING:  # numpy is imported with the first checksums, so that a controller starts without it
    from keepstep.detect.corruption import Compared, Comparison, Held, Told

_MOST_PENDING = 8  # saves of which not all nodes have told the checksums yet
_MOST_FAMILIES = 1 << 16  # digests that are known or asked for


class SavedChecksums:
    """The checksums that agents have told. All of it may be lost: a new comparison needs three saves."""

    def __init__(self) -> None:
        self._comparison: Comparison | None = None
        self._held: dict[int, Held | None] = {}  # by digest of `Families`; None: too many to compare
        self._asked: dict[int, int] = {}  # the save, as a packed key, at which a digest was asked for last
        self._pending: dict[Key, dict[int, tuple[RankChecksums, ...]]] = {}  # by node rank
        self._complete: dict[Key, list[RankChecksums]] = {}  # told by all nodes, oldest first

    def unknown(self, message: Checksums) -> list[int]:
        """The digests in a message whose families are to be asked for: once in each save, of one node."""
        found: list[int] = []
        for digest in {row.families for row in message.rows} - self._held.keys() - {0}:
            if self._asked.get(digest, 0) < message.key and len(self._asked) < _MOST_FAMILIES:
                self._asked[digest] = message.key
                found.append(digest)
        return found

    def introduced(self, message: Families) -> Iterator[tuple[Key, Compared]]:
        """Take the families that were asked for; what saves have shown that waited for them."""
        from keepstep.detect.corruption import Comparison, Tensor

        if message.digest not in self._asked or message.digest in self._held:
            return iter(())
        if self._comparison is None:
            self._comparison = Comparison()
        families = [
            tuple(Tensor(one.name, one.kind, one.single, one.decays) for one in family)
            for family in message.families
        ]
        self._held[message.digest] = self._comparison.holds(families)
        return self._compared()

    def heard(
        self, node_rank: int, ranks: Collection[int], message: Checksums, nodes: Collection[int]
    ) -> Iterator[tuple[Key, Compared]]:
        """Take a node's checksums; what a save has shown once all ``nodes`` (node ranks) have told theirs."""
        key = Key.unpack(message.key)
        if message.node_rank != node_rank or key is None:
            return iter(())
        if any(not set(row.ranks).issubset(ranks) for row in message.rows):
            return iter(())
        gathered = self._pending.setdefault(key, {})
        gathered[node_rank] = message.rows
        if not gathered.keys() >= set(nodes):
            if len(self._pending) > _MOST_PENDING:
                del self._pending[min(self._pending)]
            return iter(())
        self._pending = {one: rows for one, rows in self._pending.items() if one > key}
        self._complete[key] = [row for rows in gathered.values() for row in rows if row.families]
        if len(self._complete) > _MOST_PENDING:
            del self._complete[min(self._complete)]
        return self._compared()

    def _compared(self) -> Iterator[tuple[Key, Compared]]:
        """Compare the saves of which everything is known, in their order."""
        while self._comparison is not None and self._complete:
            key = min(self._complete)
            if not all(row.families in self._held for row in self._complete[key]):
                return
            yield key, self._comparison.saw(key.incarnation, key.step, self._told(self._complete.pop(key)))

    def _told(self, rows: Collection[RankChecksums]) -> Told:
        import numpy as np

        same: dict[tuple[int, bytes], list[int]] = {}
        for row in rows:
            same.setdefault((row.families, row.checksums), []).extend(row.ranks)
        return [
            (ranks, held, np.frombuffer(sums, np.dtype("<u8")).astype(np.uint64, copy=False))
            for (digest, sums), ranks in same.items()
            if (held := self._held[digest]) is not None and len(sums) == 8 * len(held.ids)
        ]
