"""A pytest plugin (``-p tests.without_native``): the native parts cannot be loaded, as where they were not built."""

import sys

for part in ("ring", "capture", "checkpoint"):
    sys.modules[f"keepstep.{part}._native"] = None  # type: ignore[assignment]
