"""Made-up scripts in which one rank calls its collectives differently, run until nobody can go on. Simulated."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from keepstep.core.events import Op, Phase
from keepstep.core.evidence import Evidence
from keepstep.core.habits import usual
from keepstep.core.summary import GroupInfo, OpEnded, OpInFlight, RankState, StreamProgress


@dataclass(frozen=True)
class Made:
    """A call in a script. ``joins``: the rank waits for it, and for those that it has begun before, at once."""

    group: str
    op: Op
    bytes: int
    site: str
    element: str = "float32"
    reduction: str = "SUM"
    joins: bool = True

    @property
    def form(self) -> tuple[int, int, str]:
        """What all members must have in common for it to complete."""
        return int(self.op), self.bytes, self.element


Script = list[Made]


@dataclass
class Rank:
    """One rank of a run: what it has begun, in order, and how much of that it waits for."""

    script: Script
    at: int = 0
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    begun: list[tuple[Made, int]] = field(default_factory=list)  # with the number in its group
    waits: bool = False


class Run:
    """Runs one script a rank. A collective completes when all members have called it in one form."""

    def __init__(
        self,
        scripts: Sequence[Script],
        groups: dict[str, tuple[int, ...]],
        moves: int = 1 << 30,
        seed: int = 0,
    ):
        self.groups = groups
        self.ranks = [Rank(script) for script in scripts]
        self.calls: dict[tuple[str, int], dict[int, Made]] = defaultdict(dict)
        rng = random.Random(seed)
        while moves > 0:
            able = [number for number in range(len(scripts)) if self.can_move(number)]
            if not able:
                break
            self.move(rng.choice(able))
            moves -= 1

    def is_complete(self, call: tuple[Made, int]) -> bool:
        made, seq = call
        by_rank = self.calls[made.group, seq]
        return (
            len(by_rank) == len(self.groups[made.group]) and len({one.form for one in by_rank.values()}) == 1
        )

    def can_move(self, number: int) -> bool:
        rank = self.ranks[number]
        if rank.waits:
            return all(map(self.is_complete, rank.begun))
        return rank.at < len(rank.script)

    def move(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.waits:
            rank.waits = False
            return
        made = rank.script[rank.at]
        rank.at += 1
        rank.counts[made.group] += 1
        seq = rank.counts[made.group]
        rank.begun.append((made, seq))
        self.calls[made.group, seq][number] = made
        rank.waits = made.joins

    def states(self) -> list[RankState]:
        return [self.state(number) for number in range(len(self.ranks))]

    def state(self, number: int) -> RankState:
        rank = self.ranks[number]
        history = [made for made, _ in rank.begun]
        flights: list[OpInFlight] = []
        ended: dict[str, list[OpEnded]] = defaultdict(list)
        completed: dict[str, int] = defaultdict(int)
        for at, (made, seq) in enumerate(rank.begun):
            content = {"bytes": made.bytes, "element": made.element, "reduction": made.reduction}
            usual = precedents(history, at) if at >= len(history) - 16 else -1
            if self.is_complete((made, seq)):
                completed[made.group] += 1
                ended[made.group].append(OpEnded(seq, made.op, **content, site=made.site, usual=usual))
            else:
                since = 1000.0 + at
                flights.append(
                    OpInFlight(
                        made.group, made.op, -1, seq, since, made.site, rank.waits, **content, usual=usual
                    )
                )
        streams = [
            StreamProgress(
                group,
                int([made.op for made in history if made.group == group][-1]),
                -1,
                count,
                completed[group],
                tuple(ended[group][-4:]),
            )
            for group, count in rank.counts.items()
        ]
        last = 999.0 + len(history)  # since then it waits, or has nothing to do
        return RankState(
            number,
            True,
            1,
            int(Phase.FORWARD),
            last,
            len(history),
            last,
            5000.0,
            tuple(flights),
            tuple(streams),
            "S",
        )

    def evidence(self, states: Sequence[RankState] | None = None) -> Evidence:
        infos = {name: GroupInfo(name, members, "cpu:gloo") for name, members in self.groups.items()}
        nodes = {number: f"n{number // 2}" for number in range(len(self.ranks))}
        return Evidence(infos, nodes, states=self.states() if states is None else states)


def precedents(history: Sequence[Made], at: int) -> int:
    """How often this call was made at this place before, as the agent counts."""
    numbers: dict[tuple[str, Op, str], int] = {}
    keys = [numbers.setdefault((made.group, made.op, made.site), len(numbers)) for made in history]
    return usual(np.array(keys, np.uint64), at)


def training(rng: random.Random, world: int) -> tuple[dict[str, tuple[int, ...]], list[list[Made]]]:
    """The groups and the calls of each step of a script that all ranks share, drawn by ``rng``."""
    everybody = tuple(range(world))
    groups = {"0": everybody, "1": everybody}
    buckets = rng.randint(1, 4)
    sizes = [4 * rng.randint(2, 5000) for _ in range(buckets)]
    log_every = rng.choice([0, 3, 5])
    steps: list[list[Made]] = []
    for step in range(rng.randint(12, 24)):
        calls = [
            Made("0", Op.ALLREDUCE, size, "train.py:12 <module>", joins=number == buckets - 1)
            for number, size in enumerate(sizes)
        ]
        if log_every and step % log_every == log_every - 1:
            calls.append(Made("0", Op.ALLREDUCE, 4, "train.py:20 log", reduction="MAX"))
        calls.append(Made("1", Op.ALLGATHER, 256 * world, "train.py:30 metrics"))
        steps.append(calls)
    steps.append([Made("0", Op.BARRIER, 0, "train.py:40 <module>", element="", reduction="")])
    return groups, steps


def flat(steps: Sequence[Sequence[Made]]) -> Script:
    return [made for calls in steps for made in calls]


Mistake = Callable[[random.Random, list[list[Made]]], list[list[Made]]]


def another_size(rng: random.Random, steps: list[list[Made]]) -> list[list[Made]]:
    step, place = _place(rng, steps)
    made = steps[step][place]
    return _with(steps, step, place, [replace(made, bytes=made.bytes + 4 * rng.choice([-1, 1, 7]))])


def another_type(rng: random.Random, steps: list[list[Made]]) -> list[list[Made]]:
    step, place = _place(rng, steps)
    return _with(steps, step, place, [replace(steps[step][place], element="int32")])


def another_operation(rng: random.Random, steps: list[list[Made]]) -> list[list[Made]]:
    step, place = _place(rng, steps)
    return _with(steps, step, place, [replace(steps[step][place], op=Op.BROADCAST, site="train.py:15 odd")])


def skipped_step(rng: random.Random, steps: list[list[Made]]) -> list[list[Made]]:
    """As after ``continue`` on a bad batch: no call of this step's backward."""
    step = rng.randrange(8, len(steps) - 1)
    return _with(
        steps, step, slice(None), [made for made in steps[step] if made.site != "train.py:12 <module>"]
    )


