"""A small real training (DDP, Gloo) for the checkpoint campaigns: says where it is, and keeps a ledger of its states.

Arguments: folder, steps, number of the run, steps between those that are to be on storage (0: none), and, when given,
a pause after each step in seconds; then it ends before its last step when there is a file ``end`` in the folder. In
the folder, by rank: ``mark-R`` (a page: where this process is, see ``Phase``), ``ledger-R`` (a JSON line for each
state: what it was when saved, when it was sealed, what came back; and the number of steps at the end) and ``loss-R``.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

MARK = struct.Struct("<QQQ")  # process, phase, step


class Phase(IntEnum):
    """Where a rank is; each is a moment at which a campaign may kill."""

    TRAIN = 0
    SAVE = 1  # inside save()
    SEAL = 2  # between save() and the optimizer's step, which waits for the copy
    RESTORE = 3  # inside load()
    STEP = 4  # inside the optimizer's step


class Mark:
    """Tells others where this process is. Its page outlives it."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(MARK.size))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), MARK.size)

    def put(self, phase: Phase, step: int) -> None:
        MARK.pack_into(self._page, 0, os.getpid(), phase, step)

    def get(self) -> tuple[int, int, int]:
        return MARK.unpack_from(self._page)


class Marks:
    """Those of all ranks, as others read them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._marks: dict[int, Mark] = {}

    def get(self, rank: int) -> tuple[int, int, int]:
        """Process, phase and step of a rank; zeros before there is any."""
        path = self._folder / f"mark-{rank}"
        if rank not in self._marks:
            if not path.exists() or not path.stat().st_size:
                return 0, 0, 0
            self._marks[rank] = Mark(path)
        return self._marks[rank].get()


def fingerprint(state: dict[str, Any]) -> int:
    """A checksum over every byte of the model and the optimizer's states."""
    import torch

    from keepstep.checkpoint import native

    found = 0
    tensors = [*state["model"].state_dict().values()]
    for per_parameter in state["optimizer"].state_dict()["state"].values():
        tensors += [value for value in per_parameter.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        found = native.checksum(tensor.detach().contiguous().view(-1).numpy(), found)
    return found


def main() -> None:
    import torch
    import torch.distributed as dist

    import keepstep.checkpoint

    folder = Path(sys.argv[1])
    steps, run, every = map(int, sys.argv[2:5])
    pause_s = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, incarnation = dist.get_rank(), int(os.environ.get("KEEPSTEP_INCARNATION", "0"))
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(64, 1024),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(1024, 1024),
            torch.nn.Linear(1024, 1),
        ),
        find_unused_parameters=True,  # keeps the buckets, and so the order of sums, the same after a restart
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    state = {
        "model": model,
        "optimizer": optimizer,
        "data": data.get_state(),
        "random": keepstep.checkpoint.RandomState(),
    }
    mark = Mark(folder / f"mark-{rank}")
    ledger = (folder / f"ledger-{rank}").open("a", buffering=1)

    def note(what: str, step: int, **more: Any) -> None:
        ledger.write(
            json.dumps(
                {
                    "what": what,
                    "run": run,
                    "incarnation": incarnation,
                    "step": step,
                    "unix_s": time.time(),
                    **more,
                }
            )
            + "\n"
        )

    mark.put(Phase.RESTORE, incarnation)
    start = keepstep.checkpoint.load(state)
    mark.put(Phase.TRAIN, start or 0)
    data.set_state(state["data"])
    note("resumed", start or 0, found=start is not None, sum=fingerprint(state))
    saved, step, over = 0, (start or 0) - 1, torch.zeros(1)
    with (folder / f"loss-{rank}").open("a", buffering=1) as losses:
        for step in range(start or 0, steps):
            x = torch.randn(8, 64, generator=data)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            if saved:
                note("still", step, same=fingerprint(state) == saved)
            mark.put(Phase.STEP, step)
            optimizer.step()
            mark.put(Phase.TRAIN, step)
            if saved:
                note("sealed", step)  # the optimizer has waited for it
            losses.write(f"{step} {loss.item().hex()}\n")
            optimizer.zero_grad()
            state["data"] = data.get_state()
            saved = fingerprint(state)
            note("saved", step + 1, sum=saved)
            mark.put(Phase.SAVE, step + 1)
            more = {"persist": True} if every and (step + 1) % every == 0 else {}
            keepstep.checkpoint.save(state, step + 1, **more)
            mark.put(Phase.SEAL, step + 1)
            if pause_s:
                time.sleep(pause_s)
                over.fill_((folder / "end").exists())
                dist.all_reduce(over)
            if over:
                break
    note("ended", step + 1)
    keepstep.checkpoint.wait()
    dist.destroy_process_group()
    # torch destroys the group with the last model, holding the GIL, and joins a thread of Gloo that may need the GIL
    # to let go of its last tensors: it gets it now.
    time.sleep(0.1)


if __name__ == "__main__":
    main()
