"""A training in which something goes wrong on one rank, or on two, as the seed has it. Plain PyTorch on Gloo."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.campaign.blame_draw import Blame, draw
from benchmarks.campaign.notes import Notes
from torch.nn.parallel import DistributedDataParallel

FOR_GOOD_S = 100_000
LATE_S = 40.0
_CHECK_S = 8.0  # of the monitored barrier

WORDS = {
    "uncorrectable ECC": RuntimeError(
        "CUDA error: uncorrectable ECC error encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call."
    ),
    "unhandled cuda error": RuntimeError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 700"
    ),
    "invalid usage": RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_WARN=1 for details)\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nDuplicate GPU detected"
    ),
    "own storage": OSError(
        "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer')) while reading"
        " s3://corpus/part-00041.tar"
    ),
    "own database": ConnectionError(
        "connection to server at 10.0.0.7, port 5432 failed: server closed the connection unexpectedly"
    ),
}


class Backward(torch.autograd.Function):
    """Where a rank is late in its backward."""

    late: Any = None

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        if Backward.late is not None:
            Backward.late()
        return gradients[0]


class Training:
    """The job of one rank; ``mine``: it is the one to blame."""

    def __init__(self, blame: Blame, notes: Notes) -> None:
        self.blame, self.notes = blame, notes
        self.mine = notes.rank in blame.ranks

    def at(self, step: int, *kinds: str) -> bool:
        """Whether the trouble is here and now; then it is told."""
        now = self.mine and step == self.blame.step and self.blame.kind in kinds
        if now:
            self.notes.truth(step=step)
        return now

    def at_set_up(self, kind: str) -> None:
        if self.mine and self.blame.kind == kind:
            self.notes.truth(step=-1)
            time.sleep(FOR_GOOD_S)

    def set_up(self) -> None:
        """Groups, a first barrier, the model. The timeout of the case is that of the model's own group."""
        self.at_set_up("never comes to set-up")
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
        self.at_set_up("never comes to a group")
        ranks = list(range(dist.get_world_size()))
        self.shard = dist.new_group(ranks, group_desc="shard")
        self.replicate = dist.new_group(ranks, group_desc="replicate")
        self.at_set_up("never comes to the first barrier")
        dist.barrier()
        timeout = datetime.timedelta(seconds=self.blame.rules.timeout_s)
        self.group: Any = dist.new_group(ranks, timeout=timeout)  # Any: all ranks are in it
        layers = (torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=self.group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def batches(self) -> Iterator[torch.Tensor]:
        for step in range(self.blame.steps):
            if self.at(step, "exit 0 in the data"):
                sys.exit(0)  # not enough samples for this rank
            if self.at(step, "late in the data"):
                time.sleep(LATE_S)
            if self.at(step, "hangs before the timeout"):
                time.sleep(FOR_GOOD_S)
            yield torch.randn(8, 64)

    def train(self) -> None:
        for step, x in enumerate(self.batches()):
            self.optimizer.zero_grad()
            time.sleep(self.blame.step_s)
            self.forward_and_backward(step, x)
            self.optimizer.step()
            self.reduce_over_groups(step)
            self.log(step)
            if self.at(step, "stops alone"):
                break  # its own metric does not improve any more
            self.after(step)
            self.notes.step(step)
        if self.blame.kind == "one barrier more" and self.mine:
            self.notes.truth(step=self.blame.steps)
            dist.barrier(self.group)  # `save()` ends in one, and only this rank saves

    def forward_and_backward(self, step: int, x: torch.Tensor) -> None:
        if self.at(step, "one backward less"):
            return  # a bad batch is left out
        y = self.model(x)
        if self.blame.kind == "late in backward":
            now = self.at(step, "late in backward")
            Backward.late = (lambda: time.sleep(LATE_S)) if now else None
            y = Backward.apply(y)
        y.mean().backward()

    def reduce_over_groups(self, step: int) -> None:
        first, second = self.shard, self.replicate
        if self.at(step, "another order of groups"):
            first, second = second, first
        dist.all_reduce(torch.ones(100), group=first)
        dist.all_reduce(torch.ones(100), group=second)

    def log(self, step: int) -> None:
        """The loss, and what the ranks predict, now and then."""
        if self.at(step, "one collective more"):
            dist.all_reduce(torch.ones(1), group=self.group)  # a metric that only this rank has
        if step % 5 != self.blame.step % 5:
            return
        loss = torch.ones(16)
        if self.at(step, "another type"):
            loss = loss.double()
        if self.at(step, "another operation"):
            dist.broadcast(loss, self.notes.rank, group=self.group)
        else:
            dist.all_reduce(loss, group=self.group)
        predicted = torch.ones(5 if self.at(step, "another size") else 8, 4)
        dist.all_gather([torch.empty_like(predicted) for _ in range(self.blame.nproc)], predicted, self.group)

    def after(self, step: int) -> None:
        """At the step's end."""
        kind = self.blame.kind
        if kind == "late for a monitored barrier" and step == self.blame.step:
            if self.at(step, kind):
                time.sleep(LATE_S)
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=_CHECK_S), wait_all_ranks=True)
        if self.at(step, "exit 0 in the step"):
            sys.exit(0)
        if kind in WORDS and self.at(step, kind):
            raise WORDS[kind]
        if self.at(step, "aborts"):
            os.write(
                2, b"terminate called after throwing an instance of 'c10::Error'\n  what():  bad image\n"
            )
            os.abort()
        if self.at(step, "two killed"):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    notes = Notes()
    training = Training(draw(notes.seed), notes)
    notes.began()
    training.set_up()
    training.train()
    notes.done()


if __name__ == "__main__":
    main()
