"""Jobs in virtual time, with known faults: what a run of any size would have recorded. Imports nothing that judges."""

from benchmarks.simulate._faults import Fault
from benchmarks.simulate._replay import BlockTimes
from benchmarks.simulate._schedules import SCHEDULES, Block, Schedule, blocks_of
from benchmarks.simulate.workload import Durations, Run, Workload

__all__ = [
    "SCHEDULES",
    "Block",
    "BlockTimes",
    "Durations",
    "Fault",
    "Run",
    "Schedule",
    "Workload",
    "blocks_of",
]
