from __future__ import annotations

from collections.abc import Sequence

import pytest

from keepstep.core.errors import FaultError
from keepstep.faults import Interface, LinkFault, LinkInjector, parse

HOSTS = {name: Interface("eth0", f"10.0.0.{i}", f"ns-{name}") for i, name in enumerate("abc", 1)}


class Recorder:
    def __init__(self, fail_at: int = -1) -> None:
        self.commands: list[str] = []
        self.fail_at = fail_at

    def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(" ".join(command))
        if len(self.commands) - 1 == self.fail_at:
            raise FaultError("refused")


def link_fault(text: str) -> LinkFault:
    (fault,) = parse(text)
    assert isinstance(fault, LinkFault)
    return fault


def test_a_pair_is_slowed_both_ways_by_destination_and_undone() -> None:
    run = Recorder()
    with LinkInjector(HOSTS, run=run).inject(link_fault("slow link from a to b to 20mbit")):
        did = list(run.commands)
    assert did[0] == "tc -netns ns-a qdisc add dev eth0 root handle 1: htb default 1"
    assert any("ns-a" in line and "dst 10.0.0.2/32" in line for line in did)
    assert any("ns-b" in line and "dst 10.0.0.1/32" in line for line in did)
    assert not any("ns-c" in line for line in did)
    assert run.commands[len(did) :] == [
        "tc -netns ns-b qdisc del dev eth0 root",
        "tc -netns ns-a qdisc del dev eth0 root",
    ]


def test_two_pairs_share_a_host_and_end_on_their_own() -> None:
    run = Recorder()
    injector = LinkInjector(HOSTS, run=run)
    with injector.inject(link_fault("slow link from a to b to 20mbit")):
        with injector.inject(link_fault("slow link from a to c to 30mbit")):
            roots = [line for line in run.commands if "qdisc add" in line]
        assert len(roots) == 3
        before = len(run.commands)
    assert "tc -netns ns-a filter del dev eth0 parent 1: protocol ip prio 11" in run.commands
    assert run.commands[before:] == [
        "tc -netns ns-b qdisc del dev eth0 root",
        "tc -netns ns-a qdisc del dev eth0 root",
    ]


def test_a_host_and_its_link_down() -> None:
    run = Recorder()
    injector = LinkInjector(HOSTS, run=run)
    with injector.inject(link_fault("slow link of a to 5mbit")):
        pass
    with injector.inject(link_fault("link down of b")):
        pass
    assert [line.split(" dev ")[0] for line in run.commands] == [
        "tc -netns ns-a qdisc add",
        "tc -netns ns-a qdisc del",
        "ip -netns ns-b link set",
        "ip -netns ns-b link set",
    ]


def test_what_was_done_is_undone_when_a_later_command_fails() -> None:
    run = Recorder(fail_at=5)  # the second host's root
    injector = LinkInjector(HOSTS, run=run)
    with pytest.raises(FaultError), injector.inject(link_fault("slow link from a to b to 20mbit")):
        raise AssertionError("not reached")
    assert run.commands[-1] == "tc -netns ns-a qdisc del dev eth0 root"


def test_a_host_that_is_slowed_as_a_whole_cannot_be_slowed_again() -> None:
    injector = LinkInjector(HOSTS, run=Recorder())
    with (
        injector.inject(link_fault("slow link of a to 5mbit")),
        pytest.raises(FaultError, match="slowed already"),
        injector.inject(link_fault("slow link from a to b to 20mbit")),
    ):
        raise AssertionError("not reached")


def test_an_unknown_host_is_named_with_those_there_are() -> None:
    with (
        pytest.raises(FaultError, match=r'no host "z".*a, b, c'),
        LinkInjector(HOSTS, run=Recorder()).inject(link_fault("link down of z")),
    ):
        raise AssertionError("not reached")


def test_a_play_keeps_the_times_and_leaving_undoes_what_has_no_end() -> None:
    run = Recorder()
    slept: list[float] = []
    with LinkInjector(HOSTS, run=run) as injector:
        faults = parse("slow link of a to 5mbit at 2 s for 3 s; link down of b at 1 s")
        injector.play(faults, sleep=slept.append)  # pyright: ignore[reportArgumentType]
        assert slept == [1, 1, 3]
        assert run.commands[-1] == "tc -netns ns-a qdisc del dev eth0 root"
    assert run.commands[-1] == "ip -netns ns-b link set dev eth0 up"
