"""A resilient training whose ranks die where they are told to; writes each step's loss as hex, and its process.

Arguments: folder, kind (``ddp``, ``fsdp2``, ``own``), steps, deaths: ``RANK:STEP:MOMENT:HOW,…``, one for each
incarnation. Moments: ``forward``, ``backward``, ``optimizer`` (one of two has stepped), ``save``; how: ``kill``,
``stop``, ``raise``, ``cut`` (its connections are lost, and it lives). A ``swallow`` has the other ranks not leave the
training when they are told to.
``STEP_S``: seconds that a step takes more, until there is a file ``hurry`` in the folder.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.worker.group_connections import OURS

folder, kind, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
deaths = [death.split(":") for death in sys.argv[4].split(",") if death]
WAITS = "WAITS" in os.environ


class Dying:
    """Where this rank dies in this incarnation."""

    def __init__(self, session: keepstep.Session) -> None:
        self.step, self.incarnation = -1, session.incarnation
        death = deaths[session.incarnation] if session.incarnation < len(deaths) else ["-1"] * 4
        self.rank, self.at, self.moment, self.how = int(death[0]), int(death[1]), death[2], death[3]
        self.mine = self.rank == session.rank

    def here(self, moment: str) -> None:
        if not self.mine or (self.step, self.moment) != (self.at, moment):
            return
        if WAITS:
            draft = folder / f".dying-{self.incarnation}"
            draft.write_text(str(os.getpid()))
            draft.rename(folder / f"dying-{self.incarnation}")
            while not (folder / f"go-{self.incarnation}").exists():
                time.sleep(0.01)
        if self.how == "raise":
            raise ValueError("boom")
        if self.how == "cut":
            OURS.shut()
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)


class Data:
    """Batches; its state is what a save asks for."""

    def __init__(self, rank: int, dying: Dying) -> None:
        self.generator, self.dying = torch.Generator().manual_seed(rank), dying

    def batch(self) -> torch.Tensor:
        return torch.randn(16, 32, generator=self.generator)

    def state_dict(self) -> dict[str, torch.Tensor]:
        self.dying.here("save")
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def in_order_of_ranks(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(torch.stack(parts).sum(0) / len(parts))
    return done


def build() -> Any:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, in_order_of_ranks)
        return wrapped
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train_on(session: keepstep.Session) -> None:
    dist.init_process_group("gloo")
    dying, model = Dying(session), build()
    parameters = list(model.parameters())
    optimizers = [torch.optim.AdamW(half, lr=1e-2) for half in (parameters[:2], parameters[2:])]
    data = Data(session.rank, dying)
    start = session.restore(model=model, first=optimizers[0], second=optimizers[1], data=data)
    print(
        f"rank {session.rank} incarnation {session.incarnation} starts at {start}",
        file=sys.stderr,
        flush=True,
    )
    model.register_forward_pre_hook(lambda *_: dying.here("forward"))
    with (folder / f"losses-{session.rank}").open("a") as log:
        for step in session.steps(start, steps):
            dying.step = step
            x = data.batch()
            said = model(x)
            said.register_hook(lambda gradient: dying.here("backward"))
            loss = torch.nn.functional.mse_loss(said, x.sum(1, keepdim=True))
            loss.backward()
            if not (folder / "hurry").exists():
                time.sleep(float(os.environ.get("STEP_S", "0")))
            if kind == "own" and step % 3 == session.rank:  # no reduction: the others run ahead
                time.sleep(0.02)
            optimizers[0].step()
            dying.here("optimizer")
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            log.write(f"{step} {float(loss.item()).hex()} {os.getpid()}\n")
            log.flush()
    dist.destroy_process_group()


@keepstep.resilient
def train(session: keepstep.Session) -> None:
    swallow = "SWALLOWS" in os.environ and session.incarnation == 0
    try:
        train_on(session)
    except BaseException:
        while swallow:
            try:
                time.sleep(60)
            except BaseException:  # noqa: PERF203
                continue
        raise


train()
