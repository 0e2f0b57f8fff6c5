"""Whether data flows on NCCL's network links: stalled, congested, slow, or held by a GPU or a peer.

From what MegaTrace (section III-B) measures of work requests, taken here of the steps of NCCL's proxy: those in flight,
and the throughput over the last 64 completions. Something in flight and nothing completed is a stall; a throughput that
fluctuates is congestion. A step is in flight from when the network took it, so that waiting for a GPU or for a receiver
is not mistaken for either. What is received is never blamed on the link: its sender may have nothing to send.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.link_counters import LinkSnapshot

GROUP = 8  # completions whose common rate is compared with other groups'
_QUANTUM_NS = 256  # of a completion's busy time


class Flow(IntEnum):
    """How a link stands."""

    IDLE = 0  # nothing is to be moved
    FINE = 1
    STALLED = 2  # send: the network has data and completes none
    CONGESTED = 3  # send: it completes, now fast, now slowly
    SLOW = 4  # send: it completes steadily, and slower than usual
    PEER = 5  # send: the receiver gives no room
    GPU = 6  # the own GPU does not fill, or empty, the buffers
    WAITING = 7  # receive: nothing arrives


JUDGED = np.dtype([
    ("flow", "u1"), ("in_flight", "i8"), ("quiet_s", "f8"), ("throughput", "f8"), ("rate", "f8"), ("fluctuation", "f8"),
])  # fmt: skip
"""One link. *quiet_s*: since anything last moved where it now waits. *throughput*: bytes a second over the window, from
its first to its last completion (equation 1); *rate*: the same over the time with something in flight; *fluctuation*:
of the rates of groups of 8 completions, deviation over mean. NaN: too few completions."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """When a link is judged to be what."""

    stall_s: float = 0.5  # MegaTrace, section IV: 500 ms
    fluctuation: float = 0.5
    drop: float = 0.2  # MegaTrace, section IV: 20 % below the usual rate
    recent_s: float = 5.0  # a window that ended longer ago says nothing of now
    fewest_groups: int = 4


def judge(
    snapshot: LinkSnapshot,
    settings: LinkSettings = LinkSettings(),
    usual: NDArray[np.float64] | None = None,
) -> NDArray[Any]:
    """JUDGED, a row for each link of the snapshot.

    Args:
        snapshot: one look at a process that runs; of one that is stopped or dead all links look stalled.
        settings: the thresholds.
        usual: rates of the same links when they were well, bytes a second; NaN: not known.
    """
    links, now_ns = snapshot.links, snapshot.taken_ns
    judged = np.zeros(len(links), JUDGED)
    in_flight = (links["posted"] - links["completed"]).astype("i8")
    judged["in_flight"] = in_flight
    since_ns = np.where(
        in_flight > 0, np.maximum(links["completed_ns"], links["since_ns"]), links["moved_ns"]
    )
    under_way = links["started"] > links["finished"]
    quiet_s = np.where(under_way, np.maximum(now_ns - since_ns, 0) / 1e9, 0.0)
    judged["quiet_s"] = quiet_s
    judged["throughput"], judged["rate"] = _throughput(snapshot.windows)
    judged["fluctuation"] = _fluctuation(snapshot.windows, settings.fewest_groups)

    send = links["send"]
    long_quiet = quiet_s >= settings.stall_s
    recent = (in_flight > 0) | (
        (links["completed"] > 0) & (now_ns - links["completed_ns"] <= settings.recent_s * 1e9)
    )
    slow = np.zeros(len(links), bool) if usual is None else judged["rate"] < (1 - settings.drop) * usual
    gpu = np.where(send, links["started"] > links["ready"], links["completed"] > links["finished"])
    judged["flow"] = np.select(
        [
            long_quiet & send & (in_flight > 0),
            long_quiet & send & (links["ready"] > links["posted"]),
            long_quiet & ~send & (in_flight > 0) & ~gpu,
            long_quiet & gpu,
            send & recent & (judged["fluctuation"] >= settings.fluctuation),
            send & recent & slow,
            under_way,
        ],
        [Flow.STALLED, Flow.PEER, Flow.WAITING, Flow.GPU, Flow.CONGESTED, Flow.SLOW, Flow.FINE],
        Flow.IDLE,
    )
    return judged


def _throughput(windows: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    times, there = windows["time_ns"], windows["time_ns"] > 0
    enough = there.sum(axis=1) >= 2
    first = np.where(there, times, np.iinfo("i8").max).min(axis=1, initial=np.iinfo("i8").max)
    last = times.max(axis=1, initial=0)
    later = there & (times > first[:, None])
    span_s = np.where(enough & (last > first), last - np.where(enough, first, 0), 1) / 1e9
    throughput = np.where(
        enough & (last > first), windows["bytes"].sum(axis=1, where=later, dtype="u8") / span_s, np.nan
    )
    busy_s = np.maximum(windows["busy_ns"].sum(axis=1, where=there, dtype="u8"), _QUANTUM_NS) / 1e9
    rate = np.where(enough, windows["bytes"].sum(axis=1, where=there, dtype="u8") / busy_s, np.nan)
    return throughput, rate


def _fluctuation(windows: NDArray[Any], fewest_groups: int) -> NDArray[np.float64]:
    """Of whole chunks only: the small ones at the end of an operation are slower by nature."""
    there = windows["time_ns"] > 0
    size = windows["bytes"].astype("i8")
    most = size.max(axis=1, where=there, initial=0)
    whole = there & (2 * size >= most[:, None]) & (size > 0)
    group = (np.cumsum(whole, axis=1) - 1) // GROUP
    members = np.zeros((len(windows), windows.shape[1] // GROUP + 1), np.int64)
    moved, busy = np.zeros(members.shape), np.zeros(members.shape)
    row, column = np.nonzero(whole)
    place = (row, group[row, column])
    np.add.at(members, place, 1)
    np.add.at(moved, place, size[row, column])
    np.add.at(busy, place, windows["busy_ns"][row, column])
    full = members == GROUP
    rates = np.where(full, moved / np.maximum(busy, _QUANTUM_NS), 0.0)
    groups = full.sum(axis=1)
    enough = groups >= fewest_groups
    count = np.maximum(groups, 1)
    mean = rates.sum(axis=1) / count
    spread = np.sqrt((np.where(full, rates - mean[:, None], 0.0) ** 2).sum(axis=1) / count)
    return np.where(enough & (mean > 0), spread / np.where(mean > 0, mean, 1.0), np.nan)
