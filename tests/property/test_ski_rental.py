"""When remedies are bought: against a dumb twin that counts second by second, and against one who knows the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.mitigate.ski_rental import RATIO, Offer, Schedule, optimum, paid, plain, schedule

rates = st.floats(0.02, 0.9)
offered = st.lists(st.builds(Offer, st.floats(0.0, 300.0), st.floats(0.0, 1.0)), min_size=0, max_size=3).map(
    tuple
)
ends = st.floats(0.1, 5000.0)

TICK_S = 0.01


def counted(rate: float, offers: Sequence[Offer], bought: Schedule, end_s: float) -> float:
    """What a slowdown costs, tick by tick."""
    total = lost = 0.0
    left = list(bought.buys)
    for _ in range(round(end_s / TICK_S)):
        while left and lost >= left[0][0]:
            _, place = left.pop(0)
            total += offers[place].cost_s
            rate = offers[place].rate
        lost += rate * TICK_S
    return total + lost


@given(rates, offered, st.floats(0.1, 30.0))
@settings(deadline=None, max_examples=many(60))
def test_what_is_paid_is_what_is_counted(rate: float, offers: tuple[Offer, ...], end_s: float) -> None:
    bought = plain(rate, offers)
    slack = TICK_S * len(offers) + 1e-6
    exact = paid(
        rate,
        offers,
        bought.buys,
        np.array([max(end_s - 2 * TICK_S - slack / rate, 0.0), end_s + slack / rate]),
    )
    assert exact[0] - slack <= counted(rate, offers, bought, end_s) <= exact[1] + slack + rate * TICK_S


@given(rates, offered, ends, st.lists(ends, max_size=30), st.floats(0.0, 500.0))
@settings(deadline=None, max_examples=many(150))
def test_it_never_costs_more_than_it_says(
    rate: float, offers: tuple[Offer, ...], end_s: float, durations: list[float], credit_s: float
) -> None:
    bought = schedule(rate, offers, durations, credit_s)
    costs = paid(rate, offers, bought.buys, np.array([end_s]))[0]
    least = optimum(rate, offers, np.array([end_s]))[0]
    assert costs <= bought.ratio * least * (1 + 1e-6) + 1e-6
    base = schedule(rate, offers)
    assert (
        costs
        <= max(RATIO * least + credit_s, base.ratio * least, RATIO * least + (base.ratio - RATIO) * 1e6)
        + 1e-3
    )
    places = [place for _, place in bought.buys]
    assert len(set(places)) == len(places)
    better = [rate, *(offers[place].rate for place in places)]
    assert better == sorted(better, reverse=True)


@given(rates, st.floats(0.01, 300.0), st.floats(0.0, 1.0))
def test_one_remedy_is_never_worse_than_twice_the_optimum(rate: float, cost_s: float, left: float) -> None:
    offers = (Offer(cost_s, left * rate),)
    assert schedule(rate, offers).ratio <= RATIO + 1e-6


@given(rates, offered)
@settings(deadline=None)
def test_it_is_safer_than_the_papers(rate: float, offers: tuple[Offer, ...]) -> None:
    assert schedule(rate, offers).ratio <= max(plain(rate, offers).ratio, RATIO) + 1e-6


KINDS: dict[str, Callable[[np.random.Generator], float]] = {
    "heavy tail": lambda random: float(random.lognormal(4, 1.5)),
    "memoryless": lambda random: float(random.exponential(600)),
    "seconds or an hour": lambda random: float(random.choice([5.0, 3000.0])),
    "short": lambda random: float(random.exponential(20)),
    "minutes": lambda random: float(random.lognormal(6, 0.5)),
}


def life(kind: str, seed: int) -> Iterator[tuple[float, tuple[Offer, ...], float]]:
    """The slowdowns of a job: rate, remedies, duration (seconds)."""
    random = np.random.default_rng([seed, list(KINDS).index(kind)])
    for _ in range(int(random.integers(10, 60))):
        rate = float(random.choice([0.2, 0.4, 0.6]))
        offers = (Offer(0.05, 0.4 * rate), Offer(5.0, 0.2 * rate), Offer(120.0, 0.0))
        yield rate, offers[int(random.random() < 0.3) :], KINDS[kind](random)


@pytest.mark.parametrize("kind", KINDS)
def test_over_a_jobs_life_it_pays_no_more_than_plain_ski_rental(kind: str) -> None:
    ours: list[float] = []
    papers: list[float] = []
    for seed in range(many(6)):
        durations: list[float] = []
        spent = plainly = least = 0.0
        for rate, offers, duration_s in life(kind, seed):
            end = np.array([duration_s])
            bought = schedule(rate, offers, durations, RATIO * least - spent + offers[-1].cost_s)
            spent += float(paid(rate, offers, bought.buys, end)[0])
            plainly += float(paid(rate, offers, plain(rate, offers).buys, end)[0])
            least += float(optimum(rate, offers, end)[0])
            durations.append(duration_s)
            assert spent <= 2.05 * least + 120.0
        ours.append(spent / least)
        papers.append(plainly / least)
    assert np.mean(ours) <= np.mean(papers)
    assert max(ours) <= 2.05
