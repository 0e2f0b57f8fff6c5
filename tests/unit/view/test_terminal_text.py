"""Text that fits its columns, whatever it consists of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.view.terminal_text import columns_of, fitted, in_ascii, wrapped


@pytest.mark.parametrize(
    ("text", "width", "told"),
    [
        ("gpu-1", 8, "gpu-1   "),
        ("gpu-100", 5, "gpu-…"),
        ("节点一号", 5, "节点…"),
        ("节点一号", 6, "节点… "),
        ("e\u0301e\u0301", 3, "e\u0301e\u0301 "),
        ("a\nb", 6, "a\\nb  "),
        ("\x1b[2J", 6, "\\x1b[…"),
        ("x", 0, ""),
    ],
)
def test_fitted(text: str, width: int, told: str) -> None:
    assert fitted(text, width) == told


def test_figures_stand_at_the_right() -> None:
    assert fitted("12", 4, right=True) == "  12"


def test_wrapped_between_words_and_cut_after_the_last_line() -> None:
    assert wrapped("one two three four", 9, 3) == ["one two", "three", "four"]
    assert wrapped("one two three four", 9, 2) == ["one two", "three fo…"]
    assert wrapped("x" * 12, 5, 3) == ["xxxxx", "xxxxx", "xx"]
    assert wrapped("", 9, 2) == []


def test_a_terminal_that_knows_ascii_only() -> None:
    assert in_ascii("a → b ×1.2 … 节") == "a -> b x1.2 ~ ?"


@given(st.text(max_size=60), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=many(200))
def test_no_line_is_wider_than_it_may_be(text: str, width: int, most: int) -> None:
    assert columns_of(fitted(text, width)) == width
    assert fitted(text, width).isprintable()
    lines = wrapped(text, width, most)
    assert len(lines) <= most
    assert all(columns_of(line) <= width and line.isprintable() for line in lines)
