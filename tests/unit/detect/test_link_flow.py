"""How links are judged: what flows, what stalls and who holds it up."""

from __future__ import annotations

import numpy as np
import pytest

from keepstep.core.link_counters import COMPLETION, LINK, WINDOW, LinkLosses, LinkSnapshot
from keepstep.detect.link_flow import Flow, judge

S = 1_000_000_000
NOW = 1000 * S
CHUNK = 1 << 20


def snapshot(rates: list[float], *, send: bool = True, last_s: float = 0.0, **counters: int) -> LinkSnapshot:
    """One link whose last completions, one chunk each, came at these rates, the last one ``last_s`` ago."""
    links = np.zeros(1, LINK)
    windows = np.zeros((1, WINDOW), COMPLETION)
    time_ns = NOW - int(last_s * S)
    busy = [int(CHUNK / rate * 1e9) for rate in rates]
    for place in range(len(rates)):
        at = WINDOW - len(rates) + place
        windows[0, at] = (time_ns - sum(busy[place + 1 :]), CHUNK, busy[place])
    for name in ("started", "ready", "posted", "completed", "finished"):
        links[name] = len(rates)
    links["send"], links["completed_ns"], links["moved_ns"] = send, time_ns, time_ns
    for name, value in counters.items():
        links[name] = value
    nothing = LinkLosses(0, 0, 0, 0, 0, 0)
    return LinkSnapshot(NOW, 1, 5, (), links, windows, nothing, 0)


def flow(seen: LinkSnapshot, usual: float | None = None) -> Flow:
    return Flow(int(judge(seen, None if usual is None else np.array([usual]))["flow"][0]))


STEADY = [10e9] * 65
FITFUL = ([20e9] * 8 + [2e9] * 8) * 4


def test_a_link_that_moves_nothing_is_idle() -> None:
    assert flow(snapshot(STEADY, last_s=60)) is Flow.IDLE


def test_a_steady_link_is_fine() -> None:
    assert flow(snapshot(STEADY, started=70, ready=70, posted=70)) is Flow.FINE


def test_in_flight_and_nothing_completed_is_a_stall() -> None:
    seen = snapshot(STEADY, last_s=0.6, started=70, ready=70, posted=70)
    assert flow(seen) is Flow.STALLED
    assert flow(snapshot(STEADY, last_s=0.4, started=70, ready=70, posted=70)) is Flow.FINE


def test_what_was_posted_just_now_after_a_long_pause_is_no_stall() -> None:
    assert (
        flow(snapshot(STEADY, last_s=60, started=70, ready=70, posted=70, since_ns=NOW - S // 10))
        is Flow.FINE
    )


def test_fluctuating_throughput_is_congestion() -> None:
    seen = snapshot(FITFUL, started=70, ready=70, posted=70)
    assert flow(seen) is Flow.CONGESTED
    assert judge(seen)["fluctuation"][0] == pytest.approx(9 / 11, rel=1e-3)


def test_congestion_is_told_between_two_operations_but_not_for_ever() -> None:
    assert flow(snapshot(FITFUL, last_s=1)) is Flow.CONGESTED
    assert flow(snapshot(FITFUL, last_s=6)) is Flow.IDLE


def test_pauses_between_operations_are_no_congestion() -> None:
    seen = snapshot(STEADY)
    seen.windows["time_ns"][0, :32] -= 3 * S  # the training computed for three seconds
    assert flow(seen) is Flow.IDLE
    judged = judge(seen)[0]
    assert judged["rate"] == pytest.approx(10e9, rel=1e-2)
    assert judged["throughput"] == pytest.approx(64 * CHUNK / 3, rel=0.02)  # equation 1 spans the pause


def test_steady_but_below_the_usual_rate_is_slow() -> None:
    assert flow(snapshot(STEADY), usual=12e9) is Flow.IDLE
    assert flow(snapshot(STEADY), usual=13e9) is Flow.SLOW
    assert flow(snapshot(STEADY), usual=float("nan")) is Flow.IDLE


def test_who_holds_a_send_up() -> None:
    assert flow(snapshot(STEADY, last_s=1, started=70)) is Flow.GPU
    assert flow(snapshot(STEADY, last_s=1, started=70, ready=70)) is Flow.PEER
    assert flow(snapshot(STEADY, last_s=0.1, started=70, ready=70)) is Flow.FINE


def test_a_receiving_link_is_never_blamed() -> None:
    waiting = snapshot(STEADY, send=False, last_s=1, started=70, ready=70, posted=70)
    assert flow(waiting) is Flow.WAITING
    assert flow(snapshot(FITFUL, send=False), usual=1e12) is Flow.IDLE
    full = snapshot(STEADY, send=False, last_s=1, started=70, ready=70, posted=70, finished=60)
    assert flow(full) is Flow.GPU


def test_small_chunks_at_the_end_of_operations_are_left_out() -> None:
    seen = snapshot(STEADY)
    seen.windows["bytes"][0, ::4] = 64
    seen.windows["busy_ns"][0, ::4] = 20_000
    assert judge(seen)["fluctuation"][0] == pytest.approx(0, abs=1e-3)


def test_too_few_completions_say_nothing() -> None:
    judged = judge(snapshot([10e9] * 31))[0]
    assert np.isnan(judged["fluctuation"])
    assert np.isnan(judge(snapshot([10e9]))["throughput"][0])


def test_no_links() -> None:
    empty = LinkSnapshot(
        NOW, 0, 0, (), np.zeros(0, LINK), np.zeros((0, WINDOW), COMPLETION), LinkLosses(*[0] * 6), 0
    )
    assert len(judge(empty)) == 0
