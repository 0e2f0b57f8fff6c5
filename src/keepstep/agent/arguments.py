"""The agent's command line. Its launcher writes it; nobody types it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Arguments:
    """What ``python -m keepstep.agent`` was given."""

    run_dir: Path
    controller: tuple[str, int]
    secret_file: Path
    run_id: str
    node: str
    node_rank: int
    rings: dict[int, str]  # path by rank
    orders: dict[int, str]  # the same of the orders pages
    links: dict[int, str]  # and of the link tables
    tls: tuple[str, str, str] | None  # certificate, key, authority
    cache: str = ""  # address of the node's cache; "": there is none
    world_size: int = 0
    checkpoint_dir: str = ""
    checkpoint_keep: int = 0
    backups: int = 0  # nodes that back up each rank's checkpoints
    backup_rate: float = 0.0  # most bytes a second that are given to other nodes; 0: no limit
    failure_domain: str = ""  # shared with nodes that may be lost together


def parse(words: Sequence[str] | None = None) -> Arguments:
    """Read the command line. Raises UsageError for values that cannot be used; argparse exits for the rest."""
    from keepstep.wire.address import parse_address
    from keepstep.wire.secret import UNNAMED
    from keepstep.wire.tls import TlsPaths

    parser = argparse.ArgumentParser("keepstep.agent", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--controller", required=True, metavar="HOST:PORT")
    parser.add_argument("--secret-file", required=True, type=Path)
    parser.add_argument("--run-id", default=UNNAMED, metavar="ID")
    parser.add_argument("--node", required=True)
    parser.add_argument("--node-rank", required=True, type=int)
    parser.add_argument("--ring", required=True, action="append", metavar="RANK=PATH")
    parser.add_argument("--orders", default=[], action="append", metavar="RANK=PATH")
    parser.add_argument("--links", default=[], action="append", metavar="RANK=PATH")
    parser.add_argument("--cache", default="", metavar="ADDRESS")
    parser.add_argument("--world-size", type=int, default=0)
    parser.add_argument("--checkpoint-dir", default="", metavar="PATH_OR_URL")
    parser.add_argument("--checkpoint-keep", type=int, default=0)
    parser.add_argument("--backups", default=0, type=int, metavar="K")
    parser.add_argument("--backup-rate", default=0.0, type=float, metavar="BYTES")
    parser.add_argument("--failure-domain", default="", metavar="LABEL")
    for name in ("--tls-cert", "--tls-key", "--tls-ca"):
        parser.add_argument(name)
    given = parser.parse_args(words)
    paths = TlsPaths.of(given.tls_cert, given.tls_key, given.tls_ca)
    return Arguments(
        run_dir=given.run_dir.resolve(),
        controller=parse_address(given.controller),
        secret_file=given.secret_file,
        run_id=given.run_id,
        node=given.node,
        node_rank=given.node_rank,
        rings=_paths("--ring", given.ring),
        orders=_paths("--orders", given.orders),
        links=_paths("--links", given.links),
        tls=(paths.cert, paths.key, paths.ca) if paths is not None else None,
        cache=given.cache,
        world_size=given.world_size,
        checkpoint_dir=given.checkpoint_dir,
        checkpoint_keep=given.checkpoint_keep,
        backups=given.backups,
        backup_rate=given.backup_rate,
        failure_domain=given.failure_domain,
    )


def _paths(flag: str, words: Sequence[str]) -> dict[int, str]:
    paths: dict[int, str] = {}
    for word in words:
        rank, equals, path = word.partition("=")
        if not equals or not path or not rank.isascii() or not rank.isdigit():
            raise UsageError(f"{flag} {word}: wants RANK=PATH, for example 3=/proc/4711/fd/9")
        if int(rank) in paths:
            raise UsageError(f"{flag} {word}: rank {rank} has one already ({paths[int(rank)]})")
        paths[int(rank)] = path
    return paths
