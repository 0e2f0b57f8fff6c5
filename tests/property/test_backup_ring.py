"""The ring of nodes: different domains next to each other, and every state on as many nodes as there should be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.peers.backup_plan import places_of, ring_of

labels = st.lists(st.sampled_from("abcd"), min_size=2, max_size=12)


@given(labels)
def test_neighbours_are_of_different_domains_where_that_is_possible(given_labels: list[str]) -> None:
    domains = dict(enumerate(given_labels))
    ring = ring_of(domains, domains)
    assert sorted(ring) == sorted(domains)
    if max(given_labels.count(label) for label in given_labels) <= len(ring) // 2:
        assert all(
            domains[one] != domains[other] for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)
        )


@given(labels, st.integers(1, 3), st.data())
def test_a_state_stands_on_different_nodes_and_domains_if_there_are_any(
    given_labels: list[str], copies: int, data: st.DataObject
) -> None:
    domains = dict(enumerate(given_labels))
    present = data.draw(st.sets(st.sampled_from(sorted(domains)), min_size=1))
    ring = ring_of(domains, domains)
    for at, node in enumerate(ring):
        places = places_of(node, ring, at, present, copies, domains)
        assert len(set(places)) == len(places) == min(copies + 1, len(present))
        assert set(places) <= present
        assert (places[0] == node) == (node in present)
        others = {domains[one] for one in present - {node}} - {domains[node]}
        taken = [domains[one] for one in places if one != node]
        wanted = len(places) - (node in present)
        assert len(set(taken) - {domains[node]}) >= min(wanted, len(others))
