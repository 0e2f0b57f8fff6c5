"""What the mitigation bench trains: real DDP, or a pipeline of two stages (1F1B), whose compute is emulated.

    job.py FOLDER STEPS MICROBATCHES STAGES SECONDS [BALLAST]

Each rank has an emulated device that takes SECONDS for a micro-batch (a third forward) times what FOLDER/slow says of
the rank, and begins it when the one before is done and its input is there, as a device that the host runs ahead of.
The rank sleeps until it is done; real work is small and within that time. With BALLAST the stages are numbered before
the replicas, so that replicas of a stage are neighbours, and reduce so many bytes of gradients more; who is slow goes
by HOST/LOCAL_RANK, as devices stay where they are. Rank 0 writes FOLDER/steps: for each step its number, when it ended
(Unix time), the shares of the replicas, how slow each rank was, and the loss. It ends before that many steps when
FOLDER/enough is there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep

folder, total, count, stages = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
MICROBATCH_S = float(sys.argv[5])
BALLAST = int(sys.argv[6]) if len(sys.argv) > 6 else 0
FORWARD = 1 / 3
WIDTH = 8


class Device:
    """Time passes on it in what is put on it; the host waits."""

    def __init__(self, slow: float) -> None:
        self._slow = slow
        self.free_s = time.time()

    def compute(self, share: float, ready_s: float = 0.0) -> None:
        """A part of a micro-batch whose input is there at ``ready_s``."""
        self.free_s = max(self.free_s, ready_s) + share * MICROBATCH_S * self._slow
        time.sleep(max(self.free_s - time.time(), 0.0))


def slowness(rank: int) -> float:
    device = f"{socket.gethostname()}/{os.environ['LOCAL_RANK']}" if BALLAST else str(rank)
    try:
        return float(json.loads((folder / "slow").read_text())[device])
    except (OSError, KeyError):
        return 1.0


def sample(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(step * 1_000_003 + number)
    data = torch.randn(4, WIDTH, dtype=torch.float64, generator=rng)
    noise = torch.randn(4, 1, dtype=torch.float64, generator=rng)
    return data, data.sum(1, keepdim=True) + noise


class Pipe:
    """To one neighbour: tensors go with the time at which their device was done; a send is waited for by the next."""

    def __init__(self, peer: int) -> None:
        self._peer, self._sent = peer, None

    def send(self, tensor: torch.Tensor, done_s: float) -> None:
        self.flush()
        told = torch.cat([tensor.detach().flatten(), torch.tensor([done_s], dtype=torch.float64)])
        self._kept, self._sent = told, dist.isend(told, self._peer)

    def flush(self) -> None:
        if self._sent is not None:
            self._sent.wait()
            self._sent = None

    def receive(self) -> tuple[torch.Tensor, float]:
        told = torch.empty(4 * WIDTH + 1, dtype=torch.float64)
        dist.recv(told, self._peer)
        return told[:-1].reshape(4, WIDTH), float(told[-1])


def first_stage(
    model: torch.nn.Module, own: range, step: int, device: Device, pipe: Pipe, weight: float
) -> float:
    outputs: list[torch.Tensor] = []

    def backward(place: int) -> None:
        gradient, ready_s = pipe.receive()
        device.compute(1 - FORWARD, ready_s)
        outputs[place].backward(gradient)

    for place, number in enumerate(own):
        device.compute(FORWARD)
        outputs.append(model(sample(step, number)[0]))
        pipe.send(outputs[-1], device.free_s)
        if place:
            backward(place - 1)
    backward(len(own) - 1)
    pipe.flush()
    return 0.0


def last_stage(
    model: torch.nn.Module, own: range, step: int, device: Device, pipe: Pipe, weight: float
) -> float:
    losses = 0.0
    for number in own:
        hidden, ready_s = pipe.receive()
        device.compute(1, ready_s)
        hidden.requires_grad_()
        loss = (model(hidden) - sample(step, number)[1]).square().mean() * weight
        loss.backward()
        losses += float(loss.detach())
        assert hidden.grad is not None
        pipe.send(hidden.grad, device.free_s)
    pipe.flush()
    return losses


def replicated(
    model: torch.nn.Module, session: keepstep.Session, step: int, device: Device
) -> tuple[float, int]:
    losses, done = 0.0, 0
    for number in session.microbatches(count, model):
        data, wanted = sample(step, number)
        loss = (model(data) - wanted).square().mean() * session.weight
        device.compute(1)
        loss.backward()
        losses += float(loss.detach())
        done += 1
    return losses, done


@keepstep.resilient
def train(session: keepstep.Session) -> None:
    dist.init_process_group("gloo")
    replicas = session.world_size // stages
    layout = torch.arange(session.world_size)  # [replica, stage]: rank
    layout = layout.reshape(stages, replicas).T if BALLAST else layout.reshape(replicas, stages)
    replica, stage = (int(place) for place in (layout == session.rank).nonzero()[0])
    torch.manual_seed(stage)
    groups = [dist.new_group(layout[:, one].tolist()) for one in range(stages)]
    ballast = torch.zeros(BALLAST // 4)
    width = 1 if stage == stages - 1 else WIDTH
    plain = torch.nn.Linear(WIDTH, width, dtype=torch.float64)
    model = torch.nn.parallel.DistributedDataParallel(plain) if stages == 1 else plain
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pipe = Pipe(int(layout[replica, 1 - stage])) if stages > 1 else None
    start = session.restore(model=model, optimizer=optimizer)
    for step in session.steps(start, total):
        slow = slowness(session.rank)
        told = torch.zeros(2 + replicas + session.world_size, dtype=torch.float64)
        device = Device(slow)
        if pipe is None:
            loss, done = replicated(model, session, step, device)
        else:
            own = session.share(count, replica=replica, replicas=replicas)
            run = last_stage if stage else first_stage
            loss, done = run(plain, own, step, device, pipe, session.weight), len(own)
            for parameter in plain.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=groups[stage])
                parameter.grad /= replicas
            if BALLAST:
                dist.all_reduce(ballast, group=groups[stage])
        optimizer.step()
        optimizer.zero_grad()
        told[0], told[1] = loss / replicas, float(session.rank == 0 and (folder / "enough").exists())
        told[2 + replica] = done / stages
        told[2 + replicas + session.rank] = slow
        dist.all_reduce(told)
        if session.rank == 0:
            shares = [round(one) for one in told[2 : 2 + replicas].tolist()]
            row = [step, time.time(), shares, told[2 + replicas :].tolist(), float(told[0])]
            with open(folder / "steps", "a") as file:
                file.write(json.dumps(row) + "\n")
        if told[1]:
            break
    dist.destroy_process_group()


train()