def one_more_call(rng: random.Random, steps: list[list[Made]]) -> list[list[Made]]:
    step, place = _place(rng, steps)
    extra = Made("0", Op.ALLREDUCE, 4 * rng.randint(6000, 7000), "train.py:50 extra")
    return _with(steps, step, place, [extra, steps[step][place]])


def another_order(rng: random.Random, steps: list[list[Made]]) -> list[list[Made]]:
    """The second group's call before the first group's, from a step on."""
    first = rng.randrange(8, len(steps) - 1)
    changed = [[calls[-1], *calls[:-1]] if step >= first else calls for step, calls in enumerate(steps[:-1])]
    return [*changed, steps[-1]]


def left_early(rng: random.Random, steps: list[list[Made]]) -> list[list[Made]]:
    return steps[: rng.randrange(8, len(steps) - 1)]


MISTAKES: tuple[Mistake, ...] = (
    another_size, another_type, another_operation, skipped_step, one_more_call, another_order, left_early,
)  # fmt: skip


def _place(rng: random.Random, steps: list[list[Made]]) -> tuple[int, int]:
    step = rng.randrange(8, len(steps) - 1)
    return step, rng.randrange(len(steps[step]))


def _with(steps: list[list[Made]], step: int, place: int | slice, calls: list[Made]) -> list[list[Made]]:
    changed = list(steps[step])
    changed[place if isinstance(place, slice) else slice(place, place + 1)] = calls
    return [*steps[:step], changed, *steps[step + 1 :]]
