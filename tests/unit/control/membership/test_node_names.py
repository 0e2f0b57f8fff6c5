"""Machines that have one name get another each; a machine keeps its own, however often it comes."""

from __future__ import annotations

import pytest

from keepstep.control.membership.node_names import NodeNames
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.launch.controller.member import Member
from keepstep.wire import Hello, Join, Placement, Renamed


def join(node: str, address: str, machine: str) -> Join:
    return Join(node, address, 1, 29500, machine=machine)


def test_the_later_of_two_machines_gets_its_address_into_its_name() -> None:
    names = NodeNames(rendezvous := Rendezvous(2))
    comes(names, rendezvous, join("vm", "10.0.0.1", "A"), 1)
    assert names.another(join("vm", "10.0.0.2", "B")) == "vm@10.0.0.2"
    assert names.another(join("vm", "10.0.0.2", "C")) == "vm@10.0.0.2#2"  # containers behind one address
    for _ in range(3):
        assert names.another(join("vm", "10.0.0.1", "A")) == ""
        assert names.another(join("vm", "10.0.0.2", "B")) == "vm@10.0.0.2"
        assert names.another(join("vm@10.0.0.2", "10.0.0.2", "B")) == ""
    assert names.another(join("vm", "10.0.0.9", "")) == ""  # of an earlier version, or nothing can be read
    assert names.another(join("gpu-1", "10.0.0.2", "B")) == ""


def comes(names: NodeNames, rendezvous: Rendezvous, asks: Join, peer: int) -> None:
    assert names.another(asks) == ""
    rendezvous.join(Launcher(asks.node, peer), asks, peer, 0.0)


@pytest.mark.parametrize("restored", [False, True])
def test_a_host_that_booted_has_its_name_back_and_another_host_once_it_is_lost(restored: bool) -> None:
    names = NodeNames(rendezvous := Rendezvous(2))
    comes(names, rendezvous, join("vm", "10.0.0.1", "A"), 1)
    comes(names, rendezvous, join("gpu-1", "10.0.0.2", "B"), 2)
    assert len(rendezvous.placements) == 2
    rendezvous.leave(Launcher("vm", 1), 1)
    assert names.another(join("vm", "10.0.0.3", "C")) == "vm@10.0.0.3"  # A may be back within seconds
    if restored:
        assert names.another(join("vm", "10.0.0.1", "A")) == ""
    assert names.another(join("vm", "10.0.0.1", "booted")) == ""
    names = NodeNames(rendezvous := Rendezvous(2))
    comes(names, rendezvous, join("vm", "10.0.0.1", "A"), 1)
    rendezvous.leave(Launcher("vm", 1), 1)
    assert names.another(join("vm", "10.0.0.3", "C")) == ""


def test_a_launcher_says_hello_and_joins_again_until_it_is_placed() -> None:
    member = Member(join("vm", "10.0.0.2", "B"), 7, lambda: 29500)
    hello, again, *_ = member.received(Renamed("vm@10.0.0.2"))
    assert isinstance(hello, Hello)
    assert isinstance(again, Join)
    assert (hello.node, again.node, member.node) == ("vm@10.0.0.2",) * 3
    member.received(Placement(0, 0, 1, 1, "10.0.0.2", 29500))
    assert member.received(Renamed("other")) == []
    assert member.node == "vm@10.0.0.2"
