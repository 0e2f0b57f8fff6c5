from __future__ import annotations

import json

import pytest

from keepstep.core.errors import LayoutError
from keepstep.core.rank_table import Placement, RankTable


def table(nodes=2, per_node=2, **changes):
    return RankTable(
        tuple(
            Placement(node * per_node + local, f"n{node}", local, 100 + local)
            for node in range(nodes)
            for local in range(per_node)
        ),
        **changes,
    )


def test_lookups():
    ranks = table()
    assert ranks.world_size == 4
    assert ranks.nodes == ("n0", "n1")
    assert ranks.node_of(3) == "n1"
    assert ranks.ranks_on("n1") == (2, 3)
    assert ranks.ranks_on("elsewhere") == ()
    assert ranks.node_by_rank() == {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def test_round_trip_and_digest():
    ranks = table(incarnation=3)
    again = RankTable.from_dict(json.loads(json.dumps(ranks.to_dict())))
    assert again == ranks
    assert again.digest() == ranks.digest()
    assert RankTable(tuple(reversed(ranks.placements)), 3).digest() == ranks.digest()
    assert table(incarnation=4).digest() != ranks.digest()


def test_the_digest_is_stable_between_versions():
    ranks = RankTable((Placement(0, "n0", 0, 7),))
    assert ranks.digest() == "4be34c5c9a8003f324a25338c43d31987685928cd488356f92116cab6981bdfc"


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([], "no rank"),
        ([Placement(0, "a", 0), Placement(0, "a", 1)], "ranks 0 are placed more than once"),
        ([Placement(0, "a", 0), Placement(3, "a", 1)], "ranks 1 are not"),
        ([Placement(-1, "a", 0)], "negative"),
        ([Placement(0, "a", 1)], "local ranks"),
        ([Placement(0, "", 0)], "no node name"),
        ([Placement(0, "a", 0, 9), Placement(1, "a", 1, 9)], "plays two ranks"),
    ],
)
def test_tables_that_cannot_be(placements, message):
    with pytest.raises(LayoutError, match=message):
        RankTable(tuple(placements))


@pytest.mark.parametrize(
    "data",
    [{}, {"schema": 1}, {"schema": 2}, {"schema": 1, "incarnation": 0, "placements": [{"rank": "x"}]},
     {"schema": 1, "incarnation": 0, "placements": [1]}, {"schema": 1, "incarnation": -1, "placements": []}],
)  # fmt: skip
def test_data_that_is_no_table(data):
    with pytest.raises(LayoutError, match="rank table"):
        RankTable.from_dict(data)
