"""Reads what NCCL's RAS answers to STATUS: text from NCCL 2.24 on, from 2.28.7 on JSON where it was asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from keepstep.core.errors import TraceError
from keepstep.core.regular_files import open_regular
from keepstep.traces._ras_text import read_text
from keepstep.traces.ras_status import ERRORS, MOST_RANKS, RankStanding, RasAnswer, RasCommunicator, RasRank

MOST_BYTES = 64 << 20  # largest answer; one rank of one communicator takes 640 bytes of JSON
_HEAD_BYTES = 4096
_LETTERS = 256  # longest name of a host


def looks_like_ras(path: Path) -> bool:
    """Whether a file begins as an answer of RAS does."""
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    if b'"nccl_version"' in head:
        return b'"communicators' in head
    return b"NCCL version " in head and b"Job summary" in head


def read_ras(data: bytes) -> RasAnswer:
    """The answer that these bytes hold, with or without the lines of the protocol before it.

    Raises:
        TraceError: it is none, was cut short, or goes beyond the bounds. The message goes on after the name of where
            it came from.
    """
    if len(data) > MOST_BYTES:
        raise TraceError(f"is larger than the {MOST_BYTES >> 20} MiB that are read of an answer")
    begin = data.find(b"{")
    if begin >= 0 and b'"nccl_version"' in data[begin : begin + _HEAD_BYTES]:
        return _of_json(data[begin:])
    answer = read_text(data)
    if answer is None:
        raise TraceError(f"holds no status of NCCL's RAS{_said(data)}")
    return answer


def _said(data: bytes) -> str:
    """What was said instead, for an error message."""
    line = next((one for one in data[:_HEAD_BYTES].splitlines() if one.startswith(b"ERROR")), b"")
    return f": {line[:80].decode(errors='replace')}" if line else ""


_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Kind = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
_Host = Annotated[str, msgspec.Meta(max_length=_LETTERS)]


class _Status(msgspec.Struct):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _RankOf(msgspec.Struct):
    rank: _Rank
    host: _Host = ""
    pid: _Count = 0
    cuda_dev: int = -1
    nvml_dev: int = -1
    status: _Status = msgspec.field(default_factory=_Status)
    collective_counts: Annotated[dict[_Kind, _Count], msgspec.Meta(max_length=32)] = {}


class _Communicator(msgspec.Struct):
    hash: Annotated[str, msgspec.Meta(max_length=64)]
    size: _Rank = 0
    secondary_hash: Annotated[str, msgspec.Meta(max_length=64)] = ""
    ranks: Annotated[list[_RankOf], msgspec.Meta(max_length=MOST_RANKS)] = []
    missing_ranks: Annotated[list[_RankOf], msgspec.Meta(max_length=MOST_RANKS)] = []


class _Ras(msgspec.Struct):
    timeouts_count: _Count = 0


class _Answer(msgspec.Struct):
    nccl_version: Annotated[str, msgspec.Meta(max_length=64)]
    communicators: Annotated[list[_Communicator], msgspec.Meta(max_length=MOST_RANKS)]
    ras: _Ras = msgspec.field(default_factory=_Ras)


# NCCL 2.28.9 leaves out the comma between the device and the status of a rank that did not answer.
_NO_COMMA = re.compile(rb'("nvml_dev": ?-?\d{1,10})(\s{1,32}"status")')


def _of_json(data: bytes) -> RasAnswer:
    try:
        told = msgspec.json.decode(_NO_COMMA.sub(rb"\1,\2", data.rstrip(b"\0\r\n ")), type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        cut = "truncated" in str(error)
        raise TraceError("was cut short" if cut else f"is no status of NCCL's RAS: {error}") from error
    if sum(len(one.ranks) + len(one.missing_ranks) for one in told.communicators) > MOST_RANKS:
        raise TraceError(f"tells of more than {MOST_RANKS:,} ranks of communicators")
    known: dict[str, RasCommunicator] = {}
    for one in told.communicators:
        name = one.hash if one.hash not in known else f"{one.hash}:{one.secondary_hash}"
        known[name] = _communicator(name, one)
    late = told.ras.timeouts_count
    missing = (f"what {late} processes would have told: RAS waited for them in vain",) if late else ()
    return RasAnswer(told.nccl_version, tuple(known.values()), True, missing=missing)


def _communicator(name: str, told: _Communicator) -> RasCommunicator:
    ranks = {one.rank: _rank(one, answered=False) for one in told.missing_ranks}
    ranks |= {one.rank: _rank(one, answered=True) for one in told.ranks}
    size = max(told.size, max(ranks, default=-1) + 1)
    if size > MOST_RANKS:
        raise TraceError(f"has a communicator of {size:,} ranks; at most {MOST_RANKS:,} are read")
    return RasCommunicator(name, size, ranks)


def _rank(told: _RankOf, *, answered: bool) -> RasRank:
    status = told.status
    gpu = "" if told.nvml_dev < 0 else str(told.nvml_dev)
    if not answered:
        standing: RankStanding = (
            "dead" if status.considered_dead else "silent" if status.unresponsive else "not in"
        )
        return RasRank(told.rank, told.host, told.pid, gpu, {}, standing)
    standing = "in"
    if status.abort_flag:
        standing = "aborting"
    elif status.finalize_called or status.destroy_flag:
        standing = "finalizing"
    elif status.init_state == 7:
        standing = "setting up"
    error = ERRORS.get(status.async_error) or ERRORS.get(status.init_state) or ""
    return RasRank(told.rank, told.host, told.pid, gpu, told.collective_counts, standing, error)
