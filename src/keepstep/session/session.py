"""A training's few lines for going on within one step. Needs torch; see ``docs/howto/session.md``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from keepstep import checkpoint
from keepstep.core.errors import CheckpointError
from keepstep.session import groups
from keepstep.session.staying import Left, Staying, staying

P = ParamSpec("P")
T = TypeVar("T")


class Session:
    """One process's part in one incarnation of the training.

    Attributes:
        rank: of this process.
        world_size: processes of the job.
        incarnation: how often the job has begun again, from 0.
        state: what is saved after each step, by name: what `restore` was given, and ``random``.
    """

    def __init__(self, staying: Staying | None = None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.incarnation = int(os.environ.get("KEEPSTEP_INCARNATION", "0"))
        self.state: dict[str, Any] = {}
        self._staying = staying

    def restore(self, **state: Any) -> int:
        """Bring back the newest step that all ranks can have, into ``state``; returns how many steps are done.

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
        return checkpoint.load(self.state) or 0

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
        try:
            for step in range(start, total):
                yield step
                if self._staying and self._staying.is_over:  # what a broken step has left is not to be saved
                    raise Left
                checkpoint.save(self.state, step + 1)
            checkpoint.wait()
        finally:
            if not (self._staying and self._staying.is_over):
                groups.until_quiet()  # groups may go next: torch joins their threads with the interpreter locked


def resilient(train: Callable[Concatenate[Session, P], T]) -> Callable[P, T]:
    """Make ``train(session, ...)`` a function without the session, run anew in each incarnation of the job.

    In the same process where that can be: what ``train`` made and did is dropped then, wherever it was.
    """

    @functools.wraps(train)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        stays = staying()
        if stays is None:
            return train(Session(), *args, **kwargs)
        return stays.run(lambda: train(Session(stays), *args, **kwargs))

    return run
