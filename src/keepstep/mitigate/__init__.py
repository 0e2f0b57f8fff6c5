"""Which remedy of a slowdown pays. Pure: measurements in, decisions out."""

from keepstep.mitigate.consolidation import best_consolidation, stage_seconds
from keepstep.mitigate.microbatches import allocate_microbatches
from keepstep.mitigate.planner import Planner, Remedy
from keepstep.mitigate.replicas import Replicas, measure
from keepstep.mitigate.topology import Exchange, best_exchange

__all__ = [
    "Exchange",
    "Planner",
    "Remedy",
    "Replicas",
    "allocate_microbatches",
    "best_consolidation",
    "best_exchange",
    "measure",
    "stage_seconds",
]
