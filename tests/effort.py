"""How much chance a test explores: the usual share in ``make test``, ten times as much in ``make test-long``."""

from __future__ import annotations

import os

EFFORT = int(os.environ.get("KEEPSTEP_EFFORT", "1"))
"""The factor; ``make test-long`` sets 10."""


def many(count: int) -> int:
    """``count`` examples or seeds, times the effort of this run."""
    return count * EFFORT
