"""Which rank, link or stage is to blame? Pure: numpy and core only, no I/O, no clock."""

# ruff: noqa: F401
# pyright: reportUnusedImport=false
from keepstep.locate._held_by_host import without_hidden_waits
from keepstep.locate._launched import (
    KINDS,
    UNTOLD,
    first_open,
    locate_by_launched,
    told_counts,
    waiting_in,
    wants_launched,
    worded,
)
from keepstep.locate._paths import with_probes
from keepstep.locate._steadiness import slow_steps
from keepstep.locate.blamed_by_words import blame_by_words
from keepstep.locate.call_gaps import CallStep, boundaries, locate_by_gaps, split
from keepstep.locate.clock_offsets import SampledClocks, estimate_offsets
from keepstep.locate.crash import locate_crash
from keepstep.locate.hang import locate_hang
from keepstep.locate.infer import declared_layout, infer_layout, layout_of
from keepstep.locate.mismatch import calls_differ
from keepstep.locate.slow import locate_slow
from keepstep.locate.slow_blocks import blocks_wanted, sharpen
from keepstep.locate.waits import hidden_waits, waits_recorded, waits_seen
from keepstep.locate.what_if import WhatIf, step_graphs, what_if
