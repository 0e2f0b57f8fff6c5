"""Which rank, link or stage is to blame? Pure: numpy and core only, no I/O, no clock."""

from keepstep.locate.clocks import ClockOffsets, NodeClock, estimate_offsets
from keepstep.locate.crash import locate_crash
from keepstep.locate.hang import locate_hang
from keepstep.locate.infer import GroupRole, InferredLayout, declared_layout, infer_layout
from keepstep.locate.slow import locate_slow
from keepstep.locate.what_if import StepGraph, WhatIf, step_graphs, what_if

__all__ = [
    "ClockOffsets",
    "GroupRole",
    "InferredLayout",
    "NodeClock",
    "StepGraph",
    "WhatIf",
    "declared_layout",
    "estimate_offsets",
    "infer_layout",
    "locate_crash",
    "locate_hang",
    "locate_slow",
    "step_graphs",
    "what_if",
]
