"""The campaign of killed processes and failing storage on one machine: see ``processes.py``."""

from __future__ import annotations

import sys

from benchmarks.checkpoint_faults.processes import main

if __name__ == "__main__":
    sys.exit(main())
