"""Of large jobs only some transfers are looked at one by one: the verdict must be that of looking at all of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from benchmarks.simulate import Fault, Workload

from keepstep.core.evidence import Evidence
from keepstep.core.layout import ParallelLayout
from keepstep.locate import _candidates, _slow_links, locate_slow

LAYOUT = ParallelLayout(tp=2, pp=4, dp=4)


def drawn(chance: random.Random) -> list[Fault]:
    rank, where = chance.randrange(32), chance.choice(("message", "link", "dp", "tp", "backward"))
    fault = Fault(where, rank, delay_s=chance.uniform(0.05, 0.5), first_step=8)
    batch = chance.choice((-1, chance.randrange(8)))
    toward = chance.choice([peer for peer in (rank - 8, rank + 8) if 0 <= peer < 32])
    if where == "dp":
        return [replace(fault, peer=rank // 8 * 8 + (rank + 2) % 8)]
    if where in ("message", "link"):
        return [replace(fault, peer=toward, micro_batch=batch if where == "message" else -1)]
    return [replace(fault, micro_batch=max(batch, 0))]


@pytest.mark.parametrize("seed", range(24))
def test_looking_at_some_tells_what_looking_at_all_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_candidates, "MOST_NODES", 3)
    chance = random.Random(seed)
    schedule = chance.choice(("1f1b", "1f1b", "gpipe", "zero-bubble", "interleaved"))
    workload = Workload(LAYOUT, schedule, seed=seed, ranks_per_node=chance.choice((2, 4, 8)))
    run = workload.run(chance.choice((9, 11)), drawn(chance))
    silent = chance.choice((-1, chance.randrange(32)))
    rows = [row for rank in run.summaries() for row in rank if row.rank != silent]
    before, after = [row for row in rows if row.step < 8], [row for row in rows if row.step >= 8]
    groups, nodes = workload.groups(), workload.nodes
    evidence = Evidence(groups, nodes, before=before, after=after)
    some = locate_slow(evidence)
    monkeypatch.setattr(_slow_links, "ranks_to_look_at", lambda *_: sorted(nodes))
    every = locate_slow(evidence)
    assert [(c.rank, c.link, c.stage, c.cause) for c in some.culprits] == [
        (c.rank, c.link, c.stage, c.cause) for c in every.culprits
    ]
    assert some.summary == every.summary
