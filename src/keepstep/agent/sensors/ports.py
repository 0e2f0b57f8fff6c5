"""Samples the counters of the node's InfiniBand and RoCE ports in a thread, because a driver may hang."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.core.port_counters import PortCounts, PortTraffic

SYSFS = Path("/sys/class/infiniband")
_WORD_BYTES = 4  # in which data is counted
_DATA = {"sent_bytes": ("counters/port_xmit_data",), "received_bytes": ("counters/port_rcv_data",)}
_EVENTS = {
    "retransmitted": (
        "hw_counters/out_of_sequence", "hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err",
        "hw_counters/implied_nak_seq_err", "hw_counters/rnr_nak_retry_err", "hw_counters/roce_adp_retrans",
    ),
    "marked": (
        "hw_counters/np_ecn_marked_roce_packets", "hw_counters/np_cnp_sent", "hw_counters/rp_cnp_handled",
    ),
    "waited": ("counters/port_xmit_wait",),
    "damaged": (
        "counters/symbol_error", "counters/port_rcv_errors", "counters/link_error_recovery",
        "counters/local_link_integrity_errors",
    ),
    "downs": ("counters/link_downed",),
}  # fmt: skip
_FILES = _DATA | _EVENTS
_ACTIVE = 4  # IB_PORT_ACTIVE
_MOST_PORTS = 64
_MOST = 1 << 48  # growth of a counter between two looks; more means that it was reset, or is no count
_LOOKS = 64
_COSTS = 200  # a look that takes so long is followed by a pause this many times as long


@dataclass(frozen=True, slots=True)
class _Look:
    begin_s: float
    end_s: float
    counts: Mapping[str, PortCounts]


class PortSensor:
    """Looks at all ports every ``every_s`` seconds, less often where that costs more than half a percent of a core."""

    def __init__(self, root: Path = SYSFS, every_s: float = 1.0) -> None:
        """``root``: the folder with a folder for each device."""
        self._root, self._every_s = root, every_s
        self._looks: deque[_Look] = deque(maxlen=_LOOKS)
        self._last: dict[str, tuple[float, dict[str, int | None]]] = {}
        self._up: dict[str, bool] = {}
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the thread, if there is a port."""
        if self._ports():
            threading.Thread(target=self._run, name="keepstep-ports", daemon=True).start()

    def close(self) -> None:
        """Tell the thread to end after its current look."""
        self._closed.set()

    def look(self, now_s: float) -> None:
        """Take a sample of all ports. What cannot be read counts as nothing."""
        counts: dict[str, PortCounts] = {}
        begin_s = now_s
        up = dict(self._up)
        for name, folder in self._ports():
            here = {file: _number(folder / file) for files in _FILES.values() for file in files}
            up[name] = _number(folder / "state") in (_ACTIVE, None)
            known = self._last.get(name)
            self._last[name] = now_s, here
            if known is None or now_s <= known[0]:
                continue
            begin_s = min(begin_s, known[0])
            grown = {
                field: sum(_growth(known[1].get(file), here[file]) for file in files)
                for field, files in _FILES.items()
            }
            grown |= {field: grown[field] * _WORD_BYTES for field in _DATA}
            counts[name] = PortCounts(now_s - known[0], **grown)
        self._up = up
        if counts:
            self._looks.append(_Look(begin_s, now_s, counts))

    def traffic(self, onset_s: float, node: str) -> tuple[PortTraffic, ...]:
        """What each port counted in the samples that ended before ``onset_s``, and in those begun after it.

        A sample across it counts for neither, but that a link went down in it counts as after. Ports that carried
        nothing and counted nothing are left out.
        """
        before: dict[str, PortCounts] = {}
        after: dict[str, PortCounts] = {}
        for look in list(self._looks):
            across = look.begin_s < onset_s < look.end_s
            sums = after if across or look.begin_s >= onset_s else before
            for name, counts in look.counts.items():
                if across:
                    counts = PortCounts(downs=counts.downs)
                sums[name] = sums.get(name, PortCounts()).plus(counts)
        nothing = PortCounts()
        found = [
            PortTraffic(
                node, name, before.get(name, nothing), after.get(name, nothing), self._up.get(name, True)
            )
            for name in sorted(before.keys() | after.keys())
        ]
        return tuple(one for one in found if replace(one.before.plus(one.after), seconds=0.0) != nothing)

    def _run(self) -> None:
        while True:
            began_s = time.thread_time()
            self.look(time.monotonic())
            cost_s = time.thread_time() - began_s
            if self._closed.wait(max(self._every_s, _COSTS * cost_s)):
                return

    def _ports(self) -> list[tuple[str, Path]]:
        """The ports by name, at most ``_MOST_PORTS``."""
        found: list[tuple[str, Path]] = []
        for device in _entries(self._root):
            found += [(f"{device.name}/{port.name}", port) for port in _entries(device / "ports")]
        return found[:_MOST_PORTS]


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())[:_MOST_PORTS]
    return []


def _growth(before: int | None, now: int | None) -> int:
    """By how much a counter has grown; 0 where it could not be read, or was reset."""
    grown = 0 if before is None or now is None else now - before
    return grown if 0 < grown < _MOST else 0


def _number(file: Path) -> int | None:
    """The number that a file begins with; None where there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            text = os.read(descriptor, 64)
        finally:
            os.close(descriptor)
        word = text.split()[0].rstrip(b":")
        return int(word) if word.isdigit() else None
    except (OSError, IndexError):
        return None
