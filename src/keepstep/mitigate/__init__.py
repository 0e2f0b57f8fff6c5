"""Which remedy of a slowdown pays: pure functions from measurements to decisions."""

from keepstep.mitigate.allocation import allocate_microbatches
from keepstep.mitigate.consolidation import best_consolidation, consolidation_of
from keepstep.mitigate.planner import Planner, Remedy
from keepstep.mitigate.replicas import Replicas, measure, rank_seconds
from keepstep.mitigate.topology import Exchange, best_exchange
from keepstep.mitigate.volumes import volumes

__all__ = [
    "Exchange",
    "Planner",
    "Remedy",
    "Replicas",
    "allocate_microbatches",
    "best_consolidation",
    "best_exchange",
    "consolidation_of",
    "measure",
    "rank_seconds",
    "volumes",
]
