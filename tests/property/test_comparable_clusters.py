"""Without a healthy time: groups against comparable groups, ranks against those at the same place, 30 % of them bad.

The twin is the definition word for word: a group is degraded when its time after the last arrival is over 1.1 x the
median of the groups with the same role, operation and bytes (GREYHOUND §4.3).
"""

from __future__ import annotations

import random
from statistics import median

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.unit.locate.synthetic_jobs import Conditions, Job, ddp, dp_pp, dp_tp, fsdp, slow_rank

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.locate import estimate_offsets, locate_slow
from keepstep.locate._slow_links import PEER_RATIO, transfers_against_peers
from keepstep.locate.infer import InferredLayout, Roles

STEPS = 8
SEEDS = st.integers(0, 1 << 32)


def clusters(
    chance: random.Random,
) -> tuple[dict[str, GroupInfo], InferredLayout, list[IterationSummary], set[str]]:
    """Pairs of ranks in up to three roles, up to 30 % of each role's groups slower by a quarter or more."""
    groups: dict[str, GroupInfo] = {}
    roles: dict[str, Roles] = {}
    rows: dict[tuple[int, int], list[StreamSummary]] = {}
    bad: set[str] = set()
    rank = 0
    for role in chance.sample(["tp", "dp", "cp"], chance.randint(1, 3)):
        size = chance.randint(4, 20)
        slow = chance.sample(range(size), int(0.3 * size))
        usual_s, nbytes = chance.uniform(1e-3, 0.1), chance.choice([1 << 20, 1 << 24])
        for number in range(size):
            name = f"{role}{number}"
            groups[name] = GroupInfo(name, (rank, rank + 1))
            roles[name] = (role,)  # pyright: ignore[reportArgumentType]
            factor = chance.uniform(1.25, 5) if number in slow else 1.0
            bad |= {name} if number in slow else set()
            for step in range(STEPS):
                taken_s = usual_s * factor * chance.uniform(0.98, 1.02)
                late = chance.randrange(2)  # its peer waits for it
                for member in (0, 1):
                    busy_s = taken_s if member == late else taken_s + chance.uniform(0.0, 0.2)
                    rows.setdefault((rank + member, step), []).append(
                        StreamSummary(
                            name, int(Op.ALLREDUCE), -1, 1, nbytes, step, 0.0, busy_s, busy_s, busy_s, busy_s
                        )
                    )
            rank += 2
    summaries = [
        IterationSummary(one, step, float(step), 1.0, 0.5, 0.5, streams=tuple(streams))
        for (one, step), streams in rows.items()
    ]
    return groups, InferredLayout(roles, {}, 0), summaries, bad


def twin(groups: dict[str, GroupInfo], layout: InferredLayout, rows: list[IterationSummary]) -> set[str]:
    times: dict[str, float] = {}
    alike: dict[str, tuple[object, ...]] = {}
    for name, group in groups.items():
        by_step: dict[int, list[StreamSummary]] = {}
        for row in rows:
            if row.rank in group.members:
                by_step.setdefault(row.step, []).extend(s for s in row.streams if s.group == name)
        times[name] = median(min(s.busy_s for s in streams) for streams in by_step.values())
        one = by_step[0][0]
        alike[name] = layout.roles[name], one.op, one.bytes
    return {
        name
        for name, its in alike.items()
        if times[name] > 1.1 * median(times[other] for other, theirs in alike.items() if theirs == its)
    }


@settings(max_examples=many(60), deadline=None)
@given(seed=SEEDS)
def test_degraded_groups_are_those_of_the_definition(seed: int) -> None:
    groups, layout, rows, bad = clusters(random.Random(seed))
    nodes = {rank: f"n{rank}" for group in groups.values() for rank in group.members}
    found = transfers_against_peers(Evidence(groups, nodes, after=rows), layout)
    degraded = {one.path.group for one in found if one.ratio > PEER_RATIO and one.gain_s >= 2 * one.error_s}
    assert degraded == bad == twin(groups, layout, rows)


def class_of(job: Job) -> list[list[int]]:
    """Ranks that do the same work."""
    if "g0" in job.groups:
        return [list(members) for name, members in job.groups.items() if name.startswith("g")]
    return [list(range(job.world))]


@settings(max_examples=many(30), deadline=None)
@given(seed=SEEDS)
def test_slow_ranks_are_told_from_those_at_the_same_place(seed: int) -> None:
    chance = random.Random(seed)
    make = chance.choice([lambda: dp_tp(8, 2), lambda: dp_pp(10, 2), lambda: ddp(10), lambda: fsdp(10)])
    job = make()
    job.seed = seed % 1000
    slow = {
        rank
        for ranks in class_of(job)
        for rank in chance.sample(ranks, chance.randint(0, int(0.3 * len(ranks))))
    }
    factor = chance.choice([1.3, 1.5, 2.0, 3.0])
    conditions = Conditions(
        slow={key: value for rank in slow for key, value in slow_rank(rank, factor).items()}
    )
    after, _ = job.run(STEPS, conditions)
    found = locate_slow(Evidence(job.infos, job.nodes, after=after))
    assert {culprit.rank for culprit in found.culprits} == slow


@settings(max_examples=many(30), deadline=None)
@given(seed=SEEDS)
def test_a_slow_pair_is_told_from_comparable_ones(seed: int) -> None:
    """Inside a group or between pipeline stages; with and without clocks that can be compared."""
    chance = random.Random(seed)
    clock = {f"n{number}": (chance.uniform(-1e4, 1e4), chance.uniform(-5e-5, 5e-5)) for number in range(16)}
    dp, pp, tp = chance.choice([(8, 1, 2), (2, 1, 8), (6, 2, 1), (4, 4, 1)])
    options = {"per_node": 1, "clock": clock, "bandwidth": 5e7, "seed": seed % 1000}
    job = dp_pp(dp, pp, **options) if pp > 1 else dp_tp(dp, tp, **options)
    if pp > 1:
        first = chance.randrange(dp * (pp - 1))
        pair = (f"n{first}", f"n{first + dp}")
    elif tp == 2:
        first = 2 * chance.randrange(dp)
        pair = (f"n{first}", f"n{first + 1}")
    else:
        first = chance.randrange(tp)
        pair = (f"n{first}", f"n{first + tp}")
    slow = chance.random() < 0.8
    after, samples = job.run(STEPS, Conditions(links={frozenset(pair): 5.0 if slow else 1.0}))
    for offsets in (None, estimate_offsets(samples)):
        found = locate_slow(Evidence(job.infos, job.nodes, offsets, after=after))
        assert [set(c.link.nodes) for c in found.culprits if c.link] == ([set(pair)] if slow else [])
        assert all(culprit.rank is None and culprit.confidence == "medium" for culprit in found.culprits)
