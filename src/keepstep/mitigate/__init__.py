"""Which remedy pays, and how is it to be done? Pure: numpy, no torch, no I/O, no clock."""

from keepstep.mitigate.microbatches import allocate_microbatches

__all__ = ["allocate_microbatches"]
