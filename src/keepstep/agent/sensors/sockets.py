"""Measures how fast the workers' TCP connections carry data, by the kernel's counters (``sock_diag``, as ``ss -ti``).

A connection on a slow path has data under way nearly all the time and gets little of it acknowledged; a connection that
waits for its application has none under way. So bytes per busy second give the speed of the path under any load.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from keepstep.agent.sensors.path_rates import PathRates
from keepstep.agent.sensors.processes import ProcessId
from keepstep.core.descriptors import socket_inodes
from keepstep.core.summary import PeerTraffic

logger = logging.getLogger("keepstep.agent")

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_DUMP_REQUEST = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_ESTABLISHED = 1 << 1
_INFO = 2  # INET_DIAG_INFO: a struct tcp_info
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_MESSAGE_BYTES = 72  # struct inet_diag_msg
_QUEUE_AND_INODE = struct.Struct("=I8xI")  # idiag_rqueue, idiag_wqueue and idiag_uid, idiag_inode
_QUEUE_AT = 56
_SOURCE, _TARGET = (
    slice(8, 24),
    slice(24, 40),
)  # idiag_src and idiag_dst; IPv4 has the first 4 bytes, then zeros
_ATTRIBUTE = struct.Struct("=HH")
_BYTES = struct.Struct("=QQ")  # tcpi_bytes_acked and tcpi_bytes_received
_BUSY = struct.Struct("=QQ")  # tcpi_busy_time and tcpi_rwnd_limited, in microseconds
_RETRANSMITS = struct.Struct("=I")  # tcpi_total_retrans
_RETRANSMITS_AT, _BYTES_AT, _BUSY_AT = 100, 120, 168
_RECEIVE_BYTES = 1 << 16

_LOOKS = 32
MOST_SOCKETS = 8192
MOST_PEERS = 256
_RESCAN_LOOKS = 10
_COSTS, _LONGEST_S = 200, 3.0  # a sample is followed by a pause so many times as long, and at most this long


@dataclass(frozen=True, slots=True)
class Connection:
    """One established TCP connection, with counts since it was opened."""

    inode: int
    source: str
    target: str
    acked_bytes: int
    received_bytes: int
    unread_bytes: int  # bytes that have come and the process has not read
    busy_s: float  # time with data under way, without the time in which the peer's buffer was full
    retransmits: int  # segments that were sent again


@dataclass(frozen=True, slots=True)
class Look:
    """What was sent between two samples: bytes and busy seconds by (source, target)."""

    begin_s: float
    end_s: float
    sent: Mapping[tuple[str, str], tuple[int, float]]


def busiest(
    looks: Iterable[Look], onset_s: float, node: str, most: int, over: Literal["TCP", "NCCL"]
) -> tuple[PeerTraffic, ...]:
    """What was sent to each address in the samples that ended before ``onset_s``, and in those begun after it.

    The result has the ``most`` paths that were busiest since, and at least one path of each of the node's own
    addresses, so that the controller knows that the address belongs to this node.
    """
    sums: dict[tuple[str, str], list[float]] = {}
    spans = [0.0, 0.0]
    for look in looks:
        after = look.begin_s >= onset_s
        if not after and look.end_s > onset_s:
            continue
        spans[after] += look.end_s - look.begin_s
        for path, (nbytes, busy_s) in look.sent.items():
            row = sums.setdefault(path, [0.0] * 4)
            row[2 * after] += nbytes
            row[2 * after + 1] += busy_s
    ordered = sorted(sums.items(), key=lambda item: -item[1][3])
    first_of = {source: place for place, ((source, _), _) in reversed(list(enumerate(ordered)))}
    chosen = [ordered[place] for place in sorted({*range(min(most, len(ordered))), *first_of.values()})]
    return tuple(
        PeerTraffic(node, source, target, spans[0], int(row[0]), row[1], spans[1], int(row[2]), row[3], over)
        for (source, target), row in chosen
    )


class SocketSensor:
    """Samples what the node's workers send to each address, once a second or less, and more often in a hang."""

    def __init__(self) -> None:
        self.rates = PathRates("TCP")
        self._looks: deque[Look] = deque(maxlen=_LOOKS)
        self._last: dict[int, Connection] = {}
        self.looked_s = 0.0  # when the last sample was taken; 0 before the first
        self._own: dict[int, int] = {}  # process IDs of workers, by inode of the socket
        self._unread: dict[int, int] = {}  # unread bytes by process ID
        self._foreign: set[int] = set()  # inodes of other processes' sockets
        self._count = 0
        self._off = False
        self._due_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether samples cost at most half a percent of a core with one now, or the last is three seconds old."""
        return now_s >= self._due_s

    def look(self, now_s: float, processes: Iterable[ProcessId]) -> None:
        """Take a sample of all workers' connections. If the kernel gives no counters, this is logged once."""
        if self._off:
            return
        began_s = time.thread_time()
        try:
            self._look(now_s, processes)
        except (OSError, struct.error) as error:
            self._off = True
            logger.info("the speed of TCP paths is not watched: %s", error)
        self._due_s = now_s + min(_COSTS * (time.thread_time() - began_s), _LONGEST_S)

    def traffic(self, onset_s: float, node: str, most: int = MOST_PEERS) -> tuple[PeerTraffic, ...]:
        """What was sent to each address before and after ``onset_s`` (`busiest`)."""
        return busiest(self._looks, onset_s, node, most, "TCP")

    def addresses(self) -> tuple[set[str], set[str]]:
        """The workers' own addresses, and the addresses to which they have connections."""
        last = self._last.values()
        return {one.source for one in last}, {one.target for one in last}

    def unread_bytes(self, pid: int) -> int:
        """Bytes from other hosts that a process had not read in the last two samples."""
        return self._unread.get(pid, 0)

    def _look(self, now_s: float, processes: Iterable[ProcessId]) -> None:
        found = {one.inode: one for one in connections(within_hosts=False)}
        self._count += 1
        if self._count % _RESCAN_LOOKS == 0:
            self._foreign &= found.keys()  # numbers of inodes are reused
            self._own = {inode: pid for inode, pid in self._own.items() if inode in found}
        if found.keys() - self._own.keys() - self._foreign:
            mine = {
                inode: process.pid for process in processes for inode in socket_inodes(process.pid).values()
            }
            self._own.update((inode, mine[inode]) for inode in found.keys() & mine.keys())
            self._foreign |= found.keys() - mine.keys()
        own = {inode: one for inode, one in found.items() if inode in self._own}
        sent: dict[tuple[str, str], tuple[int, float]] = {}
        again: dict[tuple[str, str], int] = {}
        self._unread = {}
        for inode, one in own.items():
            before = self._last.get(inode)
            if before is None or (before.source, before.target) != (one.source, one.target):
                continue
            unread = min(one.unread_bytes, before.unread_bytes)
            if unread:
                pid = self._own[inode]
                self._unread[pid] = self._unread.get(pid, 0) + unread
            nbytes, busy_s = one.acked_bytes - before.acked_bytes, one.busy_s - before.busy_s
            if nbytes < 0:
                continue
            path = one.source, one.target
            known = sent.get(path, (0, 0.0))
            sent[path] = (known[0] + nbytes, known[1] + max(busy_s, 0.0))
            if more := max(one.retransmits - before.retransmits, 0):
                again[path] = again.get(path, 0) + more
        if self.looked_s:
            self._looks.append(Look(self.looked_s, now_s, sent))
            self.rates.add(sent, again)
        self._last, self.looked_s = own, now_s


