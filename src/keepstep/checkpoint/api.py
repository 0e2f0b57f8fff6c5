"""The functions that a training script calls to save and load its state. Each process has one set of snapshots."""

from __future__ import annotations

import atexit
import os
import random
import sys
from typing import Any, cast

import numpy as np
import torch

from keepstep import capture
from keepstep.capture import death
from keepstep.checkpoint.memory.cache_server import ADDRESS, NO_CACHE
from keepstep.checkpoint.restore.resume import SaidByAnother, refuse
from keepstep.checkpoint.snapshot import Snapshots, Worker, talk
from keepstep.checkpoint.storage.cadence import Storing
from keepstep.core.errors import CheckpointError, MisfitError
from keepstep.core.log_lines import one_line
from keepstep.worker import milestones as _milestones

_open: list[Snapshots] = []  # empty until the first use, then the one object of this process
_no_cache: list[str] = []  # the reason why this node has no cache, once it is known
_told: list[bool] = []
_left: list[torch.UntypedStorage] = []  # memory of the last incarnation's state, to restore into


def save(state: dict[Any, Any], step: int, *, overlap: bool = True, persist: bool | None = None) -> None:
    """Take a snapshot of ``state`` as it is now, after ``step`` steps. Called by all ranks with the same steps.

    With ``overlap`` parameters and optimizer states are copied during the next forward and backward, and the optimizer
    does not step before they are; whatever else changes them must call `wait` first. Without ``overlap`` everything is
    copied before the call returns.

    ``persist`` brings the snapshot to storage (``keepstep run --checkpoint-dir``) while training goes on; None does so
    when it is due (``--checkpoint-every``). All ranks give the same value.

    Where ranks do not save the same steps, the node's memory is too small, or collectives of NCCL may be aborted unseen
    (`unseen_aborts.why_unseen`), nothing is kept: that is said once, and training goes on.

    Raises:
        CheckpointError: the state cannot be saved; ``persist`` without storage; ``step`` is not above the last one.
    """
    snapshots = _snapshots(collective=False)
    _left.clear()
    death.go_on()
    if snapshots:
        snapshots.save(state, step, overlap=overlap, persist=persist)


def load(state: dict[Any, Any]) -> int | None:
    """Bring the newest snapshot that all ranks can have into ``state``. Called by all ranks, once, before training.

    The snapshot comes from the node's cache, else from another node's backup or from storage, as the agent finds it.

    Returns the step that it was saved with, or None when there is no snapshot, and then ``state`` is as it was. Tensors
    and models are filled in place, other objects get ``load_state_dict``, plain values are replaced.

    Raises:
        CheckpointError: there are snapshots, but none that all ranks can have; a source that may have one does not
            answer; or the state has another structure.
    """
    snapshots = _snapshots()
    try:
        step = snapshots.load(state) if snapshots else None
    except CheckpointError as error:
        death.foresee(_left_of(error))
        raise _Refused(str(error)) from None
    finally:
        _left.clear()
    death.go_on()
    _milestones.reached("state", step or 0)
    if step and (probe := capture.current()):
        probe.recorder.begins_at(step)
    return step


def register(state: dict[Any, Any]) -> None:
    """Reserve memory for snapshots of ``state`` now, so that the first `save` is faster.

    What does not fit into the node's memory is said in one line, as `save` does.

    Raises:
        CheckpointError: the state cannot be saved.
    """
    snapshots = _snapshots(collective=False)
    if snapshots:
        snapshots.register(state)


def wait() -> None:
    """Wait until the last snapshot is sealed: from then on it outlives this process."""
    for snapshots in _open:
        snapshots.wait()


def keep_memory() -> None:
    """Keep the memory of the state that was saved last for the next `load`, also after its owners are gone."""
    _left[:] = [one for snapshots in _open for one in snapshots.memory()]


def forget() -> None:
    """Unmap the snapshots of an incarnation that is over, which the cache keeps; the next one opens its own."""
    _no_cache.clear()
    while _open:
        snapshots = _open.pop()
        atexit.unregister(snapshots.end)
        snapshots.close()


class _Refused(CheckpointError, SystemExit):
    """A restore that was refused. One rank has said why, so a process that does not catch this ends without a word."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 1


def _left_of(error: CheckpointError) -> CheckpointError:
    """What is left for the launcher of a restore's refusal: what tells of another rank is nobody's own error."""
    if isinstance(error, MisfitError):  # what does not fit was said
        return MisfitError("the state or the number of ranks is not that of before")
    if isinstance(error, SaidByAnother):
        return SaidByAnother("another rank says why nothing is restored")
    return CheckpointError(f"nothing is restored: {one_line(str(error))}")


class RandomState:
    """An object for a state that saves and restores the random states of Python, numpy and torch, CUDA's included."""

    def state_dict(self) -> dict[str, Any]:
        version, words, following = random.getstate()
        return {
            "python": (version, np.array(words, dtype=np.uint32), following),  # one value to save, not 625
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, following = state["python"]
        random.setstate((version, tuple(map(int, words)), following))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])


def _snapshots(*, collective: bool = True) -> Snapshots | None:
    """The snapshots of this process; None without ``keepstep run``.

    Where the node has no cache, a ``collective`` call raises CheckpointError together with all ranks; any other call
    returns None.
    """
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
    worker = _worker()
    elsewhere = not worker.one_node and "KEEPSTEP_RING" in os.environ
    try:
        if _no_cache or not address:
            raise CheckpointError(_no_cache[0] if _no_cache else why or "")
        _open.append(
            Snapshots(
                address,
                worker,
                _gather,
                storing=_storing(),
                elsewhere=elsewhere,
                left=_left,
                collectives=_collectives,
                store=_store,
            )
        )
    except CheckpointError as error:
        _no_cache[:] = [str(error)]
        if collective:
            talk(refuse(_no_cache[0]), _gather)
        elif not _told:
            _told.append(True)
            print(f"keepstep: no checkpoint is kept: {_no_cache[0]}", file=sys.stderr, flush=True)
        return None
    atexit.register(_open[0].end)
    return _open[0]


def _worker() -> Worker:
    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    return Worker(
        rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        incarnation=number("KEEPSTEP_INCARNATION", 0),
        layout=os.environ.get("KEEPSTEP_LAYOUT", ""),
        elastic="KEEPSTEP_ELASTIC" in os.environ,
    )


def _storing() -> Storing | None:
    where = os.environ.get("KEEPSTEP_CHECKPOINT_DIR")
    every = os.environ.get("KEEPSTEP_CHECKPOINT_EVERY", "auto")
    if not where:
        return None
    failures_per_day = float(os.environ.get("KEEPSTEP_FAILURES_PER_DAY", 1.0))
    return Storing(where, None if every == "auto" else int(every), failures_per_day)


def _collectives() -> int | None:
    """How many collectives of the default group this rank has begun; None without one that counts them."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return None
    try:
        return dist.group.WORLD._get_sequence_number_for_group()
    except RuntimeError:
        return None


def _store() -> Any:
    """The store of the default group; None without one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def _gather(row: list[int]) -> list[list[int]]:
    """The rows of all ranks, by rank, over the default process group; as tensors, so that nothing is unpickled."""
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
