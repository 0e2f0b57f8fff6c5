from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from keepstep.detect.period import find_period

DDP = [("all_reduce", "dp", size) for size in (25, 25, 25, 17, 3)]
MICRO = [("all_gather", "tp", 8), ("reduce_scatter", "tp", 8), ("send", "pp", 4)]
STEP = MICRO * 8 + [("all_reduce", "dp", 99)]
NESTED = [
    (op, f"layer{layer}", 1) for layer in range(4) for op in ("gather", "gather", "scatter") * 3
] * 2 + [("barrier", "world", 0)]


@pytest.mark.parametrize(
    "pattern", [[("all_reduce", "dp", 1)], DDP, STEP, NESTED], ids=["one", "ddp", "steps", "nested"]
)
@pytest.mark.parametrize("cut", [0, 3])
def test_clean_sequences(pattern: list[Hashable], cut: int) -> None:
    assert find_period((pattern * 20)[cut:]) == len(pattern)


def test_a_warm_up_prefix_is_left_out() -> None:
    prefix = [("broadcast", "world", size) for size in range(50)]
    assert find_period(prefix + DDP * 20) == 5


def test_half_a_percent_of_wrong_records_does_no_harm() -> None:
    rng = random.Random(3)
    for pattern in (DDP, STEP, NESTED):
        symbols = [rng.choice(pattern) if rng.random() < 0.005 else symbol for symbol in pattern * 40]
        assert find_period(symbols) == len(pattern)


@pytest.mark.parametrize("symbols", [[], [1], [1, 2, 3, 1, 2, 3, 1], list(range(1000))])
def test_too_little_or_nothing_to_see(symbols: list[int]) -> None:
    assert find_period(symbols) is None


def test_random_symbols_are_refused() -> None:
    rng = random.Random(5)
    assert all(find_period([rng.randrange(4) for _ in range(500)]) is None for _ in range(50))


def test_irregular_sizes_are_refused() -> None:
    rng = random.Random(6)
    for _ in range(20):
        symbols = [
            ("all_to_all", "ep", rng.randrange(5)) if symbol[0] == "all_gather" else symbol
            for symbol in STEP * 20
        ]
        assert find_period(symbols) is None


def test_lost_records_do_not_pass_a_micro_batch_for_a_step() -> None:
    rng = random.Random(7)
    step = MICRO[:2] * 60 + [("all_reduce", "dp", 99)]
    assert find_period(step * 60) is not None
    assert find_period([symbol for symbol in step * 60 if rng.random() > 0.005]) is None


def test_the_rhythm_of_now_counts() -> None:
    assert find_period(DDP * 100 + NESTED * 60) == len(NESTED)


def test_a_long_sequence() -> None:
    assert find_period([("op", place % 37, place) for place in range(900)] * 112) == 900
