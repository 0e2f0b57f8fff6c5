"""Snapshots beyond the run: when, where and how they are written to storage and read again."""
