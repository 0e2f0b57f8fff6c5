"""The comparison of replicas against one written with dicts only; and what may never be named, whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.detect.corruption import PROOF, Compared, Comparison, Difference, Family, Tensor

Sums = dict[Tensor, int]


@dataclass
class _Known:
    saves: int = 0
    values: int = 0
    value: int = 0
    step: int = 0
    ranks: frozenset[int] = frozenset()
    private: bool = False
    named: bool = False


@dataclass
class Twin:
    """The same with a dict a tensor."""

    known: dict[tuple[Tensor, Tensor], _Known] = field(default_factory=dict)
    incarnation: int = -1

    def saw(self, incarnation: int, step: int, told: dict[int, dict[Family, list[int]]]) -> Compared:
        if incarnation != self.incarnation:
            for one in self.known.values():
                one.saves = one.values = 0
        self.incarnation = incarnation
        found: dict[tuple[Tensor, Tensor], dict[int, int]] = {}
        for rank, families in told.items():
            for family, sums in families.items():
                for tensor, value in zip(family, sums, strict=True):
                    found.setdefault((family[0], tensor), {})[rank] = value
        for pair in self.known.keys() | found.keys():
            one, ranks = self.known.setdefault(pair, _Known()), frozenset(found.get(pair, ()))
            if len(ranks) < 2 or ranks != one.ranks:
                one.saves = one.values = 0
            one.ranks = ranks
        proven = {pair: self._proven(pair[0]) for pair in self.known}
        differing = {
            pair: values
            for pair, values in found.items()
            if len(set(values.values())) > 1 and not self.known[pair].named
        }
        judged = {
            pair: values
            for pair, values in differing.items()
            if proven[pair] and (not pair[0].decays or self._stands_alone(pair, found))
        }
        differences = list(self._judge(judged, proven, found, step))
        mended: list[str] = []
        for pair in differing:
            self.known[pair].private |= not self.known[pair].named
        for pair, values in found.items():
            one = self.known[pair]
            if len(values) < 2 or len(set(values.values())) > 1:
                continue
            if one.named:
                mended.append(pair[1].name)
                one.named, one.saves, one.values = False, 0, 0
            value = next(iter(values.values()))
            one.values += one.saves == 0 or value != one.value
            one.saves, one.value, one.step = one.saves + 1, value, step
        return Compared(tuple(differences), tuple(mended))

    def _stands_alone(
        self, pair: tuple[Tensor, Tensor], found: dict[tuple[Tensor, Tensor], dict[int, int]]
    ) -> bool:
        leader, tensor = pair
        kept = [
            p for p in self.known if p[0] == leader and p[1] != leader and (leader.single or not p[1].single)
        ]
        moved = [
            p
            for p in kept
            if p in found
            and len(found[p]) > 1
            and len(set(found[p].values())) == 1
            and next(iter(found[p].values())) != self.known[p].value
        ]
        return leader == tensor and bool(kept) and moved == kept

    def _proven(self, leader: Tensor) -> bool:
        members = [(pair[1], one) for pair, one in self.known.items() if pair[0] == leader]
        return all(
            not one.private and (one.values if leader.single or not tensor.single else one.saves) >= PROOF
            for tensor, one in members
        )

    def _judge(self, judged, proven, found, step):  # type: ignore[no-untyped-def]
        for ranks in {self.known[pair].ranks for pair in judged}:
            pairs = [pair for pair in judged if self.known[pair].ranks == ranks]
            together = [p for p in found if proven[p] and self.known[p].ranks == ranks and len(found[p]) > 1]
            leaders = {pair[0] for pair in pairs}
            alike = {p[0] for p in together} - leaders - {p[0] for p, one in self.known.items() if one.named}
            odd = {self._odd(judged[pair]) for pair in pairs}
            who = min(odd)
            if len(odd) > 1 or not who or not alike:
                continue
            if len(leaders) > (1 if len(who) == 2 else len(alike)):
                continue
            for pair in pairs:
                self.known[pair].named = True
            yield Difference(
                step,
                min(self.known[pair].step for pair in pairs),
                who,
                tuple(sorted(ranks - set(who))),
                tuple(pair[1].name for pair in pairs),
            )

    @staticmethod
    def _odd(values: dict[int, int]) -> tuple[int, ...]:
        if len(values) == 2:
            return tuple(sorted(values))
        for rank, value in values.items():
            others = {other for one, other in values.items() if one != rank}
            if len(others) == 1 and value not in others:
                return (rank,)
        return ()


def _family(number: int, states: int) -> Family:
    parameter = Tensor(f"m.{number}", "float32 4", single=number == 3, decays=number in (2, 4))
    return (
        parameter,
        *(Tensor(f"o.{number}.{state}", "float32 4", single=state == 0) for state in range(states)),
    )


families = [_family(number, number % 3 + (number == 4)) for number in range(5)]
MOVES = st.sampled_from(["alike"] * 8 + ["still", "odd", "odd", "apart", "gone", "two"])


@settings(max_examples=many(150), deadline=None)
@given(st.integers(2, 5), st.lists(st.lists(MOVES, min_size=5, max_size=5), max_size=14), st.data())
def test_it_says_what_plain_dicts_say(ranks: int, saves: list[list[str]], data: st.DataObject) -> None:
    comparison, twin = Comparison(), Twin()
    saves = [["alike"] * len(families)] * data.draw(st.integers(0, PROOF + 1)) + saves
    values = {(rank, tensor): 0 for rank in range(ranks) for family in families for tensor in family}
    fresh, incarnation = iter(range(1, 1 << 30)), 0
    for step, moves in enumerate(saves):
        incarnation += data.draw(st.sampled_from([0] * 12 + [1]))
        told: dict[int, dict[Family, list[int]]] = {rank: {} for rank in range(ranks)}
        for family, move in zip(families, moves, strict=True):
            target = data.draw(st.sampled_from(family)) if move in ("odd", "two") else None
            odd = data.draw(st.integers(0, ranks - 1))
            for tensor in family:
                value = next(fresh)
                for rank in range(ranks):
                    if move != "still":
                        values[rank, tensor] = value
                    if move == "apart":
                        values[rank, tensor] = next(fresh)
                    if tensor == target and (rank == odd or (move == "two" and rank == (odd + 1) % ranks)):
                        values[rank, tensor] = next(fresh)
            for rank in range(ranks):
                if move != "gone" or rank != odd:
                    told[rank][family] = [values[rank, tensor] for tensor in family]
        rows = []
        for rank, held in told.items():
            layout = comparison.holds(list(held))
            assert layout is not None
            rows.append(
                ([rank], layout, np.array([one for sums in held.values() for one in sums], np.uint64))
            )
        seen, expected = comparison.saw(incarnation, step, rows), twin.saw(incarnation, step, told)
        assert set(map(_plain, seen.differences)) == set(map(_plain, expected.differences))
        assert sorted(seen.mended) == sorted(expected.mended)


def _plain(one: Difference) -> tuple[object, ...]:
    return one.since, one.alike, one.odd, one.agreeing, tuple(sorted(one.tensors))
