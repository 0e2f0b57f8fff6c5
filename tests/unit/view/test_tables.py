"""Ranks and links as tables: in order, without what cannot be, and of whom an address is."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from keepstep.view.node_links import links_between, read_paths
from keepstep.view.rank_table import joined, rank_table
from keepstep.wire.messages import PathRate, RankBeat

MIB = 1 << 20


def test_ranks_are_in_order_whatever_the_nodes() -> None:
    table = rank_table(
        [(0, [RankBeat(2, 7, 1, 3), RankBeat(3, 8, 2, 3)]), (1, [RankBeat(0, 9, 3, 3, 0.5, 0.25)])]
    )
    assert (table.rank.tolist(), table.node.tolist()) == ([0, 2, 3], [1, 0, 0])
    assert (table.step.tolist(), table.phase.tolist()) == ([9, 7, 8], [3, 1, 2])
    assert (table.iteration_s.tolist(), table.self_s.tolist()) == ([0.5, 0.0, 0.0], [0.25, 0.0, 0.0])
    assert table.is_alive.all()
    assert len(rank_table([])) == 0


def test_of_a_rank_that_two_nodes_tell_of_the_later_node_counts() -> None:
    table = rank_table([(0, [RankBeat(5, 1, 0, 0)]), (1, [RankBeat(5, 2, 0, 0), RankBeat(4, 3, 0, 0)])])
    assert (table.rank.tolist(), table.step.tolist(), table.node.tolist()) == ([4, 5], [3, 2], [1, 1])


def test_what_no_rank_can_have_is_left_out() -> None:
    odd = [1 << 63, -(1 << 63), 1 << 62, -2, 1 << 31]
    beats = [RankBeat(one, 1, 0, 0) for one in odd]
    beats += [RankBeat(number, step, 0, 0) for number, step in enumerate(odd)]
    beats += [RankBeat(10 + number, 1, phase, 0) for number, phase in enumerate(odd)]
    beats += [RankBeat(100, 5, 0, 0, 1e300, float("nan"), float("inf"))]
    table = rank_table([(0, beats)])
    assert table.rank.tolist() == [4, 100]  # step 2**31 may be


def test_tables_are_as_a_dumb_loop_makes_them() -> None:
    draw = random.Random(1)
    for _ in range(50):
        nodes = [
            (
                node,
                [RankBeat(draw.randrange(40), draw.randrange(-1, 9), draw.randrange(9), 0) for _ in range(8)],
            )
            for node in range(4)
        ]
        wanted = {beat.rank: (node, beat.step) for node, beats in nodes for beat in beats}
        table = rank_table(nodes)
        found = zip(table.node.tolist(), table.step.tolist(), strict=True)
        assert dict(zip(table.rank.tolist(), found, strict=True)) == wanted
        assert (np.diff(table.rank) > 0).all()


def test_links_are_between_the_nodes_whose_addresses_these_are() -> None:
    paths = {
        0: [
            PathRate("10.0.0.1", "10.0.0.2", "TCP", 4 * MIB, 2.0, 3 * MIB, 0.5),
            PathRate("10.1.0.1", "10.0.0.2", "TCP", 4 * MIB, 2.0, 1 * MIB, 1.0),
            PathRate("10.0.0.1", "10.1.0.1", "TCP", 4 * MIB, 2.0),  # to itself
            PathRate("10.0.0.1", "203.0.113.9", "TCP", 4 * MIB, 2.0),  # to storage
        ],
        1: [PathRate("10.0.0.2", "10.0.0.1", "TCP", 100, 2.0)],  # too little to show a rate
        2: [PathRate("rank:4", "rank:0", "NCCL", 8 * MIB, 1.0)],
    }
    table = rank_table([(0, [RankBeat(0, 1, 0, 0)]), (2, [RankBeat(4, 1, 0, 0)])])
    found = {(one.source, one.target): one for one in links_between(paths, table)}
    assert found.keys() == {(0, 1), (2, 0)}
    assert (found[0, 1].bytes_per_s, found[0, 1].usual_bytes_per_s) == (2 * MIB, 2 * MIB)
    assert found[0, 1].retransmits_per_s == 1.5
    assert (found[2, 0].bytes_per_s, found[2, 0].usual_bytes_per_s) == (8 * MIB, 0.0)
    assert {(one.source, one.target) for one in links_between(paths, None)} == {(0, 1)}


def test_tables_of_parts_are_joined_to_the_table_of_all() -> None:
    places = ([4, 5], [0, 1], [1, 2])
    nodes = [(node, [RankBeat(rank, node, 0, 0) for rank in ranks]) for node, ranks in enumerate(places)]
    whole, parts = rank_table(nodes), joined([rank_table([one]) for one in nodes])
    for name in type(whole).__slots__:
        assert getattr(whole, name).tolist() == getattr(parts, name).tolist()
    assert whole.node.tolist() == [1, 2, 2, 0, 0]
    assert len(joined([])) == 0


@pytest.mark.parametrize(
    "content", [b'{"paths": [[', b"[]", b"", b'{"paths": [["a", "b", "by mail", 1, 1]]}']
)
def test_a_file_that_tells_of_no_links_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "links.json").write_bytes(content)
    with pytest.raises(msgspec.MsgspecError):
        read_paths(tmp_path / "links.json")
