"""Shares of micro-batches for DeepSpeed: a slow rank accumulates gradients over fewer of them.

The engine divides each loss by the configured number of accumulation steps, and its ranks reduce gradients at a
boundary that the caller may set. So each rank may reach the boundary after a number of micro-batches of its own: the
sum over its micro-batches, divided by the configured number and averaged over ranks, is the mean over all
micro-batches, however these are shared out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from keepstep.session import Session

_REDUCES_EACH = 2  # the lowest ZeRO stage that reduces gradients in each micro-batch


def microbatches(session: Session, model_engine: Any, *, at_most: int | None = None) -> Iterator[int]:
    """The numbers of the micro-batches that this rank computes in this step; called in the body of ``session.steps``.

    For each the caller runs forward, ``model_engine.backward(loss)`` and ``model_engine.step()``, as ever. A step has
    ``gradient_accumulation_steps`` micro-batches for each rank, as DeepSpeed was configured.

    Raises:
        ValueError: the engine's ranks communicate in each micro-batch (ZeRO stage 2 or 3), the engine drives its own
            pipeline or leaves gradient accumulation to the caller, or `keepstep.Session.share` refuses.
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