def connections(*, within_hosts: bool = True) -> Iterator[Connection]:
    """The established TCP connections of this network namespace. Raises OSError if the kernel does not list them.

    ``within_hosts``: also those from an address to the same.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asking:
        asking.settimeout(1.0)
        left = MOST_SOCKETS
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED)
            length = _HEADER.size + len(request)
            asking.send(_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _DUMP_REQUEST, 0, 0) + request)
            for message in _messages(asking):
                is_wanted = left > 0 and (within_hosts or message[_SOURCE] != message[_TARGET])
                one = _connection(message, family) if is_wanted else None
                if one is not None:
                    left -= 1
                    yield one


def _messages(asking: socket.socket) -> Iterator[bytes]:
    """The payloads of a netlink dump, up to its end."""
    while True:
        data = asking.recv(_RECEIVE_BYTES)
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, at)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                raise OSError(code, os.strerror(code))
            if length < _HEADER.size:
                return
            yield data[at + _HEADER.size : at + length]
            at += (length + 3) & ~3


def _connection(message: bytes, family: int) -> Connection | None:
    """The connection in an ``inet_diag_msg`` followed by a ``tcp_info``; None if the kernel is too old for that."""
    width = 4 if family == socket.AF_INET else 16
    source = _text(family, message[_SOURCE][:width])
    target = _text(family, message[_TARGET][:width])
    unread, inode = _QUEUE_AND_INODE.unpack_from(message, _QUEUE_AT)
    at = _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        if kind == _INFO and length >= _ATTRIBUTE.size + _BUSY_AT + _BUSY.size:
            info = at + _ATTRIBUTE.size
            acked, received = _BYTES.unpack_from(message, info + _BYTES_AT)
            busy_us, window_us = _BUSY.unpack_from(message, info + _BUSY_AT)
            busy_s = max(busy_us - window_us, 0) * 1e-6
            (again,) = _RETRANSMITS.unpack_from(message, info + _RETRANSMITS_AT)
            return Connection(inode, source, target, acked, received, unread, busy_s, again)
        at += (length + 3) & ~3
    return None


def _text(family: int, address: bytes) -> str:
    """An address as text; an IPv4 address in IPv6 form becomes a plain IPv4 address."""
    if family == socket.AF_INET6 and address.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, address[12:])
    return socket.inet_ntop(family, address)
