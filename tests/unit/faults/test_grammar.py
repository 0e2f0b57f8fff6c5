from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.errors import FaultError
from keepstep.faults import (
    Delay,
    Hang,
    Kill,
    LinkDown,
    Raise,
    Skip,
    Slow,
    SlowData,
    SlowLink,
    Stop,
    parse,
    parse_one,
    sentences,
)
from keepstep.faults.grammar import EXAMPLES, PLACES

SENTENCES = {
    "slow rank 2 by 2x at step 30 for 15 steps": Slow(2, 2.0, 30, 15),
    "slow rank 1 by 1.3x at step 40": Slow(1, 1.3, 40),
    "Slow  rank 1 by 4× at step 4 for 1 step": Slow(1, 4.0, 4, 1),
    "slow data loader of rank 2 by 0.5 s at step 10 for 5 steps": SlowData(2, 0.5, 10, 5),
    "delay rank 2 by 0.06 s in forward 3 at step 20 for 12 steps": Delay(2, 0.06, "forward", 3, 20, 12),
    "delay rank 0 by 1 s in backward 0 at step 5": Delay(0, 1.0, "backward", 0, 5),
    "hang rank 1 at step 40 in backward": Hang(1, 40, "backward"),
    "hang rank 1 at step 40 in data for 20 s": Hang(1, 40, "data", 20.0),
    "stop rank 1 at step 5 for 10s": Stop(1, 5, 10.0),
    "stop rank 1 at step 5": Stop(1, 5),
    "kill rank 3 at step 9": Kill(3, 9),
    "raise in rank 0 at step 7": Raise(0, 7),
    "skip in rank 2 at step 20": Skip(2, 20),
    "slow link from node-a to node-b to 20mbit at 5 s for 10 s": SlowLink(
        "node-a", "node-b", "20mbit", 5.0, 10.0
    ),
    "slow link from node-a to node-b to 20mbit": SlowLink("node-a", "node-b", "20mbit"),
    "slow link of node-a to 1.5gbit at 5 s": SlowLink("node-a", None, "1.5gbit", 5.0),
    "link down of node-a at 5 s for 3 s": LinkDown("node-a", 5.0, 3.0),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_is_read_as_its_fault(sentence: str) -> None:
    assert parse_one(sentence) == SENTENCES[sentence]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_its_own_canonical_form(example: str) -> None:
    assert str(parse_one(example)) == example


def test_several_sentences_are_separated_by_semicolons_or_newlines() -> None:
    text = "kill rank 3 at step 9; raise in rank 0 at step 7\n\n stop rank 1 at step 5 ;"
    assert parse(text) == (Kill(3, 9), Raise(0, 7), Stop(1, 5))


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("slow rank two by 2x at step 3", 'expected a rank (a whole number) where "two" stands'),
        ("slow rank 2 by 2 at step 3", 'expected a factor such as "2x" where "2" stands'),
        ("slow rank 2 by 0.5x at step 3", 'expected a factor of at least "1x" where "0.5x" stands'),
        ("slow rank 2 by 2x", 'expected "at" where the sentence ends'),
        ("slow rank 2 by 2x at step 3 for 5", 'expected "steps" where the sentence ends'),
        (
            "hang rank 1 at step 4 in sleep",
            'expected one of forward, backward, optimizer, data where "sleep"',
        ),
        ("stop rank 1 at step 5 for ten s", 'expected seconds such as "10 s"'),
        ("kill rank 3 at step 9 please", 'expected the end where "please" stands'),
        ("slow link from a to b to fast", 'expected a rate such as "20mbit"'),
        ("kill rank -1 at step 2", "expected a rank"),
        ("explode rank 1", "expected a sentence such as one of"),
        ("", "no fault given"),
        (" ; \n", "no fault given"),
    ],
)
def test_a_refusal_says_what_was_expected_and_shows_an_example(sentence: str, said: str) -> None:
    with pytest.raises(FaultError) as refusal:
        parse(sentence)
    assert said in str(refusal.value)
    assert any(example in str(refusal.value) for example in EXAMPLES)


RANKS = st.integers(0, 10**6)
STEPS = st.integers(0, 10**8)
COUNTS = st.none() | st.integers(1, 10**6)
SECONDS = st.integers(0, 10**6).map(float) | st.floats(0.001, 9e5).map(lambda value: round(value, 3))
HOSTS = st.from_regex(r"\A[a-z][a-z0-9-]{0,12}\Z")
RATES = st.sampled_from(("20mbit", "1gbit", "500kbit", "1.5mbit"))
FAULTS = st.one_of(
    st.builds(Slow, RANKS, st.floats(1, 9999).map(lambda value: round(value, 2)), STEPS, COUNTS),
    st.builds(SlowData, RANKS, SECONDS, STEPS, COUNTS),
    st.builds(Delay, RANKS, SECONDS, st.sampled_from(PLACES), STEPS, STEPS, COUNTS),
    st.builds(Hang, RANKS, STEPS, st.sampled_from(PLACES), st.none() | SECONDS),
    st.builds(Stop, RANKS, STEPS, st.none() | SECONDS),
    st.builds(Kill, RANKS, STEPS),
    st.builds(Raise, RANKS, STEPS),
    st.builds(Skip, RANKS, STEPS),
    st.builds(SlowLink, HOSTS, st.none() | HOSTS, RATES, SECONDS, st.none() | SECONDS),
    st.builds(LinkDown, HOSTS, SECONDS, st.none() | SECONDS),
)


@given(st.lists(FAULTS, min_size=1, max_size=4))
def test_round_trip(faults: list) -> None:
    assert parse(sentences(tuple(faults))) == tuple(faults)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    said = ""
    try:
        assert parse(text)
    except FaultError as refusal:
        said = str(refusal)
    assert not said or "expected" in said
