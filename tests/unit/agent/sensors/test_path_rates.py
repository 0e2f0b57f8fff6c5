"""Rates of network paths: of the last ten seconds, and of all before."""

from __future__ import annotations

from keepstep.agent.sensors.path_rates import PathRates, chosen
from keepstep.wire.messages import MOST_PATHS, PathRate

MIB = 1 << 20


def test_a_window_is_compared_with_those_before_it() -> None:
    rates = PathRates("TCP")
    rates.add({("a", "b"): (4 * MIB, 2.0)})
    rates.add({("a", "b"): (4 * MIB, 2.0)}, {("a", "b"): 5})
    (first,) = rates.close_window(10.0)
    assert (first.bytes, first.busy_s, first.usual_bytes_per_s, first.retransmits_per_s) == (
        8 * MIB,
        4.0,
        0.0,
        0.5,
    )
    rates.add({("a", "b"): (1 * MIB, 5.0)})
    (slow,) = rates.close_window(10.0)
    assert (slow.bytes / slow.busy_s, slow.usual_bytes_per_s) == (MIB / 5, 2 * MIB)
    (idle,) = rates.close_window(10.0)
    assert (idle.bytes, idle.busy_s, idle.retransmits_per_s) == (0.0, 0.0, 0.0)


def test_few_bytes_do_not_count_as_usual() -> None:
    rates = PathRates("NCCL")
    rates.add({("rank:0", "rank:8"): (100, 1.0)})
    rates.close_window(10.0)
    assert rates.close_window(10.0)[0].usual_bytes_per_s == 0.0


def test_paths_are_bounded_and_the_busiest_are_told() -> None:
    rates = PathRates("TCP")
    rates.add({("a", f"b{number}"): (MIB, float(number)) for number in range(10_000)})
    rates.add({("idle", "b0"): (0, 0.0)})
    found = rates.close_window(10.0)
    assert len(found) == 4096
    told = chosen([*found, PathRate("other", "b0", "TCP", 0.0, 0.0)])
    assert len(told) == MOST_PATHS
    assert told[0].target == "b4095"
    assert told[-1].source == "other"  # so that it is known whose address it is
