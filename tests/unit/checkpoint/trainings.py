"""Small trainings whose state is saved, and ranks of one node as threads, for the tests of snapshots."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed import HashStore

from keepstep.checkpoint.api import RandomState
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.checkpoint.storage.cadence import Storing
from keepstep.core.errors import CheckpointError


def alone(row: list[int]) -> list[list[int]]:
    return [row]


def training(seed: int = 0) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer, "random": RandomState(), "position": 0}, step


def hashes(state: dict[str, Any]) -> dict[str, Any]:
    found = {f"m{n}": t.clone() for n, t in state["model"].state_dict().items()}
    for i, values in state["optimizer"].state_dict()["state"].items():
        found |= {f"o{i}{n}": t.clone() for n, t in values.items()}
    return found


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Ranks:
    """Ranks of one node as threads, which agree through a barrier."""

    def __init__(self, count: int, *, elastic: bool = False) -> None:
        self.count, self.elastic = count, elastic
        self.rows: dict[int, list[int]] = {}
        self.barrier = threading.Barrier(count, timeout=60)
        self.store = HashStore()

    def gather(self, rank: int, row: list[int]) -> list[list[int]]:
        self.rows[rank] = row
        self.barrier.wait()
        found = [self.rows[r] for r in range(self.count)]
        self.barrier.wait()
        return found

    def run(
        self, served: Any, work: Any, incarnation: int = 0, *, one_node: bool = True, every: int | None = None
    ) -> list[Any]:
        results: list[Any] = [None] * self.count
        self.store = HashStore()  # as each incarnation has a default group of its own

        def one(rank: int) -> None:
            worker = Worker(
                rank, self.count, self.count if one_node else 1, incarnation, elastic=self.elastic
            )
            storing = None if every is None else Storing("/ckpt", every)
            snapshots = Snapshots(
                served.address,
                worker,
                lambda row: self.gather(rank, row),
                storing=storing,
                store=lambda: self.store,
            )
            try:
                results[rank] = work(rank, snapshots)
            except CheckpointError as error:
                results[rank] = str(error)
            snapshots.close()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
