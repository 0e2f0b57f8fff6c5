"""Shares of micro-batches: all ranks divide a step alike, whatever is ordered and whenever it comes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from subprocess import PIPE
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.warm.forked import WarmPopen

from keepstep.core.microbatch_shares import equal_shares, fits, objection, share_of
from keepstep.ring import orders
from keepstep.ring.orders import OrdersPage

JOB = """
import datetime, json, os, sys
import numpy as np
import torch, torch.distributed as dist
import keepstep
case = os.environ.get("CASE")
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], int(os.environ["WORLD_SIZE"])),
                        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, dtype=torch.float64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = keepstep.Session()
session.restore(model=model, optimizer=optimizer)
if case == "default device":
    torch.set_default_device("meta")
for step in session.steps(0, 1 << 30):
    if session.rank == 0 and (order := sys.stdin.readline()) == "end\\n":
        stop = torch.ones(1, device="cpu")
    else:
        stop = torch.zeros(1, device="cpu")
    dist.broadcast(stop, 0)
    if stop:
        session._shares.finish()
        break
    own = []
    watched = None if case == "own loop" else model
    for number in session.microbatches(np.int64(12), watched, at_most=int(os.environ.get("MOST", 0)) or None):
        own.append(number)
        if case == "own loop":
            continue
        if case == "meets":
            dist.all_reduce(torch.ones(1, device="cpu"))
        data = torch.arange(8, dtype=torch.float64, device="cpu").reshape(2, 4).sin() + number
        (model(data).square().mean() * session.weight).backward()
    if case == "evaluation":
        session.share(6)
    optimizer.step()
    optimizer.zero_grad()
    everybody = [None] * session.world_size
    dist.all_gather_object(everybody, own)
    if session.rank == 0:
        print(json.dumps([everybody, model.module.weight.tolist()]), flush=True)
dist.destroy_process_group()
"""


class Job:
    """Ranks that train on micro-batches; the test is the launcher and the agent of all of them."""

    def __init__(self, folder: str, ranks: int, program: str = JOB, **environment: str) -> None:
        self._descriptors = [orders.create() for _ in range(ranks)]
        self.pages = [OrdersPage(one) for one in self._descriptors]
        self._processes = [
            WarmPopen(
                [sys.executable, "-c", program, f"{folder}/store"],
                env=os.environ
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "OMP_NUM_THREADS": "1",
                    "KEEPSTEP_INCARNATION": "3",
                    "KEEPSTEP_ORDERS": f"/proc/{os.getpid()}/fd/{self._descriptors[rank]}",
                    "KEEPSTEP_MICROBATCHES": "1",
                }
                | environment,
                stdin=PIPE,
                stdout=PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def step(self) -> tuple[list[list[int]], Any]:
        """One more: which micro-batches each rank computed, and the model's weight after it."""
        self._say("go\n")
        answer = self._processes[0].stdout
        assert answer is not None
        everybody, weight = json.loads(answer.readline())
        return everybody, weight

    def order(self, number: int, shares: Any, incarnation: int = 3) -> None:
        self.pages[0].shares.put(number, {"incarnation": incarnation, "shares": shares})

    def end(self) -> list[int]:
        self._say("end\n")
        return [one.wait(60) for one in self._processes]

    def close(self) -> None:
        for one in self._processes:
            one.kill()
            one.wait()
            for pipe in (one.stdin, one.stdout):
                assert pipe is not None
                pipe.close()
        for page in self.pages:
            page.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _say(self, word: str) -> None:
        pipe = self._processes[0].stdin
        assert pipe is not None
        pipe.write(word)
        pipe.flush()


@pytest.fixture
def start(tmp_path: os.PathLike[str]) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def begin(ranks: int, **environment: str) -> Job:
        folder = os.path.join(tmp_path, str(len(made)))
        os.mkdir(folder)
        made.append(Job(folder, ranks, **environment))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def counts(job: Job) -> list[int]:
    everybody, _ = job.step()
    assert sorted(number for own in everybody for number in own) == list(range(12))
    return [len(own) for own in everybody]


