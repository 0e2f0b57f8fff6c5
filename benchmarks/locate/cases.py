"""Draws the faults of the locate bench from a seed, and lets the workload say what they do. Knows no locator."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from benchmarks.locate.judge import Meant
from benchmarks.simulate import BlockTimes, Fault, Schedule, Workload

from keepstep.core.layout import ParallelLayout

# TP, PP, DP, micro-batches, weight
LAYOUTS = (
    (2, 4, 8, 8, 30), (4, 4, 8, 8, 20), (1, 4, 16, 8, 10), (2, 4, 32, 8, 15), (8, 4, 16, 8, 8), (4, 8, 16, 16, 8),
    (8, 8, 16, 16, 4), (8, 8, 32, 16, 3), (8, 16, 32, 32, 2),
)  # fmt: skip
LARGEST = (8, 16, 1024, 32)
SCHEDULES: tuple[Schedule, ...] = ("1f1b",) * 7 + ("interleaved", "gpipe", "zero-bubble")
STAGES = ("forward", "backward", "transfer")
HANGS = STAGES * 4 + ("data", "optimizer", "dead", "desync")
SLOW = STAGES * 4 + ("rank", "node", "two", "link")
BEFORE_STEPS = 8
BEFORE_STEPS_LARGEST = 4  # what the controller asks of large jobs
FELT, ABSORBED = 0.05, 0.01  # of the iteration time: a slowdown; none
DELAY_S = (0.05, 30.0)
_SILENT = 0.2  # of the nodes, in a fifth of the cases


@dataclass(frozen=True, slots=True)
class Case:
    """One drawn fault (or two). ``label``: what kind; ``silent``: nodes whose agents say nothing."""

    seed: int
    kind: str  # "slow" or "hang"
    label: str
    workload: Workload
    faults: tuple[Fault, ...]
    before: int
    after: int
    silent: frozenset[int]
    source: str = "drawn"

    @property
    def steps(self) -> int:
        return self.before + self.after


def draw(seed: int, kind: str, *, largest: bool = False, recorded: BlockTimes | None = None) -> Case:
    """The case of a seed."""
    rng = random.Random(f"locate {kind} {seed}")
    tp, pp, dp, batches = (
        LARGEST if largest else rng.choices([row[:4] for row in LAYOUTS], [r[4] for r in LAYOUTS])[0]
    )
    schedule = "1f1b" if largest else rng.choice(SCHEDULES)
    if recorded is not None:
        tp, schedule = 1, "1f1b"
        _, pp, dp, batches = recorded.forward.shape
    workload = Workload(
        ParallelLayout(tp=tp, pp=pp, dp=dp), schedule, batches, seed=seed,
        ranks_per_node=4 if recorded is not None else 8, recorded=recorded,
    )  # fmt: skip
    before = BEFORE_STEPS_LARGEST if largest else 2 if kind == "hang" else BEFORE_STEPS
    after = 1 if kind == "hang" else 3 if largest else rng.choice((1, 3))
    label = rng.choice(HANGS if kind == "hang" else SLOW)
    faults = tuple(_faults(rng, workload, label, kind, before))
    if label == "optimizer" and kind == "hang":
        after = 2  # the others begin the next step
    world, per_node = workload.layout.world_size, workload.ranks_per_node
    nodes = (world + per_node - 1) // per_node
    silent = rng.sample(range(nodes), max(1, round(_SILENT * nodes))) if rng.random() < 0.2 else []
    source = "drawn" if recorded is None else "recorded"
    return Case(seed, kind, label, workload, faults, before, after, frozenset(silent), source)


@cache
def recorded_blocks(table: Path) -> BlockTimes:
    """Durations of the blocks of a straggler-analysis table; the first steps that all have them."""
    from keepstep.traces.operation_tables import read_operation_table

    operations, _ = read_operation_table(table)
    wanted = [one for one in operations if one.kind in ("forward", "backward")]
    steps = {step: place for place, step in enumerate(sorted({one.step for one in wanted}))}
    shape = (
        len(steps), 1 + max(o.stage for o in wanted), 1 + max(o.replica for o in wanted),
        1 + max(o.index for o in wanted),
    )  # fmt: skip
    found = {kind: np.full(shape, np.nan) for kind in ("forward", "backward")}
    for one in wanted:
        found[one.kind][steps[one.step], one.stage, one.replica, one.index] = one.duration_s
    whole = ~np.isnan(found["forward"] + found["backward"]).any(axis=(1, 2, 3))
    return BlockTimes(found["forward"][whole], found["backward"][whole])


def effects(case: Case) -> list[float]:
    """What each fault adds to the iteration, alone or beside the others (the more), as a share of it without any."""

    def median_s(faults: Sequence[Fault]) -> float:
        return float(np.median(case.workload.iteration_s(case.steps, faults)[case.before :]))

    healthy_s, found = median_s([]), list[float]()
    for fault in case.faults:
        others = [one for one in case.faults if one is not fault]
        alone_s = median_s([fault]) - healthy_s
        beside_s = median_s(case.faults) - median_s(others) if others else alone_s
        found.append(max(alone_s, beside_s) / healthy_s)
    return found


def _faults(rng: random.Random, workload: Workload, label: str, kind: str, first: int) -> Sequence[Fault]:
    layout = workload.layout
    rank = rng.randrange(layout.world_size)
    batch = rng.randrange(workload.micro_batches)
    delay = math.inf if kind == "hang" else math.exp(rng.uniform(*map(math.log, DELAY_S)))
    base = Fault("forward", rank, micro_batch=batch, delay_s=delay, first_step=first)
    if label in ("forward", "backward"):
        return [replace(base, where=label)]
    if label == "transfer":
        return [_transfer(rng, workload, base)]
    if label in ("data", "optimizer"):
        return [replace(base, where=label, micro_batch=-1)]
    if label == "dead":
        return [replace(base, where=rng.choice(("forward", "backward")), dies=True)]
    if label == "desync":
        where = rng.choice([role for role in ("tp", "dp") if layout.size(role) > 1])
        return [replace(base, where=where, delay_s=0.0, skips=True)]
    factor = rng.uniform(1.2, 4.0)
    slow = Fault("compute", rank, factor=factor, first_step=first)
    if label == "rank":
        return [slow]
    if label == "node":
        return [replace(slow, node=True)]
    if label == "link":
        return [
            replace(
                _message(rng, workload, base), where="link", micro_batch=-1, delay_s=rng.uniform(0.02, 0.2)
            )
        ]
    other = rng.choice([r for r in range(layout.world_size) if r != rank])
    return [base, replace(base, where="backward", rank=other, delay_s=delay * rng.uniform(0.5, 2.0))]


def _transfer(rng: random.Random, workload: Workload, base: Fault) -> Fault:
    """A message between stages, or a collective of the rank's tensor- or data-parallel group."""
    layout = workload.layout
    where = rng.choice(["message", *(role for role in ("tp", "dp") if layout.size(role) > 1)])
    if where == "message":
        return _message(rng, workload, base)
    if where == "tp":
        return replace(base, where="tp")
    inner = layout.tp * layout.dp
    stage, place = divmod(base.rank, inner)
    peer = stage * inner + (place + layout.tp) % inner  # the next in the ring
    return replace(base, where="dp", peer=peer, micro_batch=-1)


