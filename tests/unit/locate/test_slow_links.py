from __future__ import annotations

import itertools

import pytest
from tests.unit.locate.blamed import link_of
from tests.unit.locate.synthetic_jobs import Conditions, ddp, dp_pp, dp_tp, slow_rank

from keepstep.core.evidence import Evidence
from keepstep.locate import estimate_offsets, locate_slow

CLOCK = {"n0": (0.0, 0.0), "n1": (7200.0, 3e-5), "n2": (-9000.0, -2e-5), "n3": (1e5, 1e-5)}
JOBS = {
    "messages": lambda: dp_pp(2, 4, clock=CLOCK),
    "buffered messages": lambda: dp_pp(2, 4, clock=CLOCK, buffered_sends=True),
    "messages and reductions": lambda: dp_pp(4, 2, clock=CLOCK),
    "tensor and data": lambda: dp_tp(2, 4, clock=CLOCK),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("pair", list(itertools.combinations(("n0", "n1", "n2", "n3"), 2)))
@pytest.mark.parametrize("with_clocks", [False, True])
def test_a_throttled_pair_is_named_or_does_not_matter(name, pair, with_clocks):
    job = JOBS[name]()
    before, after, samples = job.healthy_then(Conditions(links={frozenset(pair): 10.0}))
    offsets = estimate_offsets(samples) if with_clocks else None
    found = locate_slow(Evidence(job.infos, job.nodes, offsets, before=before, after=after))
    if "not slower" in found.summary:
        return
    assert [set(link_of(c).nodes) for c in found.culprits] == [set(pair)]
    culprit = found.culprits[0]
    assert culprit.rank is None
    assert culprit.cause == "network"
    assert tuple(job.nodes[rank] for rank in link_of(culprit).ranks) == link_of(culprit).nodes
    assert not set(link_of(culprit).ranks) & set(found.victims)
    assert found.evidence


def test_a_ring_over_four_nodes_does_not_tell_the_pair():
    job = ddp(8, clock=CLOCK)
    before, after, _ = job.healthy_then(Conditions(links={frozenset(("n1", "n2")): 10.0}))
    found = locate_slow(Evidence(job.infos, job.nodes, before=before, after=after))
    assert found.culprits == ()
    assert any("n[0-3]" in text and "pair by pair" in text for text in found.missing)
    assert "world ALLREDUCE" in found.summary


def test_one_host_s_connection_is_common_to_its_pairs():
    job = dp_pp(4, 2, clock=CLOCK)
    slow: dict[frozenset[str], float] = {frozenset(("n0", other)): 10.0 for other in ("n1", "n2", "n3")}
    before, after, _ = job.healthy_then(Conditions(links=slow))
    found = locate_slow(Evidence(job.infos, job.nodes, before=before, after=after))
    assert {frozenset(link_of(c).nodes) for c in found.culprits} <= slow.keys()
    assert {c.node for c in found.culprits} == {"n0"}


@pytest.mark.parametrize("make", JOBS.values())
def test_a_slow_rank_is_no_slow_link(make):
    job = make()
    before, after, samples = job.healthy_then(Conditions(slow=slow_rank(2, 2.0)))
    found = locate_slow(Evidence(job.infos, job.nodes, estimate_offsets(samples), before=before, after=after))
    assert [c.rank for c in found.culprits] == [2]


def test_a_slow_group_among_comparable_ones_without_a_healthy_time():
    job = dp_tp(4, 2, per_node=1)
    _, after, _ = job.healthy_then(Conditions(links={frozenset(("n2", "n3")): 20.0}))
    found = locate_slow(Evidence(job.infos, job.nodes, after=after))
    assert [set(link_of(c).nodes) for c in found.culprits] == [{"n2", "n3"}]
