"""Which operator acts, with clocks that differ by hours, and an API server that is away at times."""

from __future__ import annotations

import random
from typing import Any

import pytest

from keepstep.kubernetes.lease_election import ACT_S, LEASE_S, Election

HOUR_S = 3600.0


class Server:
    """Keeps one Lease; refuses to write over another version than was read."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0

    def write(self, read: dict[str, Any] | None, spec: dict[str, Any]) -> dict[str, Any] | None:
        now = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if now != (read["metadata"]["resourceVersion"] if read else None):
            return None
        self.version += 1
        self.lease = {"metadata": {"resourceVersion": str(self.version)}, "spec": spec}
        return self.lease


class Candidate:
    """An operator whose clocks are its own."""

    def __init__(self, server: Server, me: str, steady_s: float, unix_s: float) -> None:
        self.server, self.election = server, Election(me)
        self.steady_s, self.unix_s = steady_s, unix_s

    def turn(self, now_s: float) -> None:
        lease, mine_s = self.server.lease, self.steady_s + now_s
        self.election.saw(lease, mine_s)
        spec = self.election.wanted(lease, mine_s, self.unix_s + now_s)
        if spec is not None and (written := self.server.write(lease, spec)) is not None:
            self.election.wrote(written, mine_s)

    def leads(self, now_s: float) -> bool:
        return self.election.leads(self.steady_s + now_s)


def test_the_first_takes_it_and_keeps_it() -> None:
    server = Server()
    one, other = Candidate(server, "a", 5, 0), Candidate(server, "b", 900, 12 * HOUR_S)
    for second in range(120):
        one.turn(second)
        other.turn(second)
        assert (one.leads(second), other.leads(second)) == (True, False)
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 0


@pytest.mark.parametrize("skew_s", [-5 * HOUR_S, 0.0, 5 * HOUR_S])
def test_another_takes_its_place_whatever_the_clocks_say(skew_s: float) -> None:
    server = Server()
    one, other = Candidate(server, "a", 5, 0), Candidate(server, "b", 900, skew_s)
    one.turn(0)
    taken_s = next(second for second in range(100) if other.turn(second) or other.leads(second))
    assert LEASE_S <= taken_s <= LEASE_S + 2
    assert not one.leads(ACT_S)
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == "b"
    assert server.lease["spec"]["leaseTransitions"] == 1


def test_who_leaves_it_is_succeeded_at_once() -> None:
    server = Server()
    one, other = Candidate(server, "a", 5, 0), Candidate(server, "b", 900, 0)
    one.turn(0)
    other.turn(1)
    assert server.lease is not None
    server.write(server.lease, {**server.lease["spec"], "holderIdentity": ""})
    other.turn(2)
    assert other.leads(2)


@pytest.mark.parametrize(
    "spec", [None, {}, {"holderIdentity": None}, {"holderIdentity": "x", "leaseDurationSeconds": -1}]
)
def test_a_lease_of_another_form_is_taken_in_time(spec: Any) -> None:
    server = Server()
    server.lease = {"metadata": {"resourceVersion": "0"}, "spec": spec}
    one = Candidate(server, "a", 0, 0)
    for second in range(int(LEASE_S) + 2):
        one.turn(second)
    assert one.leads(LEASE_S + 1)


@pytest.mark.parametrize("seed", range(30))
def test_never_two_at_once(seed: int) -> None:
    """Clocks differ, turns are late, and the server is away for each of them at times."""
    rng = random.Random(seed)
    server = Server()
    all_of_them = [
        Candidate(server, name, rng.uniform(0, 1e6), rng.uniform(-1e6, 1e6)) for name in ("a", "b", "c")
    ]
    away_until = dict.fromkeys("abc", 0.0)
    led = 0
    now_s = 0.0
    for _ in range(3000):
        now_s += rng.choice([0.1, 0.5, 1.0])
        one = rng.choice(all_of_them)
        me = one.election.me
        if rng.random() < 0.005:
            away_until[me] = now_s + rng.uniform(1, 60)
        if now_s >= away_until[me]:
            one.turn(now_s)
        leaders = [each.election.me for each in all_of_them if each.leads(now_s)]
        assert len(leaders) <= 1, (now_s, leaders)
        led += bool(leaders)
    assert led > 1000
