"""The few lines by which a training goes on after a failure. Needs torch; see ``docs/howto/session.md``."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from hashlib import blake2b
from operator import index
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from keepstep import capture, checkpoint
from keepstep.core.errors import CheckpointError
from keepstep.core.microbatch_shares import objection
from keepstep.session import groups
from keepstep.session.shares import Shares
from keepstep.session.staying import Left, Staying, staying
from keepstep.worker import milestones as _milestones

P = ParamSpec("P")
T = TypeVar("T")


class Session:
    """One process's part in one incarnation of the training.

    Attributes:
        rank: number of this process in the job.
        world_size: number of processes in the job.
        incarnation: how often the job has begun again.
        state: what is saved after each step, by name: what `restore` was given, and ``random``.
        step: the step that `steps` is at; -1 before the first.
        weight: factor for the loss of each of the step's `microbatches`. With it, the gradients that replicas average
            are those of the mean over the global batch, whatever share each replica has.
    """

    def __init__(self, staying: Staying | None = None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.incarnation = int(os.environ.get("KEEPSTEP_INCARNATION", "0"))
        self.state: dict[str, Any] = {}
        self._restored = 0
        self._staying = staying
        self.step = -1
        self.weight = 1.0
        self._shares: Shares | None = None
        self._apart: bool | None = None  # whether ranks were seen to compute micro-batches without operations
        self._should_be: bool | None = None  # whether they should, by the model's kind

    def restore(self, **state: Any) -> int:
        """Bring back the newest step that all ranks can have into ``state``; returns how many steps are done.

        ``state``: models, optimizers, data and whatever else has ``state_dict`` and ``load_state_dict``, tensors and
        plain values. The random states of Python, numpy, torch and CUDA are added. Called by all ranks, once, after
        ``init_process_group``.

        Raises:
            CheckpointError: there are snapshots, but none that all ranks can have; or the state does not fit them.
        """
        if self.state:
            raise CheckpointError(
                "this session was restored already: restore() is called once, with all of the state"
            )
        self.state = {"random": checkpoint.RandomState(), **state}
        self._restored = checkpoint.load(self.state) or 0
        return self._restored

    def steps(self, start: int, total: int) -> Iterator[int]:
        """Steps ``start`` to ``total - 1``; the state is saved when the body of each is over.

        Parameters and optimizer states are copied behind the next forward and backward. A body that leaves the loop
        (break, return, an exception) leaves its step unsaved.

        Raises:
            CheckpointError: there is nothing to save; or the state cannot be saved.
        """
        if not self.state:
            raise CheckpointError(
                "there is nothing to save: call session.restore(model=…, optimizer=…) before steps()"
            )
        if start != self._restored and self.step < 0 and (probe := capture.current()):
            probe.recorder.begins_at(start)  # the script has restored its own state, and numbers steps itself
        try:
            for step in range(start, total):
                self.step = step
                yield step
                if self._staying and self._staying.is_over:  # the state of a broken step must not be saved
                    raise Left
                if probe := capture.current():
                    probe.end_step()
                _milestones.reached("step")
                checkpoint.save(self.state, step + 1)
            checkpoint.wait()
            if self._shares is not None:
                self._shares.finish()
        finally:
            if not (self._staying and self._staying.is_over):
                groups.until_quiet()  # groups may be destroyed next, and torch joins their threads with the GIL held

    def share(
        self,
        count: int,
        replica: int | None = None,
        replicas: int | None = None,
        *,
        multiple_of: int = 1,
        at_most: int | None = None,
        movable: bool = True,
    ) -> range:
        """The numbers of those of the step's ``count`` micro-batches that this rank's replica of the model computes.

        Called in the body of `steps`, by all ranks alike but for ``replica``. Together the replicas compute 0 to
        ``count - 1``. Their shares differ by ``multiple_of`` at most, unless one of them is slow and keepstep may act
        on that.

        Args:
            count: micro-batches of all replicas together.
            replica: number, from 0, of the replica that this rank is part of; without it, and ``replicas``, each rank
                is a replica.
            replicas: how many replicas there are: the data-parallel size.
            multiple_of: what each share has to be a multiple of, for a pipeline whose schedule asks for that.
            at_most: the largest share that fits into memory.
            movable: whether shares may become unequal. They may not where ranks of several replicas meet in each
                micro-batch, as in an FSDP that shards over replicas. The first rank's value counts.

        Raises:
            ValueError: there are too few micro-batches for the replicas, or too many; or it is called elsewhere.
        """
        if replica is None and replicas is None:
            replica, replicas = self.rank, self.world_size
        if replica is None or replicas is None:
            raise ValueError("share() is told both replica= and replicas=, or neither")
        if self.step < 0:
            raise ValueError("micro-batches are shared out in the body of: for step in session.steps(...)")
        if at_most is not None and at_most < 1:
            raise ValueError(f"at_most is {at_most}: each replica computes one micro-batch or more")
        numbers = [index(one) for one in (count, replica, replicas, multiple_of, at_most or 0)]
        count, replica, replicas, multiple_of, most = numbers
        if why := objection(count, replicas, multiple_of, most):
            raise ValueError(why)
        if not 0 <= replica < replicas:
            raise ValueError(f"replica {replica} is none of 0 to {replicas - 1}")
        if self._shares is None:
            self._shares = Shares(self.rank, self.incarnation)
        self.weight = replicas / count
        return self._shares.of(self.step, count, replica, replicas, multiple_of, most, movable)

    @property
    def division(self) -> int:
        """The number of the newest order that divided micro-batches anew; it changes on all ranks in the same step.

        What all replicas have to build together, such as a pipeline's schedule, is built again when it changes.
        """
        return self._shares.number if self._shares is not None else 0

    def microbatches(
        self, count: int, model: Any = None, *, seed: int = 0, at_most: int | None = None
    ) -> Iterator[int]:
        """The numbers of those of the step's ``count`` micro-batches that this rank computes.

        All ranks are data-parallel, so that each has a `share`. Shares are equal while ranks meet in each micro-batch,
        as FSDP's do. A `DistributedDataParallel` ``model`` averages gradients in the last backward only. Python's,
        numpy's and torch's random generators are seeded before each micro-batch with ``seed``, the step and its number,
        so that it draws the same numbers on whatever rank, and once more after the last, alike on all ranks.

        Raises:
            ValueError: there are fewer micro-batches than ranks, or more than ``at_most`` for each.
        """
        if self._should_be is None:
            self._should_be = _is_apart(model)
        movable = self._should_be if self._apart is None else self._apart
        own = self.share(count, at_most=at_most, movable=movable)
        for number in own:
            _begin_randomness(f"{seed}/{self.step}/{number}")
            alone = number < own[-1] and hasattr(model, "no_sync")
            begun = groups.calls()
            with model.no_sync() if alone else nullcontext():
                yield number
            if own[0] < number < own[-1]:  # in the first and the last, ranks of a DDP meet in any case
                self._apart = self._apart is not False and begun is not None and groups.calls() == begun
        _begin_randomness(f"{seed}/{self.step}")


def _is_apart(model: Any) -> bool:
    """Whether ranks meet for this model in a step's first and last micro-batch only."""
    return isinstance(model, DistributedDataParallel) and not any(
        isinstance(one, torch.nn.SyncBatchNorm) for one in model.modules()
    )


def _begin_randomness(text: str) -> None:
    seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    cast("Any", torch).manual_seed(seed)


def resilient(train: Callable[Concatenate[Session, P], T]) -> Callable[P, T]:
    """Make ``train(session, ...)`` a function without the session, which is run again in each incarnation of the job.

    Where possible it is run again in the same process. It is left by an exception then, and all that it has made is
    dropped.
    """

    @functools.wraps(train)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        stays = staying()
        if stays is None:
            return train(Session(), *args, **kwargs)
        return stays.run(lambda: train(Session(stays), *args, **kwargs))

    return run
