"""Ranks that train, their caches, the agents' tellers and the controller, together: what is named, what is restored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks.corrupt.harness import Harness
from tests.unit.checkpoint.conftest import serving

from keepstep.agent.services.checksums import Pace, _same_tensors, is_driven
from keepstep.checkpoint.header import decode_header, encode_header
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.optimizers import OptimizerWatch
from keepstep.checkpoint.state import flatten, with_families


class Rank:
    """A rank that trains a part with all others, whose gradients are the same, and a part of its own."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(3)
        self.number = number
        self.model, self.own = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.of_own = torch.optim.AdamW(self.own.parameters())
        self.average = torch.zeros(4)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "own": self.own,
            "of_own": self.of_own,
            "average": self.average,
        }

    def step(self, number: int) -> None:
        shared = torch.rand(2, 4, generator=torch.Generator().manual_seed(number))
        self.model(shared).square().sum().backward()
        self.own(shared + self.number).square().sum().backward()
        for one in (self.optimizer, self.of_own):
            one.step()
            one.zero_grad()
        if number > 4 and self.number == 0:
            self.average += number


@pytest.fixture
def caches() -> Iterator[list[str]]:
    """The addresses of two nodes' caches."""
    with serving() as one, serving() as other:
        yield [one.address, other.address]


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.int32).view(-1)[1] ^= 1


def weights(job: Harness[Rank]) -> list[list[float]]:
    return [rank.model.weight.flatten().tolist() for rank in job.ranks]


def test_of_three_the_one_whose_bit_was_turned_over_is_named_and_all_go_back(caches: list[str]) -> None:
    job = Harness(caches[:1], 3, Rank)
    job.train(1, 6)
    right = weights(job)
    assert job.said == []
    job.ranks[1].step(7)
    flip(job.ranks[1].model.weight)
    job.ranks[0].step(7)
    job.ranks[2].step(7)
    job.save(7)
    assert job.said == ["verdict"]
    (incident,) = job.incidents.values()
    (culprit,) = incident.culprits
    assert (incident.kind, culprit.rank, culprit.node, culprit.confidence) == ("corrupt", 1, "gpu-0", "high")
    assert culprit.detail == "model.weight since step 7"
    assert incident.evidence[0].endswith("the last time at step 6")
    assert "ranks 0,2 at step 7" in incident.evidence[1]
    assert "keepstep validate --ranks 1" in incident.actions[0].detail
    job.train(8, 12)  # the snapshot of step 6 is kept as long as that
    assert sorted(key.step for key in job.snapshots[2]._cache.held() if key) == [6, 11, 12]
    assert job.said == ["verdict"]
    assert job.restart() == 6
    assert weights(job) == right
    job.train(7, 8)
    assert job.said == ["verdict", "closes"]
    assert job.incidents[1].status == "relieved"
    assert job.doubts == [Key(0, 7).pack(), 0]
    job.close()


def test_of_two_on_different_nodes_none_is_blamed_for_sure(caches: list[str]) -> None:
    job = Harness(caches, 1, Rank)
    job.train(1, 5)
    flip(job.ranks[0].optimizer.state[job.ranks[0].model.bias]["exp_avg"])
    job.save(6)
    (incident,) = job.incidents.values()
    assert [(one.rank, one.node, one.confidence) for one in incident.culprits] == [
        (0, "gpu-0", "low"),
        (1, "gpu-1", "low"),
    ]
    assert incident.culprits[0].cause == "the state of one of them is wrong"
    assert "optimizer.state.1.exp_avg since step 6" in incident.culprits[0].detail
    job.close()


def test_what_differs_by_right_is_not_named(caches: list[str]) -> None:
    """Parts of a rank's own, an average that one rank begins late, and ranks that begin to train apart."""
    job = Harness(caches[:1], 3, Rank)
    job.train(1, 8)
    for rank in job.ranks:
        for one in rank.model.parameters():
            one.data += rank.number
    job.train(9, 12)
    assert job.said == []
    assert job.doubts == []
    job.close()


