"""Shares of micro-batches for megatron-core: a slow replica's calculator says fewer. Needs megatron-core.

Its schedules run as many micro-batches as they are told, each rank for itself, and take the mean of the losses of
those that the replica ran: with unequal shares a factor on the gradients' scale makes it the mean over all replicas'
micro-batches again. Where losses are by token (``calculate_per_token_loss``) that is so already.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from keepstep.session import Session


class MicroBatches:
    """One replica's, as one of its ranks sees it.

    Args:
        session: the training's.
        config: the model's, a `TransformerConfig`; its ``grad_scale_func`` is wrapped, so it must be set before.
        replica: that this rank is part of: its data-parallel rank.
        replicas: how many there are: the data-parallel size.
        multiple_of: what each share has to be a multiple of: the pipeline's size where its schedule is interleaved.
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
        self._replica, self._replicas = replica, replicas
        self._multiple_of, self._at_most = multiple_of, at_most
        self._factor = 1.0
        if not config.calculate_per_token_loss:
            inner: Callable[[Any], Any] | None = config.grad_scale_func

            def scaled(loss: Any) -> Any:
                return (inner(loss) if inner else loss) * self._factor

            config.grad_scale_func = scaled

    def share(self) -> range:
        """The numbers of the step's micro-batches that this replica computes; `get_num_microbatches` says how many.

        Called in the body of ``session.steps``, after `update_num_microbatches`.

        Raises:
            ValueError: there is no calculator yet, or see `keepstep.Session.share`.
        """
        module: Any = import_module("megatron.core.num_microbatches_calculator")
        calculator: Any = module._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        if calculator is None:
            raise ValueError(
                "megatron-core has no calculator of micro-batches yet: call init_num_microbatches_calculator first"
            )
        samples = calculator.get_current_running_global_batch_size()
        own = self._session.share(
            *(samples // calculator.get_micro_batch_size(), self._replica, self._replicas),
            multiple_of=self._multiple_of,
            at_most=self._at_most,
        )
        calculator.num_micro_batches = len(own)
        self._factor = len(own) * self._session.weight
        return own
