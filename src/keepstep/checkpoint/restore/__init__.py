"""Restoring a training: the ranks agree on a step and its source, then fill their tensors from the snapshot."""
