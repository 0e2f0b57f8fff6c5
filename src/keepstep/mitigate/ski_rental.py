"""When a slowdown has cost so much that a remedy pays, not knowing how long it lasts (GREYHOUND §5.1, algorithm 1).

To go on slowly is to rent, to apply a remedy is to buy. The paper buys each remedy, the cheapest first, when the loss
so far equals its cost: then one pays at most twice what one would pay who knew the end. Here the same holds for the sum
over all slowdowns of a job: what earlier ones have cost less than that may be risked on what their durations suggest,
which are hours in one job and seconds in another. A remedy that saves little is bought later than in the paper, which
comes closer to the optimum. Where remedies compete (the second is not cheaper after the first was bought), no rule can
always keep to twice; then the smallest ratio that can be kept is used.

Loss and cost are seconds of training: a slowdown from 1 s to 1.5 s an iteration loses a third of a second each second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RATIO = 2.0  # worst ratio of the cost paid to the optimum
FEW = 10  # fewer slowdowns say nothing about the duration of the next
_STEPS = (0.0, 0.5, 1.0, 2.0)  # thresholds that are tried, in units of the remedy's cost
_TOLERANCE = 1e-9
_CLOSE = 1e-4  # how closely the smallest possible ratio is searched for
_HOPELESS = 64.0  # no larger ratio is tried
_NEARLY = 0.95  # thresholds other than the paper's must improve the ratio by this factor
_LONGER = 4.0  # assumed length of the next slowdown, in lengths of the longest so far
_ERRORS = 2.0  # standard errors by which a schedule must have been better to be believed
_AT_ONCE_S, _FOREVER_S = 1e-6, 1e9

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Offer:
    """A remedy: its cost, and the loss rate while it is in force. Rates are seconds lost each second, from 0 to 1."""

    cost_s: float
    rate: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """The remedies worth buying, in order, as (loss so far in seconds, place among the offers)."""

    buys: tuple[tuple[float, int], ...]
    ratio: float  # worst ratio of the cost paid to the optimum


def plain(rate: float, offers: Sequence[Offer]) -> Schedule:
    """The schedule of the paper: each remedy at a loss equal to its cost, the cheapest first; useless ones never."""
    buys: list[tuple[float, int]] = []
    best = rate
    for place in sorted(range(len(offers)), key=lambda one: (offers[one].cost_s, offers[one].rate)):
        if offers[place].rate < best:
            best = offers[place].rate
            buys.append((offers[place].cost_s, place))
    return Schedule(tuple(buys), worst_ratio(rate, offers, buys))


def schedule(
    rate: float, offers: Sequence[Offer], durations: Sequence[float] = (), credit_s: float = 0.0
) -> Schedule:
    """When to buy which remedy of a slowdown that loses ``rate`` seconds a second while nothing is done.

    ``durations``: seconds that this job's slowdowns have lasted. ``credit_s``: what all of them have cost less than
    `RATIO` times the optimum, in seconds.
    """
    base = plain(rate, offers)
    orders = _orders(rate, offers)
    safest = min((_safest(rate, offers, order) for order in orders), key=lambda one: one.ratio)
    base = safest if safest.ratio < _NEARLY * base.ratio else base
    if len(durations) < FEW:
        return base
    allowed_s = max(credit_s, _excess_s(rate, offers, base.buys)) + _TOLERANCE
    # The next slowdown is longer than all n before it once in n + 1 times; by how much is not known.
    ends = np.array([*durations, _LONGER * max(durations)], dtype=np.float64)
    usual = paid(rate, offers, base.buys, ends)
    best, most = base, 0.0
    for order in orders:
        choices = [[step * offers[place].cost_s for step in _STEPS] for place in order]
        for thresholds in itertools.product(*choices):
            if any(later < earlier for earlier, later in itertools.pairwise(thresholds)):
                continue
            buys = tuple(zip(thresholds, order, strict=True))
            saved = usual - paid(rate, offers, buys, ends)
            surely = float(saved.mean() - _ERRORS * saved.std() / np.sqrt(len(ends)))
            if surely > most and _excess_s(rate, offers, buys) <= allowed_s:
                best, most = Schedule(buys, worst_ratio(rate, offers, buys)), surely
    return best


def paid(rate: float, offers: Sequence[Offer], buys: Sequence[tuple[float, int]], ends: _Array) -> _Array:
    """The cost of slowdowns that last ``ends`` seconds: their loss, and the remedies bought until then."""
    total = np.zeros_like(ends)
    begins, loss = 0.0, rate
    for until, place in _purchases(rate, offers, buys):
        total += loss * np.minimum(np.maximum(ends - begins, 0.0), until - begins)
        total += np.where(ends >= until, offers[place].cost_s, 0.0)
        begins, loss = until, offers[place].rate
    return total + loss * np.maximum(ends - begins, 0.0)


def _purchases(
    rate: float, offers: Sequence[Offer], buys: Sequence[tuple[float, int]]
) -> Iterator[tuple[float, int]]:
    """The moment of each purchase, in seconds from the onset, and its place among the offers."""
    moment, lost, loss = 0.0, 0.0, rate
    for threshold, place in buys:
        if threshold - lost > loss * _FOREVER_S:
            return  # as good as never
        moment += (threshold - lost) / loss if threshold > lost else 0.0
        yield moment, place
        lost, loss = max(lost, threshold), offers[place].rate


def optimum(rate: float, offers: Sequence[Offer], ends: _Array) -> _Array:
    """The cost for one who knows the end: nothing is done, or the best remedy is bought at once."""
    lines = [rate * ends, *(one.cost_s + one.rate * ends for one in offers)]
    return np.min(np.stack(lines), axis=0)


def worst_ratio(rate: float, offers: Sequence[Offer], buys: Sequence[tuple[float, int]]) -> float:
    """The largest ratio of the paid cost to the optimum, over all ends of the slowdown."""
    ends = _moments(rate, offers, buys)
    costs, least = paid(rate, offers, buys, ends), optimum(rate, offers, ends)
    return float(np.max(costs / np.maximum(least, 1e-300), initial=1.0))


def _excess_s(rate: float, offers: Sequence[Offer], buys: Sequence[tuple[float, int]]) -> float:
    """What is paid beyond `RATIO` times the optimum, at worst, in seconds."""
    ends = _moments(rate, offers, buys)
    return float(np.max(paid(rate, offers, buys, ends) - RATIO * optimum(rate, offers, ends), initial=0.0))


def _moments(rate: float, offers: Sequence[Offer], buys: Sequence[tuple[float, int]]) -> _Array:
    """The ends of a slowdown at which the paid cost may be furthest from the optimum.

    Between purchases the paid cost is linear and the optimum concave. So these are the moments of purchases, those at
    which another remedy becomes the optimum, and the latest possible end.
    """
    if rate <= 0:
        return np.zeros(0)
    moments = [_FOREVER_S, *_crossings([Offer(0.0, rate), *offers])]
    moments += [max(moment, _AT_ONCE_S) for moment, _ in _purchases(rate, offers, buys)]
    return np.array([moment for moment in moments if moment > 0])


def _crossings(lines: Sequence[Offer]) -> list[float]:
    """The moments at which two offers, each bought at once, have cost the same."""
    pairs = [pair for pair in itertools.combinations(lines, 2) if pair[0].rate != pair[1].rate]
    return [min((b.cost_s - a.cost_s) / (a.rate - b.rate), _FOREVER_S) for a, b in pairs]


def _orders(rate: float, offers: Sequence[Offer]) -> list[tuple[int, ...]]:
    """All orders of purchases in which each lowers the loss rate."""
    found: list[tuple[int, ...]] = []
    ordered = sorted(range(len(offers)), key=lambda one: -offers[one].rate)
    for count in range(len(offers) + 1):
        for places in itertools.combinations(ordered, count):
            rates = [rate, *(offers[place].rate for place in places)]
            if all(later < earlier for earlier, later in itertools.pairwise(rates)):
                found.append(places)
    return found


def _safest(rate: float, offers: Sequence[Offer], order: Sequence[int]) -> Schedule:
    """The schedule with the smallest ratio for this order of purchases."""
    low, high = 1.0, 2.0
    while (found := _eager(rate, offers, order, high)) is None and high < _HOPELESS:
        low, high = high, 2 * high
    if found is None:
        return Schedule((), float("inf"))
    while high - low > _CLOSE:
        middle = (low + high) / 2
        if (better := _eager(rate, offers, order, middle)) is None:
            low = middle
        else:
            found, high = better, middle
    return Schedule(found, worst_ratio(rate, offers, found))


def _eager(
    rate: float, offers: Sequence[Offer], order: Sequence[int], ratio: float
) -> tuple[tuple[float, int], ...] | None:
    """Purchases in this order, each as early as the ratio to the optimum allows; None if the ratio cannot be kept.

    An earlier purchase is better for all that follow, so a ratio that these do not keep cannot be kept at all.
    """
    lines = [Offer(0.0, rate), *offers]
    bends = sorted({0.0, *(max(moment, 0.0) for moment in _crossings(lines))})
    flattest = min(line.rate for line in lines)
    begins, spent, lost, slope = 0.0, 0.0, 0.0, rate
    buys: list[tuple[float, int]] = []

    def spare(moment: float, cost_s: float) -> float:
        least = min(line.cost_s + line.rate * moment for line in lines)
        return ratio * least - (spent + slope * (moment - begins) + cost_s)

    for place in order:
        cost_s = offers[place].cost_s
        points = [begins, *(bend for bend in bends if bend > begins)]
        at = next((moment for moment in points if spare(moment, cost_s) >= -_TOLERANCE), None)
        earlier = points[-1] if at is None else max((one for one in points if one < at), default=begins)
        if at is None:
            if (grows := ratio * flattest - slope) <= 0:
                return None
            at = earlier - spare(earlier, cost_s) / grows
        elif at > earlier:
            first, last = spare(earlier, cost_s), spare(at, cost_s)
            at = earlier + (at - earlier) * (-first / (last - first) if last > first else 1.0)
        lost += slope * (at - begins)
        spent += slope * (at - begins) + cost_s
        begins, slope = at, offers[place].rate
        buys.append((lost, place))
    return tuple(buys) if ratio * flattest >= slope - _TOLERANCE else None
