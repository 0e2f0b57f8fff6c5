"""What is told of a run, against a twin that remembers everything; and what must hold whatever the rules are."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from tests.effort import many
from tests.unit.view.notify.told_runs import LOOSE, START_S, Look, acted, crash, over, seen, slow, told

from keepstep.core.incident import Incident
from keepstep.view.notify.notice import Notice
from keepstep.view.notify.telling import Rules

APART_S = 4000.0  # between two looks: so long that every change of a verdict is told


class Twin:
    """Remembers how each incident was when it was last looked at."""

    def __init__(self) -> None:
        self.last: dict[int, Incident] | None = None

    def look(self, incidents: list[Incident]) -> list[tuple[str, int]]:
        last, self.last = self.last, {one.number: one for one in incidents}
        first = last is None
        found: list[tuple[str, int]] = []
        for one in incidents:
            before = (last or {}).get(one.number)
            if before is None and first and one.status != "open":
                continue
            if before is None:
                if one.status != "transient":
                    found.append(("over" if one.status == "relieved" else "opened", one.number))
            elif before.status == "open" and one.status in ("relieved", "transient"):
                found.append(("over", one.number))
            elif before.status == one.status == "open" and before.actions != one.actions:
                found.append(("action", one.number))
            elif before.status == one.status == "open" and ranks(before) != ranks(one):
                found.append(("sharper", one.number))
        return found


def ranks(incident: Incident) -> set[int | None]:
    return {one.rank for one in incident.culprits}


def develop(draw: random.Random, incidents: list[Incident], turn: int) -> list[Incident]:
    """What may become of incidents until the next look; those that are over stay so."""
    found: list[Incident] = []
    for one in incidents:
        chance = draw.random()
        if one.status == "open" and chance < 0.2:
            one = over(one, draw.choice(["relieved", "relieved", "ended", "transient"]))
        elif one.status == "open" and chance < 0.35:
            one = replace(one, culprits=slow(1, draw.randrange(8)).culprits)
        elif one.status == "open" and chance < 0.5:
            one = acted(one, begun_unix_s=START_S + turn)
        elif chance < 0.7:
            one = replace(one, evidence=(str(chance),))  # nothing that is told
        found.append(one)
    for _ in range(draw.choice([0, 0, 1, 1, 2, 8])):
        number = len(found) + 1
        one = draw.choice([slow, crash])(number, draw.randrange(8))
        found.append(over(one) if draw.random() < 0.2 else one)
    return found


@pytest.mark.parametrize("seed", range(many(40)))
def test_the_same_is_told_as_by_the_twin(seed: int) -> None:
    draw, look, twin = random.Random(seed), Look(LOOSE), Twin()
    incidents: list[Incident] = []
    for turn in range(40):
        incidents = develop(draw, incidents, turn)
        if draw.random() < 0.2:
            look.restart()
        snapshot = seen(*incidents)
        assert look.what(snapshot, APART_S) == twin.look(incidents), f"seed {seed}, turn {turn}"
        assert look.what(snapshot, APART_S) == [], "the same snapshot has no news"


@pytest.mark.parametrize("seed", range(many(40)))
def test_never_more_than_the_rules_allow(seed: int) -> None:
    draw = random.Random(seed)
    rules = Rules(
        at_once=draw.randint(1, 12),
        per_hour=draw.choice([6.0, 60.0, 600.0]),
        flapping_times=draw.randint(2, 5),
        flapping_window_s=draw.choice([30.0, 600.0]),
    )
    look, incidents = Look(rules), list[Incident]()
    sent: list[Notice] = []
    look.at(seen())
    for turn in range(60):
        incidents = develop(draw, incidents, turn)
        if draw.random() < 0.1:
            look.restart()
        sent += look.at(seen(*incidents), draw.choice([1.0, 10.0, 200.0]))
    ids = Counter(one.id for one in sent)
    assert max(ids.values(), default=1) == 1
    opened = Counter(told(one) for one in sent if one.what in ("opened", "flapping", "over"))
    assert max(opened.values(), default=1) == 1, "each is told once"
    for begin, first in enumerate(sent):
        for end in range(begin, len(sent)):
            passed_s = sent[end].unix_s - first.unix_s
            assert end - begin + 1 <= rules.at_once + passed_s * rules.per_hour / 3600 + 1e-6
