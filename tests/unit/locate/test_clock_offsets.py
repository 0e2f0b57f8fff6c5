from __future__ import annotations

import math
import time

from keepstep.core.events import Op
from keepstep.core.summary import ClockSample
from keepstep.locate.clock_offsets import SampledClocks, estimate_offsets


def sample(rank, start, end, *, seq=0, op=Op.ALLREDUCE, group="world", peer=-1):
    return ClockSample(group, int(op), peer, seq, rank, start, end)


def test_nothing_known():
    offsets = estimate_offsets({})
    assert offsets.offset_s("n0") == 0.0
    assert math.isinf(offsets.bound_s("n0"))


def test_one_node_is_its_own_reference():
    offsets = estimate_offsets({"n0": [sample(0, 1, 2)]})
    assert offsets.reference == "n0"
    assert offsets.bound_s("n0") == 0.0


def test_a_collective_bounds_both_sides():
    offsets = estimate_offsets({"a": [sample(0, 0.0, 1.0)], "b": [sample(1, 100.9, 101.0)]})
    assert offsets.reference == "a"
    assert offsets.offset_s("b") == -100.0
    assert math.isclose(offsets.bound_s("b"), 1.0, abs_tol=1e-6)  # a may have started when b ended: -101


def test_late_arrival_on_either_side_narrows_the_interval():
    rows = {
        "a": [sample(0, 0.0, 1.0, seq=0), sample(0, 10.9, 11.0, seq=1)],
        "b": [sample(1, 100.9, 101.0, seq=0), sample(1, 110.0, 111.0, seq=1)],
    }
    offsets = estimate_offsets(rows)
    assert abs(offsets.offset_s("b") + 100.0) < 1e-6
    assert offsets.bound_s("b") < 0.11


def test_one_way_messages_bound_one_side_only():
    rows = {"a": [sample(0, 5.0, 5.1, op=Op.SEND, peer=1)], "b": [sample(1, 2.0, 3.0, op=Op.RECV, peer=0)]}
    offsets = estimate_offsets(rows)
    assert math.isinf(offsets.bound_s("b"))
    assert math.isclose(offsets.offset_s("b"), 2.0, abs_tol=1e-3)


def test_broadcast_holds_from_the_root_only():
    rows = {
        "a": [sample(0, 5.0, 5.1, op=Op.BROADCAST, peer=0)],
        "b": [sample(1, 2.0, 3.0, op=Op.BROADCAST, peer=0)],
    }
    assert math.isinf(estimate_offsets(rows).bound_s("b"))
    unknown_root = {node: [sample(i, 5.0, 5.1, op=Op.BROADCAST)] for i, node in enumerate(("a", "b"))}
    assert "b" not in estimate_offsets(unknown_root).nodes


def test_offsets_chain_over_nodes_that_share_nothing_directly():
    rows = {
        "a": [sample(0, 0.0, 0.1, group="ab")],
        "b": [sample(1, 100.0, 100.1, group="ab"), sample(1, 200.0, 200.1, group="bc")],
        "c": [sample(2, 50.0, 50.1, group="bc")],
    }
    offsets = estimate_offsets(rows)
    assert offsets.reference == "b"
    difference = offsets.offset_s("c") - offsets.offset_s("a")
    assert math.isclose(difference, 50.0, abs_tol=0.5)
    assert offsets.bound_s("c") < 0.2


def test_different_operations_under_one_number_are_dropped():
    rows = {"a": [sample(0, 0, 1)], "b": [sample(1, 0, 1, op=Op.BARRIER)]}
    assert "b" not in estimate_offsets(rows).nodes


def test_thousands_of_nodes_in_linear_work():
    rows = {
        f"n{i}": [sample(i, s + i * 1e3 + (i + s) % 7 * 1e-3, s + 0.01 + i * 1e3, seq=s) for s in range(4)]
        for i in range(3000)
    }
    began = time.perf_counter()
    offsets = estimate_offsets(rows)
    assert len(offsets.nodes) == 3000
    assert abs(offsets.offset_s("n2999") - offsets.offset_s("n0") + 2999e3) < 0.1
    assert time.perf_counter() - began < 30


def test_of_many_nodes_only_those_asked_for_are_compared():
    rows = {f"n{node}": [sample(node, 100.0 * node, 100.0 * node + 1.0)] for node in range(2000)}
    clocks = SampledClocks(rows)
    some = clocks.among({"n3", "n7", "elsewhere"})
    assert some is not None
    assert set(some.nodes) == {"n3", "n7"}
    assert math.isclose(some.to_reference_s("n7", 700.5), some.to_reference_s("n3", 300.5))
    assert clocks.among(rows) is None
