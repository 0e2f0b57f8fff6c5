from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.errors import UsageError
from keepstep.core.ranges import expand_ranks, fold_nodes, fold_ranks


def expand_nodes(text: str) -> list[str]:
    """A plain inverse of ``fold_nodes``."""
    names: list[str] = []
    for prefix, inner, suffix, plain in re.findall(r"([^,\[]*)\[([^\]]+)\]([^,\[]*)|([^,\[\]]+)", text):
        names += [plain] if plain else []
        for piece in filter(None, inner.split(",")):
            first, _, last = piece.partition("-")
            width = len(first) if first.startswith("0") else 0
            names += [f"{prefix}{n:0{width}d}{suffix}" for n in range(int(first), int(last or first) + 1)]
    return names


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([0], "0"), ([3, 1, 2, 2, 8, 12], "1-3,8,12"), (range(1, 9), "1-8"), ([0, 1], "0-1")],
)
def test_ranks_fold(ranks, text):
    assert fold_ranks(ranks) == text
    assert expand_ranks(text) == tuple(sorted(set(ranks)))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["localhost"], "localhost"),
        ([f"gpu-{i:02d}" for i in range(1, 9)], "gpu-[01-08]"),
        ([f"gpu-{i:02d}" for i in range(8, 12)], "gpu-[08-11]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["gpu-114"], "gpu-114"),
        (
            ["rack1-n2.cluster", "rack1-n3.cluster", "rack2-n2.cluster"],
            "rack1-n[2-3].cluster,rack2-n2.cluster",
        ),
        (["b", "a1", "a2", "a4"], "a[1-2,4],b"),
        (["a9", "a09", "a10"], "a9,a[09-10]"),
    ],
)
def test_nodes_fold(names, text):
    assert fold_nodes(names) == text
    assert sorted(expand_nodes(text)) == sorted(names)


@pytest.mark.parametrize("text", ["1-", "8-1", "a", "1--2", "-3", "0-99999999999"])
def test_bad_rank_lists_are_refused(text):
    with pytest.raises(UsageError, match="list"):
        expand_ranks(text)


@given(st.sets(st.integers(0, 3000)))
def test_rank_lists_survive_the_round_trip(ranks):
    assert expand_ranks(fold_ranks(ranks)) == tuple(sorted(ranks))


@given(st.sets(st.from_regex(r"[a-c]{0,2}-?[0-9]{0,4}[xy]?", fullmatch=True).filter(bool)))
def test_node_lists_survive_the_round_trip(names):
    assert sorted(expand_nodes(fold_nodes(names))) == sorted(names)
