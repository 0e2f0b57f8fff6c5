"""A small real training (DDP, Gloo) that misuses checkpoints in one way, and notes how long its steps and saves take.

Given a JSON file (`Orders`). In its folder, by rank: ``loss-R`` (step and loss, bit for bit), ``time-R`` (for each step
its number, its seconds without the save, and those of the save) and ``start-R`` (where each incarnation began).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Orders:
    """What the training does.

    Attributes:
        folder: where its ranks write.
        steps: how many there are.
        seed: of weights and data.
        way: "load" (load and save), "session" (a Session), "save" (nothing is ever loaded), or "group" (as "load", but
            ranks meet in a group of their own only, so that nobody counts their operations).
        step_s: what each step takes at least.
        savers: ranks that save; others train only.
        ahead: rank whose saves are numbered one step too high; -1: none.
        width: of the hidden layer.
        dtype: of the whole state, by torch's name.
        grow: step from which the state has ``grow_bytes`` more; -1: never.
        grow_bytes: see there.
        kill: rank that ends itself with SIGKILL in incarnation 0; -1: none.
        at: after the save that follows this step.
        within_s: how long after that save has begun, instead of after its end; -1: after its end.
    """

    folder: str
    steps: int
    seed: int
    way: str = "load"
    step_s: float = 0.1
    savers: tuple[int, ...] = tuple(range(64))
    ahead: int = -1
    width: int = 64
    dtype: str = "float32"
    grow: int = -1
    grow_bytes: int = 0
    kill: int = -1
    at: int = -1
    within_s: float = -1.0


def _killed_within(after_s: float) -> Callable[[], None]:
    """Returns what begins the time after which this process is killed."""
    begun = threading.Event()

    def end() -> None:
        begun.wait()
        until = time.perf_counter() + after_s
        while time.perf_counter() < until:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    return begun.set


def main() -> None:
    import torch
    import torch.distributed as dist

    import keepstep
    import keepstep.checkpoint

    given = json.loads(Path(sys.argv[1]).read_text())
    orders = Orders(**{**given, "savers": tuple(given["savers"])})
    folder = Path(orders.folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, incarnation = dist.get_rank(), int(os.environ.get("KEEPSTEP_INCARNATION", "0"))
    group = dist.new_group() if orders.way == "group" else None
    torch.manual_seed(orders.seed)
    dtype = getattr(torch, orders.dtype)
    net = torch.nn.Sequential(torch.nn.Linear(16, orders.width), torch.nn.Linear(orders.width, 1)).to(dtype)
    model = torch.nn.parallel.DistributedDataParallel(net, process_group=group, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(orders.seed + rank)
    own: dict[str, Any] = {"data": data.get_state(), "more": torch.zeros(0)}
    saves = rank in orders.savers
    kills = rank == orders.kill and incarnation == 0
    ends = _killed_within(orders.within_s) if kills and orders.within_s >= 0 else None
    times = (folder / f"time-{rank}").open("a", buffering=1)

    class Own:
        """The rest of the state, for a Session."""

        def state_dict(self) -> dict[str, Any]:
            return dict(own)

        def load_state_dict(self, value: dict[str, Any]) -> None:
            own.update(value)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "own": Own()}
    session = keepstep.Session() if orders.way == "session" else None
    if session is None:
        state["random"] = keepstep.checkpoint.RandomState()
    if session is not None:
        start = session.restore(**state)
    elif orders.way == "save":
        start = 0
    else:
        start = keepstep.checkpoint.load(state) or 0
    data.set_state(own["data"])
    with (folder / f"start-{rank}").open("a") as file:
        file.write(f"{incarnation} {start}\n")

    def numbered() -> Iterator[int]:
        """The steps of the training, each of which is saved when it is over."""
        if session is not None and saves and orders.ahead != rank:
            yield from session.steps(start, orders.steps)
            return
        for step in range(start, orders.steps):
            yield step
            if saves:
                of = session.state if session is not None else state
                keepstep.checkpoint.save(of, step + 1 + (orders.ahead == rank))

    began_s = body_s = 0.0
    last = -1

    def over() -> None:
        """A step's body and its save are over."""
        if last >= 0:
            times.write(f"{last} {body_s - began_s:.4f} {time.perf_counter() - body_s:.4f}\n")
            if kills and last == orders.at and orders.within_s < 0:
                time.sleep(orders.step_s / 2)  # the snapshot is sealed, and the others are in their next step
                os.kill(os.getpid(), signal.SIGKILL)

    with (folder / f"loss-{rank}").open("a", buffering=1) as losses:
        for step in numbered():
            over()
            began_s = time.perf_counter()
            x = torch.randn(8, 16, generator=data).to(dtype)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            losses.write(f"{step} {loss.item().hex()}\n")
            optimizer.zero_grad()
            if step == orders.grow:
                own["more"] = torch.zeros(orders.grow_bytes // 4)
            own["data"] = data.get_state()
            time.sleep(orders.step_s)
            body_s, last = time.perf_counter(), step
            if ends and step == orders.at:
                ends()
        over()
    keepstep.checkpoint.wait()
    dist.destroy_process_group()
    # torch destroys the group with the last model, holding the GIL, and joins a thread of Gloo that may need the GIL.
    time.sleep(0.1)


if __name__ == "__main__":
    main()
