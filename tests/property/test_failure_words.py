"""Whatever bytes a log has: no exception, bounded memory, and the same facts however the bytes come."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.told import Told, Words
from keepstep.detect.failure_rows import RowMatcher, pattern_of, shipped_rows
from keepstep.detect.listener import Bounds, Listener
from keepstep.detect.prefixes import spoken
from keepstep.detect.secrets import blanked
from keepstep.detect.templates import TemplateTree
from keepstep.locate.failure import explain
from keepstep.report.failure_page import as_json, page

MATCHER = RowMatcher(shipped_rows())
PIECES = (
    *(row.example.encode() for row in MATCHER.rows),
    b"[rank3]: ", b"[default1]: ", b"2024-01-01 10:00:00 ", b"Traceback (most recent call last):", b'  File "a.py"',
    b"\n", b"\n", b"\r", b"\x1b[31m", b"\x00\xff", "ü|é".encode("utf-16"), b"During handling of the above exception, ",
    b" 10%|#  | 1/9 [00:01<00:09, 1it/s]", b"step 3 loss 1.0", b"what(): x", b"rank      : 3 (local_rank: 1)", b": ",
)  # fmt: skip


def heard(data: bytes, *cuts: int) -> Words:
    listener = Listener(MATCHER, "log")
    for begin, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        listener.take(data[begin:end])
    return listener.words()


@settings(max_examples=many(60))
@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=30), max_size=40))
def test_no_text_is_too_odd(pieces: list[bytes]) -> None:
    words = heard(b"".join(pieces))
    failure = explain([words])
    assert page(failure, [words], "log")
    assert as_json(failure)["class"] in ("none", "storage", "network", "node", "user", "other")


@settings(max_examples=many(60))
@given(st.lists(st.sampled_from(PIECES), max_size=30), st.lists(st.integers(0, 400), max_size=4))
def test_it_does_not_matter_how_the_bytes_come(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces).replace(b"\r", b"")
    assert heard(data) == heard(data, *sorted(min(cut, len(data)) for cut in cuts))


@settings(max_examples=many(60))
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=8), max_size=8), st.integers(1, 4096))
def test_what_is_fresh_is_together_all_that_was_told(chunks: list[list[bytes]], most: int) -> None:
    listener = Listener(MATCHER, bounds=Bounds(told=most))
    fresh: list[Told] = []
    for chunk in chunks:
        listener.take(b"".join(chunk))
        fresh += listener.fresh()
    fresh += listener.fresh(last=True)

    def alone(told: Iterable[Told]) -> list[Told]:
        return [replace(one, count=1, went_on=0, recent=1) for one in told]

    assert alone(fresh) == alone(listener.words().told)
    assert all(one.count <= last.count for one, last in zip(fresh, listener.words().told, strict=True))


@settings(max_examples=many(200))
@given(st.text(max_size=300))
def test_prefixes_and_secrets_take_any_text(text: str) -> None:
    assert spoken(text).text in text.replace("\x1b", "") or "\x1b" in text
    assert isinstance(blanked(text), str)


@settings(max_examples=many(100))
@given(st.text(min_size=1, max_size=60).filter(str.strip))
def test_any_text_of_a_table_is_a_pattern(text: str) -> None:
    import re

    re.compile(pattern_of(text))


@settings(max_examples=many(50))
@given(st.lists(st.text(alphabet="ab 1=", max_size=30), max_size=60))
def test_a_message_fits_its_template(messages: list[str]) -> None:
    tree = TemplateTree(masks=())
    for message in messages:
        found = tree.add(message)
        assert found is not None
        tokens = message.replace("=", " = ").split()
        assert all(mine in ("<*>", theirs) for mine, theirs in zip(found.tokens, tokens, strict=True))
    assert sum(one.count for one in tree.templates) == len(messages)


def test_memory_is_bounded_whatever_comes() -> None:
    """Long lines, and lines of which no two are alike, with and without words of failures."""
    draw = random.Random(7)
    listener = Listener(MATCHER)
    tracemalloc.start()
    for _ in range(6):
        listener.take(b"x" * (4 << 20))
    listener.take(b"\n")
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number in range(5000):
        word = "".join(draw.choices(letters, k=12))
        listener.take(f"{'ValueError: ' if number % 8 else ''}{word} {word[::-1]}: {word}\n".encode())
    words = listener.words()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert words.lines == 5001
    assert len(words.told) <= 2 * 4096
    assert peak < 80 << 20