def test_all_take_what_is_ordered_and_learn_the_same(start: Callable[..., Job]) -> None:
    job, undisturbed = start(3), start(3)
    assert counts(job) == [4, 4, 4]
    job.order(1, [6, 5, 1])
    seen = [counts(job) for _ in range(3)]
    assert seen[-1] == [6, 5, 1]
    assert all(one in ([4, 4, 4], [6, 5, 1]) for one in seen)
    split = job.pages[1].split.newest(0)
    assert split is not None
    changed = split[1]["step"]
    assert split[1] == {
        "incarnation": 3,
        "step": changed,
        "count": 12,
        "replica": 1,
        "replicas": 3,
        "multiple_of": 1,
        "at_most": 0,
        "number": 1,
        "share": 5,
        "movable": True,
    }
    assert seen.index([6, 5, 1]) + 1 == changed
    job.order(2, [4, 4, 4])
    assert [counts(job) for _ in range(3)][-1] == [4, 4, 4]
    for _ in range(7):
        _, weight = undisturbed.step()
    _, same = job.step()
    _, weight = undisturbed.step()
    assert same[0] == pytest.approx(weight[0], rel=1e-12, abs=0)
    assert job.end() == undisturbed.end() == [0, 0, 0]


WRONG: list[tuple[Any, int]] = [
    ([6, 6], 2),
    ([6, 5], 3),
    ([12, 0], 3),
    ([4, 4, 4], 3),
    ([13, -1], 3),
    ([6.0, 6.0], 3),
    ([3, 9], 3),
    ("66", 3),
    (None, 3),
]


def test_what_cannot_be_is_not_obeyed(start: Callable[..., Job]) -> None:
    job = start(2, MOST="8")
    for number, (shares, incarnation) in enumerate(WRONG):
        job.order(number + 1, shares, incarnation)
        assert [counts(job) for _ in range(2)] == [[6, 6]] * 2
    job.order(99, [8, 4])
    assert [counts(job) for _ in range(3)][-1] == [8, 4]
    assert job.end() == [0, 0]


def test_where_nothing_may_be_ordered_shares_are_equal(start: Callable[..., Job]) -> None:
    job = start(2, KEEPSTEP_MICROBATCHES="0")
    job.order(1, [8, 4])
    assert [counts(job) for _ in range(3)] == [[6, 6]] * 3
    split = job.pages[0].split.newest(0)
    assert split is not None
    assert (split[0], split[1]["number"]) == (1, 0)
    assert job.end() == [0, 0]


@pytest.mark.parametrize("case", ["default device", "evaluation", "own loop"])
def test_an_order_is_obeyed(start: Callable[..., Job], case: str) -> None:
    job = start(2, CASE=case)
    assert [counts(job) for _ in range(2)] == [[6, 6]] * 2
    job.order(1, [8, 4])
    assert [counts(job) for _ in range(3)][-1] == [8, 4]
    split = job.pages[0].split.newest(0)
    assert split is not None
    assert split[1]["movable"]
    assert split[1]["count"] == 12
    assert split[0] <= 3
    assert job.end() == [0, 0]


def test_ranks_that_meet_in_each_micro_batch_keep_equal_shares(start: Callable[..., Job]) -> None:
    job = start(2, CASE="meets")
    assert counts(job) == [6, 6]
    job.order(1, [8, 4])
    assert [counts(job) for _ in range(3)] == [[6, 6]] * 3
    split = job.pages[0].split.newest(0)
    assert split is not None
    assert not split[1]["movable"]
    assert job.end() == [0, 0]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(0, 20))
def test_equal_shares_are_all_of_it(units: int, replicas: int, multiple_of: int, at_most: int) -> None:
    count = units * multiple_of
    if objection(count, replicas, multiple_of, at_most):
        return
    shares = equal_shares(count, replicas, multiple_of)
    assert fits(shares, count, replicas, multiple_of)
    assert max(shares) - min(shares) <= multiple_of
    taken = [number for replica in range(replicas) for number in share_of(replica, shares)]
    assert taken == list(range(count))
