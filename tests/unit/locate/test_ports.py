"""Links that are no sockets: slow, cut, and a hang in software, told apart by the counters of ports."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tests.unit.locate.blamed import link_of
from tests.unit.locate.synthetic_hangs import Stuck
from tests.unit.locate.synthetic_jobs import Conditions, ddp

from keepstep.core.evidence import Evidence
from keepstep.core.port_counters import PortCounts, PortTraffic
from keepstep.core.summary import HostCause, LinkState, PeerTraffic, rank_address
from keepstep.locate import locate_hang, locate_slow
from keepstep.locate._ports import bad_ports

NODES = ("n0", "n1", "n2", "n3")
RING = list(itertools.pairwise((*NODES, "n0")))


def ports(**after: PortCounts) -> list[PortTraffic]:
    """A port a node, which has sent 1 GB/s; ``after``: by node what it counted since, else as before."""
    usual = PortCounts(10.0, 10**10, 10**10, 2, 300, 10**6)
    now = PortCounts(4.0, 4 * 10**9, 4 * 10**9, 1, 120, 4 * 10**5)
    return [PortTraffic(node, "mlx5_0/1", usual, after.get(node, now)) for node in NODES]


CONGESTED = PortCounts(4.0, 10**9, 10**9, 1, 40_000, 4 * 10**5)
LOSSY = PortCounts(4.0, 10**9, 10**9, 5_000, 9_000, 4 * 10**5)


def slow(given: list[PortTraffic], pair: tuple[str, str] = ("n1", "n2")):
    job = ddp(8)
    before, after, _ = job.healthy_then(Conditions(links={frozenset(pair): 10.0}))
    return locate_slow(Evidence(job.infos, job.nodes, before=before, after=after, ports=given))


@pytest.mark.parametrize("pair", RING)
@pytest.mark.parametrize("counts", [CONGESTED, LOSSY])
def test_the_slow_pair_of_a_ring_is_told_by_the_ports_at_its_ends(pair: tuple[str, str], counts: PortCounts):
    found = slow(ports(**dict.fromkeys(pair, counts)), pair)
    (culprit,) = found.culprits
    assert set(link_of(culprit).nodes) == set(pair)
    assert (culprit.cause, culprit.confidence, culprit.node) == ("network", "high", "")
    assert any(f"port mlx5_0/1 of {pair[0]}: " in line for line in found.evidence)


def test_a_single_bad_port_is_its_node_s_own_connection():
    (culprit,) = slow(ports(n2=LOSSY)).culprits
    assert "n2" in link_of(culprit).nodes
    assert (culprit.node, culprit.confidence) == ("n2", "medium")


@pytest.mark.parametrize("counts", [{}, dict.fromkeys(NODES, CONGESTED), dict.fromkeys(NODES[:3], LOSSY)])
def test_ports_that_count_alike_name_nobody(counts):
    found = slow(ports(**counts))
    assert found.culprits == ()
    assert any("pair by pair" in line for line in found.missing)


def test_losses_come_before_signs_of_congestion_and_what_was_always_bad_is_usual():
    both = ports(n0=CONGESTED, n1=CONGESTED, n2=LOSSY, n3=LOSSY)
    bad = bad_ports(both, NODES)
    assert bad is not None
    assert set(bad.nodes) == {"n2", "n3"}
    assert bad_ports([replace(one, before=one.after) for one in both], NODES) is None
    assert bad_ports([], NODES) is None
    assert bad_ports(both, ["n2"]) is None  # there is nothing to compare with


def hung(given: list[PortTraffic], links: dict[int, list[LinkState]] | None = None):
    job = ddp(8)
    states = Stuck(job, broken=[("world", 2)]).states()
    states = [replace(one, links=tuple((links or {}).get(one.rank, ()))) for one in states]
    return locate_hang(Evidence(job.infos, job.nodes, states=states, ports=given))


def test_a_link_that_went_down_is_named_with_its_port():
    down = replace(CONGESTED, downs=1, marked=0)
    (culprit,) = hung(ports(n1=down)).culprits
    assert (culprit.cause, culprit.confidence, culprit.node) == ("link down", "high", "n1")
    assert "n1" in link_of(culprit).nodes
    assert culprit.detail == "port mlx5_0/1 of n1 went down"
    (culprit,) = hung(ports(n1=down, n2=down)).culprits
    assert (set(link_of(culprit).nodes), culprit.node) == ({"n1", "n2"}, "")


def test_a_port_that_is_not_up_any_more_went_down_and_an_unused_one_did_not():
    given = ports()
    given[3] = replace(given[3], is_up=False)
    given.append(PortTraffic("n0", "mlx5_9/1", PortCounts(10.0), PortCounts(4.0, downs=2), is_up=False))
    (culprit,) = hung(given).culprits
    assert culprit.detail == "port mlx5_0/1 of n3 went down"


def test_a_path_that_loses_what_it_is_given_is_named():
    found = hung(ports(n2=LOSSY, n3=LOSSY))
    (culprit,) = found.culprits
    assert (set(link_of(culprit).nodes), culprit.cause, culprit.confidence) == (
        {"n2", "n3"},
        "network",
        "medium",
    )


def test_where_nothing_was_lost_and_nccl_waits_for_no_network_it_is_software():
    waits = {rank: [LinkState((rank - 1) % 8, "sender", 2, 12.0)] for rank in range(8)}
    found = hung(ports(), waits)
    assert found.culprits == ()
    assert any("stacks" in line for line in found.missing)
    assert "ports of n[0-3] lost nothing, and none went down" in found.evidence
    assert "whether the fabric carries messages: probes go over TCP" in found.missing
    assert "stacks" not in str(hung(ports()).missing)  # of NCCL's transfers nothing is known


@pytest.mark.parametrize(("backend", "named"), [("cuda:nccl", [2]), ("gloo", [])])
def test_a_cause_on_one_rank_names_it_where_waiting_looks_like_work(backend, named):
    """On NCCL the own time of all ranks grows as that of the slow one does."""
    job = ddp(4)
    before, after, _ = job.healthy_then(Conditions())
    after = [replace(one, duration_s=2 * one.duration_s, self_s=2 * one.duration_s) for one in after]
    before = [replace(one, self_s=one.duration_s) for one in before]
    groups = {name: replace(info, backend=backend) for name, info in job.infos.items()}
    cause = HostCause(2, "GPU clock", 0.5, "GPU 2: 990 MHz, usually 1980: thermal slowdown, 92 °C")
    known = Evidence(groups, job.nodes, before=before, after=after, causes=[cause])
    found = locate_slow(known)
    assert [culprit.rank for culprit in found.culprits] == named
    assert any("agents saw GPU clock on ranks 2" in line for line in found.evidence)
    if named:
        (culprit,) = found.culprits
        assert (culprit.cause, culprit.confidence, found.victims) == ("GPU clock", "medium", (0, 1, 3))
    on_gpu = {
        "before": [replace(one, ahead_s=0.0) for one in before],
        "after": [replace(one, ahead_s=0.0) for one in after],
    }
    assert locate_slow(replace(known, **on_gpu)).culprits == ()  # there waiting does not look like work
    everywhere = [replace(cause, rank=rank) for rank in range(4)]
    assert locate_slow(replace(known, causes=everywhere)).culprits == ()
    assert locate_slow(replace(known, causes=[replace(cause, share=0.1)])).culprits == ()


@pytest.mark.parametrize("backend", ["cuda:nccl", "gloo"])
def test_counters_alone_name_the_link_where_transfers_have_no_times(backend: str):
    """All ranks are slower alike, and no operation tells of it."""
    job = ddp(8)
    before, after, _ = job.healthy_then(Conditions())
    before = [replace(one, self_s=one.duration_s, streams=()) for one in before]
    after = [
        replace(one, duration_s=2 * one.duration_s, self_s=2 * one.duration_s, streams=()) for one in after
    ]
    groups = {name: replace(info, backend=backend) for name, info in job.infos.items()}
    known = Evidence(groups, job.nodes, before=before, after=after, ports=ports(n1=LOSSY, n2=LOSSY))
    sent = [
        PeerTraffic(
            *(job.nodes[rank], rank_address(rank), rank_address((rank + 1) % 8)),
            *(10.0, 10**9, 1.0, 4.0, 4 * 10**8, 4.0 if rank == 7 else 0.4),
            over="NCCL",
        )
        for rank in range(8)
    ]
    by_ports, by_rates = locate_slow(known), locate_slow(replace(known, traffic=sent))
    if backend == "gloo":
        assert by_ports.culprits == by_rates.culprits == ()
        return
    for found, nodes in ((by_ports, {"n1", "n2"}), (by_rates, {"n3", "n0"})):
        (culprit,) = found.culprits
        assert (set(link_of(culprit).nodes), culprit.confidence) == (nodes, "medium")
    assert any("NCCL sends at 8 Gbit/s -> 800 Mbit/s" in line for line in by_rates.evidence)
