"""The tables of messages: each row knows its own example, and not what only looks like it."""

from __future__ import annotations

from collections import Counter

import pytest

from keepstep.core.errors import UsageError
from keepstep.core.told import Row
from keepstep.detect.failure_rows import RowMatcher, pattern_of, rows_of, shipped_rows

ROWS = shipped_rows()
MATCHER = RowMatcher(ROWS)
ENTRY = {
    "name": "a",
    "role": "cause",
    "class": "node",
    "kind": "k",
    "title": "t",
    "text": "disk {path} is odd",
}


def only(**fields: object) -> Row:
    return next(rows_of({"row": [{**ENTRY, **fields}]}, "own.toml"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_knows_its_example_and_not_what_is_near(row: Row) -> None:
    found = MATCHER.match(row.example)
    assert found is not None
    assert found[0].name == row.name
    assert row.near
    assert RowMatcher([row]).match(row.near) is None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_says_what_it_is_and_where_it_comes_from(row: Row) -> None:
    assert row.title
    assert row.source
    assert row.licence
    assert row.advice or row.role in ("echo", "timeout", "note", "harmless")
    assert all(words for _, words in row.lookups), "without a whole word each line would be tried"


def test_names_are_there_once() -> None:
    assert not [name for name, count in Counter(row.name for row in ROWS).items() if count > 1]


def test_there_are_all_classes_and_many_kinds() -> None:
    assert {row.cause_class for row in ROWS} == {"storage", "network", "node", "user", "other"}
    assert len({row.kind for row in ROWS}) > 60


@pytest.mark.parametrize(
    ("text", "line", "matches"),
    [
        ("lost {path} of #", "lost /a/b of 3", True),
        ("lost {path} of #", "lost /a/b of it", False),
        ("disk * full", "the disk sda is full now", True),
        ("disk * full", "the disk sda is fuller now", False),
        ("efa%*failed", "efa_0: mr has failed", True),
        ("efa*failed", "efa_0: mr has failed", False),
        ("no space", "NO   SPACE", True),
        ("no space", "no spaces", False),
        ("(exitcode: -9)", "(exitcode: -9) x", True),
        ("gpu {pci}", "gpu 0000:3b:00.0", True),
    ],
)
def test_what_a_text_of_a_table_matches(text: str, line: str, matches: bool) -> None:
    assert (RowMatcher([only(text=text)]).match(line) is not None) is matches
    assert pattern_of(text)


def test_of_texts_for_one_kind_the_one_that_tells_who_counts() -> None:
    bare, who = only(text="it has crashed"), only(name="b", text="rank {rank}: it has crashed")
    other = only(name="c", kind="l", text="rank {rank}: it has crashed")
    for rows, name, places in (
        ([bare, who], "b", {"rank": "7"}),
        ([who, bare], "b", {"rank": "7"}),
        ([bare, other], "a", {}),
        ([only(text=["it has crashed", "rank {rank}: it has crashed"])], "a", {"rank": "7"}),
    ):
        found = RowMatcher(rows).match("rank 7: it has crashed")
        assert found is not None
        assert (found[0].name, found[1]) == (name, places)


def test_places_are_told() -> None:
    found = RowMatcher([only()]).match("disk /dev/sda is odd")
    assert found is not None
    assert found[1] == {"path": "/dev/sda"}


def test_own_rows_come_first_and_causes_go_before_consequences() -> None:
    own = only(text="CUDA out of memory", kind="own")
    found = RowMatcher([own, *ROWS]).match("RuntimeError: CUDA out of memory.")
    assert found is not None
    assert found[0].kind == "own"
    both = "watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered"
    found = MATCHER.match(both)
    assert found is not None
    assert found[0].kind == "gpu-ecc"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"role": "reason"}, "role is 'reason'"),
        ({"class": "disk"}, "class is 'disk'"),
        ({"blames": "me"}, "blames is 'me'"),
        ({"colour": "red"}, "there is no colour"),
        ({"title": ""}, "must be there"),
        ({"title": 3}, "title is no text"),
        ({"text": []}, "wants either text"),
        ({"pattern": "a", "text": "b"}, "wants either text"),
        ({"general": "x"}, "general is no number"),
    ],
)
def test_a_wrong_row_is_told_in_one_line(fields: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        only(**fields)
    assert str(caught.value).startswith("own.toml: row a")


def test_a_wrong_pattern_is_told() -> None:
    entry = {**{k: v for k, v in ENTRY.items() if k != "text"}, "pattern": "("}
    with pytest.raises(UsageError, match="its pattern is wrong"):
        list(rows_of({"row": [entry]}, "own.toml"))
    with pytest.raises(UsageError, match=r"write \[\[row\]\]"):
        list(rows_of({"row": ["x"]}, "own.toml"))
