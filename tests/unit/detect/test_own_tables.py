"""A site's own tables: used beside keepstep's, and left out with one line where they are wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.control.incidents import job_words
from keepstep.core.errors import UsageError
from keepstep.detect import own_tables
from keepstep.detect.error_kind import kind_of, speaks_of_hardware
from keepstep.launch.node.checks import Subject, why_tables
from keepstep.wire import Said, Words

ROW = (
    '[[row]]\nname = "our-quota"\nrole = "cause"\nclass = "storage"\nkind = "quota"\ntitle = "used up"\n'
    'text = "project * is over its share"\n'
)
CARD = ROW.replace("our-quota", "our-card").replace('"storage"', '"node"').replace("project", "card")


def forget() -> None:
    for one in (
        own_tables.own_rows, own_tables.own_matcher, own_tables.matcher_in_force, job_words._rows,
    ):  # fmt: skip
        one.cache_clear()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "keepstep.toml"
    path.write_text('[why]\ntables = ["own.toml", "missing.toml", "wrong.toml", "pipe.toml"]\n')
    (tmp_path / "own.toml").write_text(ROW + CARD)
    (tmp_path / "wrong.toml").write_text("[[row]]\nname = 'x'\n")
    os.mkfifo(tmp_path / "pipe.toml")
    monkeypatch.setenv("KEEPSTEP_CONFIG", str(path))
    forget()
    yield path
    forget()


def test_wrong_tables_are_left_out_with_one_line_each(config: Path) -> None:
    rows, left_out = own_tables.own_rows()
    assert [row.name for row in rows] == ["our-quota", "our-card"]
    assert [line.partition(":")[0].rpartition("/")[2] for line in left_out] == [
        "missing.toml", "wrong.toml", "pipe.toml",
    ]  # fmt: skip
    assert all(line.endswith("it is left out") and "\n" not in line for line in left_out)
    found = list(why_tables.look(Subject("n", 1, fresh=True)))
    assert [one.text for one in found] == [f"node n: {line}" for line in left_out]
    assert not any(one.unfit for one in found)
    assert list(why_tables.look(Subject("n", 1))) == []


@pytest.mark.parametrize("text", ["[why]\ntables = 3\n", "why = 1\n", "[[[", '[why]\ntables = ["a", 1]\n'])
def test_a_wrong_configuration_leaves_keepsteps_own(config: Path, text: str) -> None:
    config.write_text(text)
    rows, (line,) = own_tables.rows_of(os.environ)
    assert rows == ()
    assert line.endswith("keepstep's own tables are used")
    with pytest.raises(UsageError):
        own_tables.named_tables(os.environ)


def test_too_many_tables_are_refused(config: Path) -> None:
    config.write_text(f"[why]\ntables = {['a.toml'] * 65}\n")
    with pytest.raises(UsageError, match="names 65 tables"):
        own_tables.named_tables(os.environ)


def test_decisions_follow_own_rows(config: Path) -> None:
    assert kind_of("ValueError: project llm is over its share") == ("storage", "quota")
    assert kind_of("ValueError: project llm is fine") is None
    assert kind_of("OSError: [Errno 28] No space left on device: '/ckpt/a'") == ("storage", "no-space")
    assert speaks_of_hardware("ValueError: card 3 is over its share")
    assert not speaks_of_hardware("ValueError: project llm is over its share")


def test_the_controller_knows_own_rows_and_matches_lines_of_rows_that_it_has_not(config: Path) -> None:
    words = job_words.JobWords(lambda now_s: now_s)
    line = "project llm is over its share"
    lines = [
        Said(rank, row, line, "stderr", 1, 100.0) for rank, row in enumerate(("our-quota", "their-quota"))
    ]
    assert words.heard("a", Words(0, tuple(lines)))
    assert (
        words.heard("b", Words(1, (Said(2, "not-here", "project llm is fine", "stderr", 1, 100.0),))) is False
    )
    cause = job_words.cause_of(words.failure([], range(4)))
    assert cause is not None
    assert (cause.cause_class, cause.kind, cause.row) == ("storage", "quota", "our-quota")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("our-quota", "q" * 101), "its name has 101 characters"),
        (("project *", "{path} and {path}"), "has a place twice"),
    ],
)
def test_rows_that_could_not_be_used_are_refused(config: Path, change: tuple[str, str], said: str) -> None:
    (config.parent / "own.toml").write_text(ROW.replace(*change))
    rows, left_out = own_tables.rows_of(os.environ)
    assert rows == ()
    assert said in left_out[0]
