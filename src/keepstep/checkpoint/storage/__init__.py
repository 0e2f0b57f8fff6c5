"""Checkpoints on storage, which outlive the run: when they are written, in which format, and how they are read."""
