"""Elections under seeds: one leader a term, one table an incarnation, and no guard that is idle.

Elections within whole jobs are in ``test_reforming_simulation.py``; here are electors and leaders alone.
A failing seed prints how to replay it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs
from tests.effort import many
from tests.property.virtual_council import Assembly
from tests.unit.control.virtual_faults import World

from keepstep import wire
from keepstep.control.membership import council
from keepstep.control.membership.council import Councils
from keepstep.control.membership.next_table import Incarnations
from keepstep.control.membership.rendezvous import Launcher
from keepstep.core.quorum import is_majority
from keepstep.launch.controller import lease
from keepstep.launch.controller.lease import Elector

SEEDS = many(200)
REPLAY = "KEEPSTEP_ELECTION_SEED={} pytest tests/property/test_election_simulation.py -k one_seed"
FAULTS = frozenset({"cut_leader", "lose_leader", "cut", "lose", "give_up", "kill_controller", "come", "fail"})

Patch = Callable[[Any, str, object], None]


def play(seed: int) -> Assembly:
    assembly = Assembly(seed)
    try:
        assembly.run()
    except Exception as error:
        raise AssertionError(f"{error}\nreplay: {REPLAY.format(seed)}") from error
    return assembly


def test_one_leader_a_term_and_one_table_an_incarnation() -> None:
    for seed in range(SEEDS):
        play(seed)


def test_one_seed() -> None:
    play(int(os.environ.get("KEEPSTEP_ELECTION_SEED", "0")))


@pytest.mark.long
def test_the_seeds_reach_what_they_are_for() -> None:
    played = [play(seed) for seed in range(60)]
    assert sum(max(one.leaders) >= 3 for one in played) > len(played) / 4
    assert sum(one.settled >= 5 for one in played) > len(played) / 2


# Guards, taken away one at a time.


def votes_twice(patch: Patch) -> None:
    """The same term's lease is granted to whoever asks."""
    asked = Elector._grant

    def grant(self: Elector, ask: wire.Ask, now_s: float) -> bool:
        if ask.term == self._term:
            self._holder = ask.by
        return asked(self, ask, now_s)

    patch(Elector, "_grant", grant)


def grants_the_ignorant(patch: Patch) -> None:
    """A lease is granted to one that does not know the newest council."""
    asked = Elector._grant

    def grant(self: Elector, ask: wire.Ask, now_s: float) -> bool:
        return asked(self, structs.replace(ask, held=(1 << 40, 0)), now_s)

    patch(Elector, "_grant", grant)


def answers_for_others(patch: Patch) -> None:
    """A launcher that began anew votes like the one before it, and knows nothing."""

    def asked(self: Elector, ask: wire.Ask, now_s: float) -> wire.Answer:
        self.council = self.council or wire.Council(0, 0, self.seat, 0, ())
        granted = self._grant(ask, now_s)
        return wire.Answer(ask.number, ask.to, granted, self._term)

    patch(Elector, "asked", asked)


def few_are_enough(patch: Patch) -> None:
    """Anybody is a quorum."""
    patch(lease, "is_quorum", lambda *_: True)
    patch(council, "is_quorum", lambda *_: True)


def forgets_the_former(patch: Patch) -> None:
    """Seats change in one step."""

    def one_step(seats: list[int], former: list[int], yes: Any) -> bool:
        del former
        return is_majority(seats, yes)

    patch(lease, "is_quorum", one_step)
    patch(council, "is_quorum", one_step)


def does_not_wait(patch: Patch) -> None:
    """Placements are given out before a quorum has the table."""
    patch(Councils, "allows", lambda *_: True)


def obeys_the_old(patch: Patch) -> None:
    """Councils of a term that is over are kept."""
    received = Elector.received

    def keep(self: Elector, said: wire.Council, now_s: float) -> wire.Kept | None:
        return received(self, said, now_s) or wire.Kept(said.term, said.version)

    patch(Elector, "received", keep)


def grants_what_is_let(patch: Patch) -> None:
    """A lease is granted while that of another runs."""
    asked = Elector._grant

    def grant(self: Elector, ask: wire.Ask, now_s: float) -> bool:
        self._until_s = -math.inf
        return asked(self, ask, now_s)

    patch(Elector, "_grant", grant)


def counts_without_its_own(patch: Patch) -> None:
    """A council counts that the leader's own launcher has not kept, so that its lease is that of other electors."""
    kept = Councils.kept

    def count(self: Councils, launcher: Launcher, said: wire.Kept) -> bool:
        self._kept.add(self._token)
        return kept(self, launcher, said)

    patch(Councils, "kept", count)


def keeps_what_it_cannot_use(patch: Patch) -> None:
    """A launcher that does not reach its own controller renews the lease for ever."""
    patch(lease, "UNREACHED_S", math.inf)


def uses_a_number_again(patch: Patch) -> None:
    """An incarnation gets the number of one that was ended before it was placed."""
    following = Incarnations.following

    def again(self: Incarnations, *, is_pause: bool) -> tuple[int, int]:
        self._stopped = -1
        return following(self, is_pause=is_pause)

    patch(Incarnations, "following", again)


ELECTIONS = (
    votes_twice,
    grants_the_ignorant,
    answers_for_others,
    few_are_enough,
    forgets_the_former,
    does_not_wait,
    obeys_the_old,
    pytest.param(counts_without_its_own, marks=pytest.mark.long),
)


def fails(world: Assembly | World) -> bool:
    try:
        world.run()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("mutation", ELECTIONS, ids=lambda mutation: getattr(mutation, "__name__", ""))
def test_no_guard_of_an_election_is_idle(
    mutation: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch.setattr)
    assert any(fails(Assembly(seed)) for seed in range(1000))


def test_a_lease_is_let_to_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    grants_what_is_let(monkeypatch.setattr)
    assert any(fails(World(seed, FAULTS)) for seed in range(150))


@pytest.mark.parametrize(
    "mutation", [keeps_what_it_cannot_use, pytest.param(uses_a_number_again, marks=pytest.mark.long)]
)
def test_no_guard_against_a_leader_that_loses_its_own_launcher_is_idle(
    mutation: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch.setattr)
    assert any(fails(World(seed, FAULTS | {"deafen"})) for seed in range(800))