def test_a_controller_that_knows_nothing_is_told_what_the_tensors_are(caches: list[str]) -> None:
    job = Harness(caches[:1], 3, Rank)
    job.train(1, 5)
    job.new_controller()
    flip(job.ranks[2].model.weight)
    job.train(6, 6)
    assert job.said == []  # it has no proof that they were alike
    job.close()


def test_headers_with_other_plain_values_have_the_same_tensors() -> None:
    def tree(lr: float, **more: Any) -> bytes:
        state = {"w": torch.ones(2), 3: [torch.zeros(1), lr], "lr": lr, "name": str(lr), **more}
        header, _ = flatten(state, step=1)
        return encode_header(header).partition(b'"tree":')[2].partition(b',"storages"')[0]

    assert _same_tensors(tree(0.1), tree(0.25))
    assert not _same_tensors(tree(0.1), tree(0.1, b=torch.ones(1)))
    assert not _same_tensors(tree(0.1, b=torch.ones(1)), tree(0.1, c=torch.ones(1)))
    assert not _same_tensors(tree(0.1, b=torch.ones(1)), tree(0.1, b=1.0))


def test_families_are_parameters_with_what_their_optimizer_keeps() -> None:
    watch = OptimizerWatch(lambda _: None)
    model = torch.nn.Linear(4, 3)
    kinds = [
        torch.optim.AdamW(model.parameters()),
        torch.optim.Adam(model.parameters(), weight_decay=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1),
    ]
    found: list[tuple[Any, ...]] = []
    for optimizer in kinds:
        watch._known.clear()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        header, spans = flatten({"m": model.state_dict(), "o": optimizer.state_dict()}, step=1)
        header = with_families(header, spans, watch.families())
        header = decode_header(encode_header(header))
        found.append((header.families, header.decaying))
    watch.close()
    of_adam = ((0, 2, 3, 4), (1, 5, 6, 7))
    assert found == [(of_adam, ()), (of_adam, (0, 1)), (((0,), (1,)), ()), (((0,), (1,)), (0, 1))]


def test_a_gradient_shows_where_what_is_kept_is_no_function_of_the_parameter() -> None:
    weights, gradients = torch.randn(64), torch.randn(64) * 3
    assert not is_driven(weights.tolist(), (1 / weights.abs()).tolist())
    for decayed in (weights * 0.01, weights.square() * 0.1, weights.sign() * 3, torch.zeros(64)):
        assert not is_driven(weights.tolist(), decayed.tolist())
        assert is_driven(weights.tolist(), (decayed + gradients).tolist())
    assert is_driven([1.0] * 64, gradients.tolist())
    assert not is_driven([1.0] * 64, [0.1] * 64)
    assert not is_driven(weights.tolist()[:4], gradients.tolist()[:4])
    assert not is_driven(weights.tolist(), [float("nan")] * 64)


def test_fewer_saves_are_told_where_that_takes_too_much() -> None:
    few, fewer = Pace(0.0), Pace(0.0)
    few.spent(0.3, 0.0)
    fewer.spent(0.0, 1e9)
    few.tick(10.0)
    fewer.tick(10.0)
    told = [{step for step in range(4096) if one.takes(Key(0, step))} for one in (Pace(0.0), few, fewer)]
    assert len(told[0]) == 4096
    assert 900 < len(told[1]) < 1150
    assert 0 < len(told[2]) < 200
    assert told[2] < told[1] < told[0]
    for now_s in range(20, 400, 10):
        fewer.tick(float(now_s))
    assert fewer.rarity == 0


def test_the_thread_ends_when_it_is_told(caches: list[str]) -> None:
    job = Harness(caches[:1], 2, Rank)
    teller = job.tellers[0]
    before = threading.active_count()
    teller.start()
    teller.stop()
    teller._thread.join(10)
    assert threading.active_count() == before
    job.close()
