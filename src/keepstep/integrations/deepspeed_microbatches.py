"""Shares of micro-batches for DeepSpeed: a slow rank accumulates over fewer. Its engine comes from the caller.

The engine takes each loss over the accumulation steps that it was configured with, and its ranks reduce gradients at
a boundary that the caller may set. So ranks may come to it after as many micro-batches as each has got: their sum over
the configured number, averaged over ranks, is the mean over all micro-batches, however these are shared out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from keepstep.session import Session

_REDUCES_EACH = 2  # ZeRO stage from which on gradients are reduced in each micro-batch


def microbatches(session: Session, model_engine: Any, *, at_most: int | None = None) -> Iterator[int]:
    """The numbers of those of the step's micro-batches that this rank computes, in the body of ``session.steps``.

    For each: forward, ``model_engine.backward(loss)`` and ``model_engine.step()``, as ever. A step has as many as
    DeepSpeed was configured with: ``gradient_accumulation_steps`` of each rank.

    Raises:
        ValueError: the engine's ranks meet in each micro-batch (ZeRO stage 2 or 3), it drives its own pipeline, or it
            leaves gradient accumulation to the caller; or see `keepstep.Session.share`.
    """
    if why := _objection(model_engine):
        raise ValueError(f"micro-batches of this DeepSpeed engine cannot be shared out unequally: {why}")
    group = model_engine.data_parallel_group
    replicas = dist.get_world_size(group)
    count = model_engine.gradient_accumulation_steps() * replicas
    own = session.share(count, dist.get_rank(group), replicas, at_most=at_most)
    for number in own:
        model_engine.set_gradient_accumulation_boundary(number == own[-1])
        yield number


def _objection(engine: Any) -> str:
    if (stage := engine.zero_optimization_stage()) >= _REDUCES_EACH:
        return f"ZeRO stage {stage} reduces gradients in each of them, so its ranks would wait for each other for ever"
    if hasattr(engine, "train_batch"):
        return "a PipelineEngine runs as many as it was configured with"
    if not getattr(engine, "managed_gradient_accumulation", lambda: True)():
        return "managed_gradient_accumulation is off, so step() ends the accumulation wherever it is called"
    return ""
