"""The functions that a training script calls. Each process has one seat in its job and one set of snapshots."""

from __future__ import annotations

import atexit
import os
import random
import sys
from typing import Any, cast

import numpy as np
import torch

from keepstep import capture
from keepstep.checkpoint.memory.cache_server import ADDRESS, NO_CACHE
from keepstep.checkpoint.snapshot import NoSnapshots, Seat, Snapshots
from keepstep.checkpoint.storage.cadence import Storing
from keepstep.core.errors import CheckpointError
from keepstep.worker import milestones as _milestones

_open: list[Snapshots | NoSnapshots] = []
_told: list[bool] = []
_left: list[torch.UntypedStorage] = []  # by the incarnation before, for what the next one restores


def save(state: dict[Any, Any], step: int, *, overlap: bool = True, persist: bool | None = None) -> None:
    """Take a snapshot of ``state`` as it is now, after ``step`` steps. Called by all ranks with the same steps.

    With ``overlap`` parameters and optimizer states are copied during the next forward and backward and waited for
    before the optimizer steps; whatever else changes them must call `wait` first. Without, all is copied on return.

    ``persist`` has the snapshot brought to storage (``keepstep run --checkpoint-dir``), behind training; None: when it
    is due (``--checkpoint-every``). Ranks give the same.

    Raises:
        CheckpointError: the state cannot be saved or does not fit into the node's memory; ``persist`` without storage.
    """
    snapshots = _snapshots()
    _left.clear()
    if snapshots:
        snapshots.save(state, step, overlap=overlap, persist=persist)


def load(state: dict[Any, Any]) -> int | None:
    """Bring the newest snapshot that all ranks can have into ``state``. Called by all ranks, once, before training.

    It comes from the node's cache, else from another node's backup or from storage, as the node's agent finds it.

    Gives the step that it was saved with; None when there is none, and ``state`` is as it was. Tensors and models are
    filled in place, other objects get ``load_state_dict``, plain values are replaced.

    Raises:
        CheckpointError: there are snapshots, but none that all ranks can have; it cannot be told whether there are
            any; or the state has another structure.
    """
    snapshots = _snapshots()
    try:
        step = snapshots.load(state) if snapshots else None
    finally:
        _left.clear()
    _milestones.reached("state", step or 0)
    if step and (probe := capture.current()):
        probe.recorder.begins_at(step)
    return step


def register(state: dict[Any, Any]) -> None:
    """Get memory for snapshots of ``state`` now, so that the first `save` need not.

    Raises:
        CheckpointError: the state cannot be saved, or does not fit into the node's memory.
    """
    snapshots = _snapshots()
    if snapshots:
        snapshots.register(state)


def wait() -> None:
    """Return when the last snapshot is sealed: from then on it outlives this process."""
    for snapshots in _open:
        snapshots.wait()


def keep_memory() -> None:
    """Keep the memory of what was saved last, without its owners, for the next `load`."""
    _left[:] = [one for snapshots in _open for one in snapshots.memory()]


def forget() -> None:
    """Let go of the snapshots of an incarnation that is over; the next one's are opened anew. The cache keeps them."""
    while _open:
        snapshots = _open.pop()
        atexit.unregister(snapshots.end)
        snapshots.close()


class RandomState:
    """The random states of Python, numpy and torch, CUDA's included, to be put into a state."""

    def state_dict(self) -> dict[str, Any]:
        """All of them now."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all of them."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])


def _snapshots() -> Snapshots | NoSnapshots | None:
    if _open:
        return _open[0]
    address, why = os.environ.get(ADDRESS), os.environ.get(NO_CACHE)
    if not address and not why:
        if not _told:
            _told.append(True)
            print(
                "keepstep: no checkpoint is kept in memory: this process was not started by `keepstep run`",
                file=sys.stderr,
                flush=True,
            )
        return None
    seat = _seat()
    elsewhere = not seat.one_node and "KEEPSTEP_RING" in os.environ
    try:
        if not address:
            raise CheckpointError(why or "")
        _open.append(Snapshots(address, seat, _gather, storing=_storing(), elsewhere=elsewhere, left=_left))
    except CheckpointError as error:
        _open.append(NoSnapshots(str(error), _gather))
    atexit.register(_open[0].end)
    return _open[0]


def _seat() -> Seat:
    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    return Seat(
        rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        incarnation=number("KEEPSTEP_INCARNATION", 0),
        layout=os.environ.get("KEEPSTEP_LAYOUT", ""),
        elastic="KEEPSTEP_ELASTIC" in os.environ,
    )


def _storing() -> Storing | None:
    where, every = (
        os.environ.get("KEEPSTEP_CHECKPOINT_DIR"),
        os.environ.get("KEEPSTEP_CHECKPOINT_EVERY", "auto"),
    )
    if not where:
        return None
    failures_per_day = float(os.environ.get("KEEPSTEP_FAILURES_PER_DAY", 1.0))
    return Storing(where, None if every == "auto" else int(every), failures_per_day)


def _gather(row: list[int]) -> list[list[int]]:
    """What every rank gives, over the default process group. Plain numbers: nothing is unpickled."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return [row]
    import torch.distributed as dist

    if not dist.is_initialized():
        raise CheckpointError("the ranks cannot agree on a checkpoint: call init_process_group() before")
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    own = torch.tensor(row, dtype=torch.int64, device=device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    cast("Any", dist).all_gather(rows, own)
    return [cast("Any", found).tolist() for found in rows]
