"""The line of a seed in the results."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks._report import code_commit


def row_of(plan: Any, node: str, seen: Any, wrong: Sequence[str], began_s: float) -> dict[str, Any]:
    """What was drawn, found and judged of a seed.

    Args:
        plan: a dataclass with the ``seed``.
        node: the one that was hurt.
        seen: a dataclass of what was found, with ``losses``.
        wrong: why the seed failed; empty where it passed.
        began_s: when it began (CLOCK_MONOTONIC, seconds).
    """
    found = {key: value for key, value in asdict(seen).items() if key not in ("losses", "reference")}
    return {
        "seed": plan.seed,
        "commit": code_commit(),
        "passed": not wrong,
        "why": list(wrong),
        "plan": asdict(plan),
        "node": node,
        "found": found,
        "steps_compared": len(seen.losses),
        "load": round(os.getloadavg()[0], 1),
        "wall_s": round(time.monotonic() - began_s, 1),
    }


def seeds_in(text: str) -> list[int]:
    """The numbers of ``3,17,40-119``."""
    ranges = [one.partition("-") for one in text.split(",")]
    return [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]
