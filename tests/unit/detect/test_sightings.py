"""Who said some texts, against a dumb twin that looks at each line for itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.told import Seen, like
from keepstep.detect.prefixes import spoken
from keepstep.detect.sightings import Sightings

TEXTS = ("shard 7 went odd", "shard 12 went odd", "tiles were flushed", "step 3 loss 0.25", "")
LINE = st.builds(lambda rank, text: f"[rank{rank}]: {text}", st.integers(0, 12), st.sampled_from(TEXTS))
WANTED = (like("shard 1 went odd"), like("tiles were flushed"))


def seen(log: str, size: int = 1 << 20, wanted: tuple[str, ...] = WANTED) -> Seen:
    found = Sightings(wanted)
    found.begin("a.log")
    data = log.encode()
    for at in range(0, len(data), size):
        found.take(data[at : at + size])
    found.end()
    return found.seen()


@given(st.lists(LINE, max_size=60), st.integers(1, 200))
def test_who_said_what_and_how_often(lines: list[str], size: int) -> None:
    by: dict[str, Counter[str]] = {text: Counter() for text in WANTED}
    for line in lines:
        said = spoken(line)
        if like(said.text) in by:
            by[like(said.text)][f"rank {said.speaker.rank}"] += 1
    found = seen("".join(line + "\n" for line in lines), size)
    assert {text: Counter(found.by[text]) for text in WANTED} == by
    assert found.lines == len(lines)
    assert sum(found.speakers.values()) == len(lines)


@pytest.mark.parametrize(
    ("log", "phase"),
    [
        ("it went odd\n", ("start", 0)),
        ("step 1 loss 2\nit went odd\n", ("step", 0)),
        ("step 1 loss 2\nSaving checkpoint at step\nit went odd\n", ("checkpoint", 0)),
        (
            "step 1 loss 2\n" + "Saving checkpoint\nstep 2 loss 2\n" * 3 + "Saving checkpoint\nit went odd\n",
            ("checkpoint", 3),
        ),
        (
            "step 1 loss 2\nrunning validation\nit went odd\nSaving checkpoint\nit went odd\n",
            ("evaluation", 0),
        ),
    ],
)
def test_the_phase_in_which_a_text_was_said_first(log: str, phase: tuple[str, int]) -> None:
    assert seen(log, wanted=("it went odd",)).phase["it went odd"] == phase


@given(st.binary(max_size=2000))
def test_any_bytes_are_taken(data: bytes) -> None:
    found = Sightings(WANTED)
    found.begin("a", 3)
    found.take(data)
    found.end()
    assert found.seen().lines >= data.count(b"\n")
