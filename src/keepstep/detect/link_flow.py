"""Whether data flows on NCCL's network links: stalled, congested, slow, or held by a GPU or a peer.

MegaTrace (section III-B) counts work requests; here the steps of NCCL's proxy are counted in the same way: those in
flight, and the throughput over the last 64 completions. Something in flight and nothing completed is a stall; a
throughput that fluctuates is congestion. A step is in flight once the network took it, so that waiting for a GPU or for
a receiver is not mistaken for either. A receiving link is never blamed: its sender may have nothing to send.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.link_counters import LinkSnapshot

STALL_S = 0.5  # a link without progress for longer is stalled (MegaTrace, section IV)
FLUCTUATION = 0.5  # least fluctuation of a congested link
DROP = 0.2  # how far below its usual rate a link is slow (MegaTrace, section IV: 20 %)
RECENT_S = 5.0  # a window that ended longer ago says nothing about now
GROUP = 8  # completions whose common rate is compared with other groups'
FEWEST_GROUPS = 4  # fewer groups show no fluctuation
_QUANTUM_NS = 256  # resolution of a completion's busy time


class Flow(IntEnum):
    """The state of a link."""

    IDLE = 0  # nothing is to be moved
    FINE = 1
    STALLED = 2  # when sending: the network has data and completes none of it
    CONGESTED = 3  # when sending: the network completes data now fast, now slowly
    SLOW = 4  # when sending: the network completes data steadily, and slower than usual
    PEER = 5  # when sending: the receiver gives no room
    GPU = 6  # the process's own GPU does not fill, or empty, the buffers
    WAITING = 7  # when receiving: nothing arrives


JUDGED = np.dtype([
    ("flow", "u1"), ("in_flight", "i8"), ("quiet_s", "f8"), ("throughput", "f8"), ("rate", "f8"), ("fluctuation", "f8"),
])  # fmt: skip
"""The judgement of one link. *quiet_s*: time since anything last moved where it now waits. *throughput*: bytes a second
over the window, from its first to its last completion (equation 1); *rate*: bytes a second over the time with something
in flight; *fluctuation*: deviation over mean of the rates of groups of 8 completions. NaN: too few completions."""


def judge(snapshot: LinkSnapshot, usual: NDArray[np.float64] | None = None) -> NDArray[Any]:
    """Judge each link of a snapshot: an array of JUDGED.

    Args:
        snapshot: one look at a running process; when it is stopped or dead, all its links look stalled.
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
    judged["fluctuation"] = _fluctuation(snapshot.windows)

    send = links["send"]
    long_quiet = quiet_s >= STALL_S
    recent = (in_flight > 0) | ((links["completed"] > 0) & (now_ns - links["completed_ns"] <= RECENT_S * 1e9))
    slow = np.zeros(len(links), bool) if usual is None else judged["rate"] < (1 - DROP) * usual
    gpu = np.where(send, links["started"] > links["ready"], links["completed"] > links["finished"])
    judged["flow"] = np.select(
        [
            long_quiet & send & (in_flight > 0),
            long_quiet & send & (links["ready"] > links["posted"]),
            long_quiet & ~send & (in_flight > 0) & ~gpu,
            long_quiet & gpu,
            send & recent & (judged["fluctuation"] >= FLUCTUATION),
            send & recent & slow,
            under_way,
        ],
        [Flow.STALLED, Flow.PEER, Flow.WAITING, Flow.GPU, Flow.CONGESTED, Flow.SLOW, Flow.FINE],
        Flow.IDLE,
    )
    return judged


def _throughput(windows: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each link bytes a second over the time of its window, and over the time with something in flight."""
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


def _fluctuation(windows: NDArray[Any]) -> NDArray[np.float64]:
    """For each link, how far the rates of its groups of completions differ: deviation over mean.

    Only whole chunks count: the small ones at the end of an operation are slower by nature.
    """
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
    enough = groups >= FEWEST_GROUPS
    count = np.maximum(groups, 1)
    mean = rates.sum(axis=1) / count
    spread = np.sqrt((np.where(full, rates - mean[:, None], 0.0) ** 2).sum(axis=1) / count)
    return np.where(enough & (mean > 0), spread / np.where(mean > 0, mean, 1.0), np.nan)
