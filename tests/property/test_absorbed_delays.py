"""Whether a delay costs the step anything: what the locator replays against the simulated job with and without it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.simulate import Durations, Fault, Workload
from tests.effort import many

from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis, Link
from keepstep.core.layout import ParallelLayout
from keepstep.locate import blocks_wanted, sharpen

ONSET, STEPS = 5, 7
WORKLOAD = Workload(
    ParallelLayout(pp=4, dp=2), micro_batches=6, durations=Durations(message_s=0.005), ranks_per_node=16
)


def cost(fault: Fault, others: list[Fault]) -> float:
    """Share of the healthy step that the fault adds, alone or beside the others, whichever is more."""

    def seconds(*faults: Fault) -> float:
        return float(np.median(WORKLOAD.iteration_s(STEPS, faults)[ONSET:]))

    alone = seconds(fault) - seconds()
    return max(alone, seconds(fault, *others) - seconds(*others)) / seconds()


def judged(culprits: list[Culprit], faults: list[Fault], silent: frozenset[int] = frozenset()) -> Diagnosis:
    run, groups = WORKLOAD.run(STEPS, faults), WORKLOAD.groups()
    nodes = WORKLOAD.nodes
    rows = [row for rank in run.summaries() for row in rank if row.rank not in silent]
    before, after = [r for r in rows if r.step < ONSET], [r for r in rows if r.step >= ONSET]
    evidence = Evidence(groups, nodes, before=before, after=after, onset_step=ONSET)
    wanted = blocks_wanted(evidence, culprits)
    blocks = list(WORKLOAD.run(STEPS, faults, blocks_of=wanted).blocks())
    said = Diagnosis("slow", tuple(culprits), (), (), ())
    return sharpen(replace(evidence, blocks=blocks), said)


def culprit_of(fault: Fault) -> Culprit:
    if fault.peer < 0:
        return Culprit(fault.rank, None, "", fault.where, 2.0, "high", "compute")
    name = WORKLOAD.nodes[fault.rank]
    return Culprit(None, Link((fault.rank, fault.peer), (name, name)), "", "transfer", 2.0, "high", "network")


def drawn(chance: random.Random) -> Fault:
    rank, batch = chance.randrange(8), chance.randrange(6)
    where = chance.choice(("forward", "backward", "message", "dp"))
    fault = Fault(where, rank, micro_batch=batch, delay_s=chance.uniform(0.03, 0.4), first_step=ONSET)
    if where == "message":
        peers = [peer for peer in (rank - 2, rank + 2) if 0 <= peer < 8]
        return replace(fault, peer=chance.choice(peers))
    return replace(fault, peer=rank ^ 1, micro_batch=-1) if where == "dp" else fault


@pytest.mark.parametrize("seed", range(many(10)))
def test_a_delay_is_dropped_exactly_when_it_costs_nothing(seed: int) -> None:
    fault = drawn(random.Random(seed))
    share = cost(fault, [])
    if 0.005 < share < 0.02:
        pytest.skip("too close to call")
    found = judged([culprit_of(fault)], [fault])
    assert len(found.culprits) == (share >= 0.02)
    assert any("absorbed" in line for line in found.evidence) == (share <= 0.005)
    assert found.summary == ("" if found.culprits else "cause unknown")


@pytest.mark.parametrize("seed", range(many(4)))
def test_what_the_others_have_not_named_is_found(seed: int) -> None:
    """Of two delays only the one that costs nothing was blamed."""
    chance = random.Random(seed)
    while True:
        absorbed, felt = drawn(chance), replace(drawn(chance), where="forward", peer=-1)
        felt = replace(felt, delay_s=0.3, micro_batch=max(felt.micro_batch, 0))
        other = absorbed.rank != felt.rank and cost(absorbed, [felt]) <= 0.002
        if other and cost(felt, [absorbed]) > 0.1:
            break
    found = judged([culprit_of(absorbed)], [absorbed, felt])
    assert [one.rank for one in found.culprits] == [felt.rank]
    assert found.culprits[0].confidence == "medium"


@pytest.mark.parametrize("seed", range(many(4)))
def test_silent_ranks_clear_nobody_who_costs_time(seed: int) -> None:
    chance = random.Random(seed)
    fault = drawn(chance)
    while fault.peer >= 0 or cost(fault, []) < 0.05:
        fault = drawn(chance)
    stage = chance.choice([stage for stage in range(4) if stage != fault.rank // 2])
    found = judged([culprit_of(fault)], [fault], frozenset({2 * stage, 2 * stage + 1}))
    assert [one.rank for one in found.culprits] == [fault.rank]


def test_a_starved_node_is_one_cause() -> None:
    """Each of its ranks alone would cost nothing: the other is as slow."""
    faults = [Fault("compute", rank, factor=1.5, first_step=ONSET) for rank in (2, 3)]
    starved = [Culprit(rank, None, "n", "", 1.5, "high", "run queue") for rank in (2, 3)]
    found = judged(starved, faults)
    assert [one.rank for one in found.culprits] == [2, 3]
    assert found.evidence[0].startswith("without n's (run queue) delay a step would take")
