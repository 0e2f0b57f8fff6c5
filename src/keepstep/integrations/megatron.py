"""Shares of micro-batches for megatron-core: the calculator of a slow replica returns fewer of them.

Megatron's schedules run as many micro-batches as the calculator says, on each rank independently, and average the
losses of those that the replica ran. With unequal shares a factor on the gradients' scale turns this into the mean over
the micro-batches of all replicas. With ``calculate_per_token_loss`` no factor is needed.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from keepstep.session import Session


class MicroBatches:
    """The micro-batches of one replica, on one of its ranks.

    Args:
        session: the session of the training.
        config: the model's `TransformerConfig`; its ``grad_scale_func`` is wrapped, so it must be set before.
        replica: number of the replica that this rank is part of (its data-parallel rank).
        replicas: number of replicas (the data-parallel size).
        multiple_of: each share is a multiple of this; for an interleaved schedule, the pipeline's size.
        at_most: the largest share that fits into memory.
    """

    def __init__(
        self,
        session: Session,
        config: Any,
        replica: int,
        replicas: int,
        *,
        multiple_of: int = 1,
        at_most: int | None = None,
    ) -> None:
        self._session = session
        self._share = partial(
            session.share, replica=replica, replicas=replicas, multiple_of=multiple_of, at_most=at_most
        )
        self._factor = 1.0
        if not config.calculate_per_token_loss:
            inner: Callable[[Any], Any] | None = config.grad_scale_func

            def scaled(loss: Any) -> Any:
                return (inner(loss) if inner else loss) * self._factor

            config.grad_scale_func = scaled

    def share(self) -> range:
        """The numbers of the micro-batches that this replica computes in this step; sets `get_num_microbatches`.

        Called in the body of ``session.steps``, after `update_num_microbatches`.

        Raises:
            ValueError: there is no calculator yet, or `keepstep.Session.share` refuses.
        """
        module: Any = import_module("megatron.core.num_microbatches_calculator")
        calculator: Any = module._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        if calculator is None:
            raise ValueError(
                "megatron-core has no calculator of micro-batches yet: call init_num_microbatches_calculator first"
            )
        samples = calculator.get_current_running_global_batch_size()
        own = self._share(samples // calculator.get_micro_batch_size())
        calculator.num_micro_batches = len(own)
        self._factor = len(own) * self._session.weight
        return own