def _message(rng: random.Random, workload: Workload, base: Fault) -> Fault:
    inner = workload.layout.tp * workload.layout.dp
    stage = base.rank // inner
    toward = [peer for peer in (stage - 1, stage + 1) if 0 <= peer < workload.layout.pp]
    peer = base.rank + (rng.choice(toward) - stage) * inner
    return replace(base, where="message", peer=peer)


def meant(case: Case, shares: Sequence[float]) -> list[Meant]:
    """Who is to be named for each fault. ``shares`` as from `effects`; infinite for hangs."""
    found: list[Meant] = []
    for fault, share in zip(case.faults, shares, strict=True):
        felt = True if share >= FELT else False if share < ABSORBED else None
        one = replace(_meant(case, fault), felt=felt)
        needed = one.ranks | one.members
        if fault.peer >= 0:
            needed |= {fault.rank, fault.peer}
        per_node = case.workload.ranks_per_node
        found.append(replace(one, hidden=any(rank // per_node in case.silent for rank in needed)))
    return found


def _meant(case: Case, fault: Fault) -> Meant:
    workload = case.workload
    per_node = workload.ranks_per_node
    name = workload.groups_of
    if fault.skips:
        return Meant(frozenset({fault.rank}))
    if fault.where in ("message", "link"):
        nodes = workload.nodes
        return Meant(
            nodes=frozenset({nodes[fault.rank], nodes[fault.peer]}), members=frozenset({fault.rank, fault.peer}),
            stage="transfer",
        )  # fmt: skip
    if fault.where in ("tp", "dp"):
        group = next(one for one in name(fault.rank) if one.name.startswith(fault.where))
        ends = (fault.rank,) if fault.where == "tp" else (fault.rank, fault.peer)
        nodes = frozenset(workload.nodes[rank] for rank in ends)
        return Meant(nodes=nodes, group=group.name, members=frozenset(group.members), stage="transfer")
    stage = "forward and backward" if fault.where == "compute" else fault.where
    ranks = {fault.rank}
    if fault.node:
        first = fault.rank // per_node * per_node
        ranks = set(range(first, min(first + per_node, workload.layout.world_size)))
    return Meant(frozenset(ranks), stage=stage)
