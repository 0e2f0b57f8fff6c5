"""Ports of InfiniBand on the stand-in's nodes: a tree of sysfs a node, whose counters grow as the job's fault is on.

Each node is started in a mount namespace of its own, in which ``/sys/class/infiniband`` is its tree. Needs root.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.stand_in.device import MOST_RANKS

_PORT = Path("mlx5_0") / "ports" / "1"
_DATA = ("counters/port_xmit_data", "counters/port_rcv_data")
# What the two ends of a bad path count: the sender waits in vain and sends again, the receiver misses packets.
_LOSSES = ("hw_counters/local_ack_timeout_err", "hw_counters/packet_seq_err")
_OTHERS = ("counters/port_xmit_wait", "counters/link_downed", "hw_counters/out_of_sequence")
_WORDS_A_SECOND, _LOSSES_A_SECOND = 50_000_000, 400
_IN_NAMESPACE = (
    "mount -t tmpfs none /sys/class && mkdir /sys/class/infiniband && "
    'mount --bind "$0" /sys/class/infiniband && exec "$@"'
)


def missing() -> str:
    """Why there can be no such ports here; empty when there can."""
    if os.geteuid() != 0:
        return "mount namespaces need root"
    return "" if shutil.which("unshare") else "unshare is not installed (package util-linux)"


class Ports:
    """The trees of all nodes of one job, in ``folder``."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._trees = [folder / "sysfs" / f"node-{number}" for number in range(nodes)]
        self._words = self._losses = 0.0
        self._last_s: float | None = None
        for tree in self._trees:
            for name in (*_DATA, *_LOSSES, *_OTHERS):
                (tree / _PORT / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / _PORT / name).write_text("0\n")
            (tree / _PORT / "state").write_text("4: ACTIVE\n")

    def command(self, node: int, words: Sequence[str]) -> list[str]:
        """The words that start a command on a node."""
        return ["unshare", "--mount", "sh", "-c", _IN_NAMESPACE, str(self._trees[node]), *words]

    def grow(self, now_s: float, ends: Collection[int], is_bad: bool) -> None:
        """Let the counters grow until now; while it ``is_bad``, these nodes lose packets."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None:
            return
        self._words += _WORDS_A_SECOND * (now_s - last_s)
        self._losses += _LOSSES_A_SECOND * (now_s - last_s) * is_bad
        for number, tree in enumerate(self._trees):
            for name in _DATA:
                _put(tree / _PORT / name, f"{self._words:.0f}\n")
            for name in _LOSSES if number in ends else ():
                _put(tree / _PORT / name, f"{self._losses:.0f}\n")


class PairPorts(Ports):
    """Those of a job of which a pair of ranks is slow or cut. Ranks lie on the nodes in order."""

    def __init__(self, folder: Path, nodes: int, ranks: int, pair: tuple[int, int]) -> None:
        super().__init__(folder, nodes)
        self._control, self._pair = folder / "control", pair
        self._ends = {rank // (ranks // nodes) for rank in pair}

    def advance(self, now_s: float) -> None:
        """Let the counters grow until now; while the fault is on, the two nodes of the pair lose packets."""
        self.grow(now_s, self._ends, self._is_bad())

    def _is_bad(self) -> bool:
        """Whether the devices have come to the fault, by the file that they share."""
        rank, peer = self._pair
        tables = 0, MOST_RANKS * MOST_RANKS * 4
        memory = self._control.read_bytes() if self._control.exists() else b""
        places = [table + 4 * (rank * MOST_RANKS + peer) for table in tables]
        return any(struct.unpack_from("i", memory, place)[0] for place in places if place + 4 <= len(memory))


def _put(path: Path, text: str) -> None:
    """Write the file at once: an agent may be reading it."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.replace(path)
