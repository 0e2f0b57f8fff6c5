"""Shares of micro-batches for torch.distributed.pipelining: the pipeline of a slow replica gets fewer of them.

A schedule of torch runs the number of micro-batches that it was made for, and its stages keep buffers for that many. So
when shares change, a new schedule is made for the same stages. In its first step the stages agree anew on what they
send each other. That runs the stages' forward, in which DDP may communicate with the other replicas; therefore all
replicas make a new schedule in the same step, also those whose share stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

if TYPE_CHECKING:
    from keepstep.session import Session


class _Schedule(Protocol):
    scale_grads: bool


_Made = TypeVar("_Made", bound=_Schedule)
_MEETING = FSDPModule, FullyShardedDataParallel, torch.nn.SyncBatchNorm


class Pipeline(Generic[_Made]):
    """The pipeline of one replica, on one of its ranks.

    Stages may be plain modules or wrapped in DDP. With FSDP, ranks of all replicas communicate in each micro-batch, so
    shares stay equal.

    Args:
        session: the session of the training.
        make: makes a schedule for a number of micro-batches, with ``scale_grads=False`` and a loss that is multiplied
            by ``session.weight``; called again for the same stages when shares change.
        count: micro-batches of a step, of all replicas together.
        replica: number of the replica that this rank is part of, from 0.
        replicas: number of replicas (the data-parallel size).
        multiple_of: each share is a multiple of this. Give the number of stages for `Schedule1F1B`, which runs no fewer
            micro-batches than it has stages, and for interleaved schedules, which need whole rounds.
        at_most: the largest share that fits into memory.
    """

    def __init__(
        self,
        session: Session,
        make: Callable[[int], _Made],
        count: int,
        replica: int,
        replicas: int,
        *,
        multiple_of: int = 1,
        at_most: int | None = None,
    ) -> None:
        self._session, self._make = session, make
        self._share = partial(
            session.share, count, replica, replicas, multiple_of=multiple_of, at_most=at_most
        )
        self._made: tuple[tuple[int, int], _Made] | None = None
        # Whether ranks of different replicas may run unequal shares; unknown before `share`.
        self._apart = False

    def share(self) -> tuple[range, _Made]:
        """The numbers of the micro-batches that this replica computes in this step, and a schedule for that many.

        Called once in the body of ``session.steps``.

        Raises:
            ValueError: the schedule scales gradients itself, or `keepstep.Session.share` refuses.
        """
        own = self._share(movable=self._apart)
        now = self._session.division, len(own)
        if self._made is None or self._made[0] != now:
            made = self._make(len(own))
            if made.scale_grads:
                raise ValueError(
                    "the schedule has scale_grads=True: it would average over its replica's own micro-batches, however "
                    "many; give it scale_grads=False, and multiply the loss by session.weight"
                )
            self._made = now, made
            self._apart = not any(isinstance(one, _MEETING) for one in _modules(made))
        return own, self._made[1]


def _modules(schedule: Any) -> Iterator[torch.nn.Module]:
    """All modules of a schedule's stages on this rank."""
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        yield from stage.submod.modules()
