"""The probe inside every worker, which records its collective operations and phases into the rank's ring.

:func:`install` is called at the end of ``import torch`` (see ``keepstep._autoload``). Nothing in here blocks the user's
step or raises into it; what cannot be recorded is left out and counted.
"""

from __future__ import annotations

from keepstep.capture.probe import Probe, current, install

__all__ = ["Probe", "current", "install"]
