"""The agent's command line, which its launcher writes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import UsageError
from keepstep.core.kernel_records import KERNEL_LOG
from keepstep.core.tls_paths import TlsPaths
from keepstep.wire.address import parse_address
from keepstep.wire.secret import UNNAMED

_STREAM = re.compile(r"([0-9]{1,7})=(\w+):([0-9]{1,18}):(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of ``python -m keepstep.agent``."""

    run_dir: Path
    controller: tuple[str, int]  # host and port
    secret_file: Path
    run_id: str
    node: str
    node_rank: int
    rings: dict[int, str]  # paths of the rings by rank
    orders: dict[int, str]  # paths of the orders pages by rank
    links: dict[int, str]  # paths of the link tables by rank
    workers: dict[int, int]  # process ids by rank
    words: dict[
        int, tuple[tuple[str, int, str], ...]
    ]  # streams that ranks write to: names, beginnings, paths
    kernel_log: str  # path
    tls: TlsPaths | None
    cache: str  # address of the node's cache; "": there is none
    world_size: int
    checkpoint_dir: str
    checkpoint_keep: int
    backups: int  # how many other nodes back up each rank's checkpoints
    backup_rate: float  # most bytes a second that are sent to other nodes; 0: no limit
    incarnation: int  # in which the ranks of its rings play
    failure_domain: str  # name of a group of nodes that may be lost together; "": unknown


def parse(words: Sequence[str] | None = None) -> Arguments:
    """Read the command line. Raises UsageError for unusable values; argparse exits for other mistakes."""
    parser = argparse.ArgumentParser("keepstep.agent", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run-dir", required=True, type=lambda text: Path(text).resolve())
    parser.add_argument("--controller", required=True, type=parse_address, metavar="HOST:PORT")
    parser.add_argument("--secret-file", required=True, type=Path)
    parser.add_argument("--run-id", default=UNNAMED, metavar="ID")
    parser.add_argument("--node", required=True)
    parser.add_argument("--node-rank", required=True, type=int)
    parser.add_argument("--ring", required=True, dest="rings", action="append", metavar="RANK=PATH")
    parser.add_argument("--orders", default=[], action="append", metavar="RANK=PATH")
    parser.add_argument("--links", default=[], action="append", metavar="RANK=PATH")
    parser.add_argument("--worker", default=[], dest="workers", action="append", metavar="RANK=PID")
    parser.add_argument("--words", default=[], action="append", metavar="RANK=NAME:BEGIN:PATH")
    parser.add_argument("--kernel-log", default=KERNEL_LOG, metavar="PATH")
    parser.add_argument("--cache", default="", metavar="ADDRESS")
    parser.add_argument("--world-size", type=int, default=0)
    parser.add_argument("--checkpoint-dir", default="", metavar="PATH_OR_URL")
    parser.add_argument("--checkpoint-keep", type=int, default=0)
    parser.add_argument("--backups", default=0, type=int, metavar="K")
    parser.add_argument("--backup-rate", default=0.0, type=float, metavar="BYTES")
    parser.add_argument("--incarnation", type=int, default=0, metavar="N")
    parser.add_argument("--failure-domain", default="", metavar="LABEL")
    for name in ("--tls-cert", "--tls-key", "--tls-ca"):
        parser.add_argument(name)
    given = vars(parser.parse_args(words))
    given["tls"] = TlsPaths.of(*(given.pop(name) for name in ("tls_cert", "tls_key", "tls_ca")))
    for name, flag in (("rings", "--ring"), ("orders", "--orders"), ("links", "--links")):
        given[name] = _paths(flag, given[name])
    pids = _paths("--worker", given["workers"])
    if wrong := next((pid for pid in pids.values() if not pid.isascii() or not pid.isdigit()), ""):
        raise UsageError(f"--worker …={wrong}: wants RANK=PID, for example 3=4711")
    given["workers"] = {rank: int(pid) for rank, pid in pids.items()}
    given["words"] = _streams(given["words"])
    return Arguments(**given)


def _streams(words: Sequence[str]) -> dict[int, tuple[tuple[str, int, str], ...]]:
    """Names, beginnings and paths of streams by rank. Raises UsageError."""
    streams: dict[int, tuple[tuple[str, int, str], ...]] = {}
    for word in words:
        if (found := _STREAM.fullmatch(word)) is None:
            raise UsageError(
                f"--words {word}: wants RANK=NAME:BEGIN:PATH, for example 3=stderr:0:/proc/4711/fd/9"
            )
        rank, name, begin, path = found.groups()
        streams[int(rank)] = (*streams.get(int(rank), ()), (name, int(begin), path))
    return streams


def _paths(flag: str, words: Sequence[str]) -> dict[int, str]:
    """Paths by rank, from the words given for one flag. Raises UsageError."""
    paths: dict[int, str] = {}
    for word in words:
        rank, equals, path = word.partition("=")
        if not equals or not path or not rank.isascii() or not rank.isdigit():
            raise UsageError(f"{flag} {word}: wants RANK=PATH, for example 3=/proc/4711/fd/9")
        if int(rank) in paths:
            raise UsageError(f"{flag} {word}: rank {rank} has one already ({paths[int(rank)]})")
        paths[int(rank)] = path
    return paths
