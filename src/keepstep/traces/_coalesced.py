"""Calls that torch put into one batch (``batch_isend_irecv``, coalesced all-gathers), as NCCL dumps have them.

The calls of a batch have one number and stay "scheduled" for ever. After them comes one entry, ``nccl:coalesced``,
which has the batch's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from keepstep.traces.dump_sets import DumpedCall
from keepstep.traces.recorded_content import Content

_BATCH = "nccl:coalesced"
_STATE = ("state", "retired", "time_discovered_started_ns", "time_discovered_completed_ns")


def settled(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries of a dump, those of batches with the state of their batch. Raises LookupError for a damaged one."""
    found: list[Mapping[str, Any]] = []
    open_parts: dict[str, list[int]] = {}  # by group, the last calls of one number, by place
    for entry in entries:
        group = str(entry["process_group"][0])
        parts = open_parts.setdefault(group, [])
        if parts and _number(found[parts[0]]) != _number(entry):
            parts.clear()
        if entry["profiling_name"] == _BATCH:
            state = {key: entry.get(key) for key in _STATE}
            for place in parts:
                found[place] = {**found[place], **state}
            parts.clear()
        else:
            parts.append(len(found))
        found.append(entry)
    return found


def recorded(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries, without an end of calls that the host is still about to enqueue.

    CUDA takes an event that was never recorded for one that is over. So what torch's watchdog has not put away is not
    done while a call before it is not.
    """
    found: list[Mapping[str, Any]] = []
    are_open: set[tuple[str, str]] = set()
    for entry in entries:
        name = str(entry["profiling_name"])
        apart = (
            name if entry.get("is_p2p") is True or name == _BATCH else ""
        )  # these have streams of their own
        key = str(entry["process_group"][0]), apart
        if entry.get("retired") is True or (entry.get("state") == "completed" and key not in are_open):
            found.append(entry)
        else:
            are_open.add(key)
            found.append({**entry, "state": "scheduled"} if entry.get("state") == "completed" else entry)
    return found


def _number(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    return entry.get("collective_seq_id"), entry.get("p2p_seq_id")


def merged(calls: Sequence[DumpedCall]) -> list[DumpedCall]:
    """The calls, with the collectives of a batch as the one collective that they are to the device."""
    found: list[DumpedCall] = []
    places: dict[tuple[str, int], int] = {}
    for call in calls:
        place = places.setdefault((call.group, call.seq), len(found)) if call.peer < 0 else len(found)
        if place == len(found):
            found.append(call)
            continue
        first = found[place]
        one, other = first.content, call.content
        alike = one.element and one.element == other.element
        content = Content(one.bytes + other.bytes, one.element, one.site) if alike else Content(site=one.site)
        found[place] = replace(first, done=first.done and call.done, content=content)
    return found


def without_overtaken(calls: Sequence[DumpedCall]) -> list[DumpedCall]:
    """The calls of NCCL in their order; one is done once a later one of its group, or of its two ranks, is."""
    found = list(calls)
    done: set[tuple[str, int, int]] = set()
    for place in reversed(range(len(found))):
        call = found[place]
        kind = (call.group, call.peer, int(call.op) if call.peer >= 0 else 0)
        if call.done:
            done.add(kind)
        elif kind in done:
            found[place] = replace(call, done=True)
    return found
