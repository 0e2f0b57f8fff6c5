"""Runs a script as it is, its operators computing: ``python unmodified.py SCRIPT [ARGUMENT ...]``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from benchmarks.stand_in.device import compute_values

if __name__ == "__main__":
    compute_values()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
