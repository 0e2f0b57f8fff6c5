"""Link tables kept with an incident. The tables are written here as NCCL's plugin would, word by word."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.agent.arguments import parse
from keepstep.agent.node import NodeAgent
from keepstep.agent.sensors.nccl_links import save, standing_still
from keepstep.core.errors import UsageError
from keepstep.core.summary import GroupInfo
from keepstep.ring import link_reader
from keepstep.ring.link_table import COMM_WORDS, COMMS, FEWEST, HEADER_WORDS, create

PID, COMM, LINK = 8 * 11, 8 * HEADER_WORDS, 8 * (HEADER_WORDS + COMMS * COMM_WORDS)
OPEN = 1 << 2 | 2  # generation 1
KEY = 1 | 1 << 1 | 1 << 18 | 3 << 34  # a send to rank 3 of communicator 0
NEWLY = {"R", "S", "D"}


@pytest.fixture
def tables() -> Iterator[dict[int, str]]:
    """Of three ranks: 0 is stalled, 1 is not used, 2 is no table."""
    descriptors = [create(FEWEST), create(FEWEST)]
    os.pwrite(descriptors[0], struct.pack("<Q", os.getpid()), PID)
    os.pwrite(descriptors[0], struct.pack("<Q", OPEN), COMM)
    os.pwrite(descriptors[0], struct.pack("<6Q", KEY, 5, 5, 5, 1, 1), LINK)
    long_ago = time.monotonic_ns() - 10**9
    os.pwrite(descriptors[0], struct.pack("<4Q", long_ago, long_ago, long_ago, long_ago), LINK + 8 * 8)
    yield {rank: f"/proc/{os.getpid()}/fd/{number}" for rank, number in enumerate(descriptors)} | {
        2: "/dev/null"
    }
    for number in descriptors:
        os.close(number)


def name(table: str, rank: int, size: int) -> None:
    """As NCCL tells who the process is in its communicator."""
    with open(table, "r+b") as file:
        file.seek(COMM)
        words = list(struct.unpack(f"<{COMM_WORDS}Q", file.read(8 * COMM_WORDS)))
        words[3] = rank | size << 32
        words[link_reader._CHECK] = link_reader._checked(
            words[0] >> 2, words[link_reader._ID : link_reader._OPENED]
        )
        file.seek(COMM)
        file.write(struct.pack(f"<{COMM_WORDS}Q", *words))


def test_what_was_under_way_is_kept(tables: dict[int, str], tmp_path: Path) -> None:
    assert save(tables, tmp_path / "links") == 1
    assert [path.name for path in (tmp_path / "links").iterdir()] == ["rank-00000.json"]
    kept = json.loads((tmp_path / "links" / "rank-00000.json").read_text())
    assert (kept["rank"], kept["pid"]) == (0, os.getpid())
    assert kept["process"] in NEWLY
    (link,) = kept["links"]
    assert (link["peer"], link["send"], link["flow"], link["in_flight"]) == (3, True, "STALLED", 4)
    assert link["throughput"] is None
    assert [c["generation"] for c in kept["communicators"]] == [1]


def test_where_transfers_stand_still_is_told_with_the_ranks_of_the_job(tables: dict[int, str]) -> None:
    name(tables[0], rank=1, size=4)
    groups = [GroupInfo("world", tuple(range(8))), GroupInfo("dp", (2, 0, 4, 6))]
    (told,) = standing_still(tables[0], 0, groups)
    assert (told.peer, told.at, told.in_flight, told.quiet_s >= 1.0) == (6, "network", 4, True)
    alike = [*groups, GroupInfo("dp again", (2, 0, 4, 6))]
    assert len(standing_still(tables[0], 0, alike)) == 1
    assert (
        standing_still(tables[0], 0, [*groups, GroupInfo("tp", (1, 0, 2, 3))]) == ()
    )  # which of them is not known
    assert standing_still(tables[0], 5, groups) == ()
    assert standing_still(tables[1], 0, groups) == ()


def test_where_nobody_uses_nccl_nothing_is_written(tables: dict[int, str], tmp_path: Path) -> None:
    assert save({1: tables[1], 2: tables[2]}, tmp_path / "links") == 0
    assert not (tmp_path / "links").exists()


def test_an_agent_saves_them_with_the_rings(tables: dict[int, str], tmp_path: Path) -> None:
    agent = NodeAgent({}, "here", 0, tmp_path, lambda message: None, links=tables)
    assert agent.save_rings() == 0
    agent.close()
    assert (tmp_path / "links" / "rank-00000.json").is_file()


def test_a_folder_that_takes_no_file_stops_nothing(tables: dict[int, str], tmp_path: Path) -> None:
    (tmp_path / "links").write_text("in the way")
    agent = NodeAgent({}, "here", 0, tmp_path, lambda message: None, links=tables)
    assert agent.save_rings() == 0
    agent.close()


def test_paths_come_by_rank() -> None:
    words = ["--run-dir", "r", "--controller", "h:1", "--secret-file", "s", "--node", "n", "--node-rank", "0"]
    given = parse([*words, "--ring", "3=/a", "--links", "3=/proc/1/fd/9"])
    assert given.links == {3: "/proc/1/fd/9"}
    with pytest.raises(UsageError, match="--links"):
        parse([*words, "--ring", "3=/a", "--links", "/proc/1/fd/9"])
