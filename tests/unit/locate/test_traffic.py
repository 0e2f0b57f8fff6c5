from __future__ import annotations

import itertools

import pytest
from tests.unit.locate.blamed import link_of
from tests.unit.locate.synthetic_jobs import Conditions, ddp

from keepstep.core.evidence import Evidence
from keepstep.core.summary import PeerTraffic
from keepstep.locate import locate_slow

NODES = ("n0", "n1", "n2", "n3")
FAST = 25e6


def ring(now: dict[tuple[str, str], float], busy_s: float = 3.0) -> list[PeerTraffic]:
    """Every node sends 20 MB to the next before and after; ``now``: speeds that changed, bytes per second."""
    rows: list[PeerTraffic] = []
    for source, target in zip(NODES, (*NODES[1:], NODES[0]), strict=True):
        speed = now.get((source, target), FAST)
        sent = speed * busy_s if speed < FAST else FAST * 0.3
        rows.append(
            PeerTraffic(
                source,
                f"10.0.0.{source[1]}",
                f"10.0.0.{target[1]}",
                10.0,
                int(FAST),
                1.0,
                4.0,
                int(sent),
                sent / speed,
            )
        )
    return rows


def located(traffic: list[PeerTraffic], pair: tuple[str, str] = ("n1", "n2")):
    job = ddp(8)
    before, after, _ = job.healthy_then(Conditions(links={frozenset(pair): 10.0}))
    return locate_slow(Evidence(job.infos, job.nodes, before=before, after=after, traffic=traffic))


@pytest.mark.parametrize("pair", list(itertools.pairwise((*NODES, "n0"))))
def test_the_pair_inside_a_ring_is_told_by_its_connections(pair):
    found = located(ring({pair: FAST / 10}), pair)
    (culprit,) = found.culprits
    assert set(link_of(culprit).nodes) == set(pair)
    assert culprit.cause == "network"
    assert any("200 Mbit/s -> 20 Mbit/s" in line for line in found.evidence)
    assert found.missing == ()


def test_all_paths_slower_alike_name_nobody():
    slow: dict[tuple[str, str], float] = dict.fromkeys(itertools.pairwise((*NODES, "n0")), FAST / 10)
    assert located(ring(slow)).culprits == ()


def test_a_slow_path_that_carries_next_to_nothing_is_not_blamed():
    assert located(ring({("n1", "n2"): FAST / 10}, busy_s=0.1)).culprits == ()


def test_one_path_alone_cannot_be_compared():
    assert located(ring({("n1", "n2"): FAST / 10})[1:2]).culprits == ()


def test_addresses_of_no_node_are_left_out():
    rows = [PeerTraffic("n1", "10.0.0.1", "192.0.2.9", 10.0, 10**8, 1.0, 4.0, 10**7, 3.0)]
    assert located([*ring({}), *rows]).culprits == ()
