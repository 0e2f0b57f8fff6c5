"""Asks NCCL's RAS on this node how many collectives each of its ranks has launched.

It is asked when the controller wants to know, which it does in a hang of which torch's flight recorder tells nothing,
and again only when a rank has called something since: some releases of NCCL can crash when it is asked while
communicators are made or ended.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from keepstep.agent.sensors.processes import PROC
from keepstep.core.errors import TraceError
from keepstep.core.launched import Launched
from keepstep.traces.ras import read_ras
from keepstep.traces.ras_service import ask
from keepstep.traces.ras_status import RasAnswer

_AGAIN_S = 60.0  # least time between two questions
_PATIENCE_S = 8.0  # NCCL itself waits 5 s for a process
_AT_ONCE_S = 0.5  # the controller waits a second for all that it has asked
_DEFAULT = "localhost:28028"
_MOST_BYTES = 1 << 20  # largest environment of a process that is read
_MOST_COMMUNICATORS = 64  # communicators that are told of each rank

Found = Mapping[int, tuple[Launched, ...]]


class RasSensor:
    """Asks in a thread, and keeps the answer for as long as the ranks stand still.

    ``ask``: asks an address (host, port) and returns what it answers within some seconds; may raise TraceError.
    """

    def __init__(self, ask: Callable[[str, int, float], bytes] = ask) -> None:
        self._ask = ask
        self._asked_s = -math.inf
        self._counts: dict[int, int] = {}  # by rank, when it was asked
        self._answer: Future[Found] = Future()
        self._answer.set_result({})

    async def launched(self, now_s: float, ranks: Mapping[int, tuple[int, int]]) -> None:
        """Ask, unless that was done since one of the ranks has called something, and wait for half a second.

        Args:
            now_s: the time on the node's clock.
            ranks: process and counts of the node's ranks; the counts change with every call of the rank.
        """
        counts = {rank: count for rank, (_, count) in ranks.items()}
        if ranks and counts != self._counts and self._answer.done() and now_s - self._asked_s >= _AGAIN_S:
            self._asked_s, self._counts, self._answer = now_s, counts, Future()
            processes = {rank: process for rank, (process, _) in ranks.items()}
            arguments = self._answer, processes
            threading.Thread(target=self._look, args=arguments, name="keepstep-ras", daemon=True).start()
        if not self._answer.done():
            await asyncio.wait([asyncio.wrap_future(self._answer)], timeout=_AT_ONCE_S)

    def of(self, rank: int, counts: int) -> tuple[Launched, ...]:
        """What a rank has launched, if it has called nothing since that was asked."""
        if not self._answer.done() or self._counts.get(rank) != counts:
            return ()
        return self._answer.result().get(rank, ())

    def _look(self, answer: Future[Found], processes: Mapping[int, int]) -> None:
        found: Found = {}
        try:
            address = _address_of(next(iter(processes.values())))
            if address is not None:
                found = launched_by(read_ras(self._ask(*address, _PATIENCE_S)), processes)
        except (TraceError, OSError, ValueError):
            pass  # RAS did not answer, or nonsense
        finally:
            answer.set_result(found)


def _address_of(process: int) -> tuple[str, int] | None:
    """Where NCCL's RAS answers in this process; None where it is switched off, or that is no address."""
    with open(PROC / str(process) / "environ", "rb") as file:
        words = file.read(_MOST_BYTES).decode(errors="replace").split("\0")
    environ = dict(word.split("=", 1) for word in words if "=" in word)
    host, _, port = environ.get("NCCL_RAS_ADDR", _DEFAULT).rpartition(":")
    if environ.get("NCCL_RAS_ENABLE") == "0" or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return None
    return host.strip("[]") or "localhost", int(port)


def launched_by(answer: RasAnswer, processes: Mapping[int, int]) -> dict[int, tuple[Launched, ...]]:
    """What the ranks of this node have launched; empty where it is not sure which ranks of the answer they are.

    Processes of other nodes may have the same numbers, as in containers. Then the node is known by its ranks: they have
    the numbers of the job in the communicator that has the most.

    Args:
        answer: what RAS has told of the whole job.
        processes: process ids by rank.
    """
    rank_of = {process: rank for rank, process in processes.items()}
    seen: dict[str, set[int]] = {}  # by host: processes that have the numbers of ours
    for communicator in answer.communicators:
        for one in communicator.ranks.values():
            if one.process in rank_of:
                seen.setdefault(one.host, set()).add(one.process)
    hosts = [host for host, found in seen.items() if found == rank_of.keys()]
    if len(hosts) > 1:
        hosts = [host for host in hosts if _has_the_jobs_numbers(answer, host, processes)]
    if len(hosts) != 1:
        return {}
    launched: dict[int, list[Launched]] = {}
    for communicator in answer.communicators:
        for one in communicator.ranks.values():
            if one.host == hosts[0] and one.process in rank_of and one.standing == "in" and one.counts:
                told = Launched(communicator.name, communicator.size, dict(one.counts))
                launched.setdefault(rank_of[one.process], []).append(told)
    return {rank: tuple(some[:_MOST_COMMUNICATORS]) for rank, some in launched.items()}


def _has_the_jobs_numbers(answer: RasAnswer, host: str, processes: Mapping[int, int]) -> bool:
    largest = max(answer.communicators, key=lambda one: one.size)
    return all(
        rank in largest.ranks and largest.ranks[rank].who[:2] == (host, process)
        for rank, process in processes.items()
    )
