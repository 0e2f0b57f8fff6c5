"""Checkpoints in memory: a rank's state kept in its node's cache, outliving the rank.

``header`` and ``state`` say what a snapshot is; ``cache`` keeps it, ``snapshot`` makes it, ``restore`` brings it back.
See ``docs/design/checkpoint.md``.
"""
