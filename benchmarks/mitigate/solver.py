"""The solver part of the mitigation bench: cases, the same problem for MIP solvers, and a check of optimality.

    python -m benchmarks.mitigate.solver SOLVER GROUPS SEED

solves one case with cvxpy and prints ``{"took_s", "slowest", "status"}``: in a process of its own, since not every
solver keeps to a time limit. ``variance``: GREYHOUND's equation 1, with SCIP.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

SIZES = (16, 64, 512, 4096, 16384)
QUICK_SIZES = (16, 64, 512)  # of other solvers
EACH = 8  # micro-batches for each group, on average
PATIENCE_S = 30.0
_STARTS_S = 30.0  # for the imports and cvxpy's own work, which are not the solver's
VARIANCE = "variance"  # the objective of the paper
SOLVERS = {"HIGHS": "highspy", "GLPK_MI": "cvxopt", "SCIP": "pyscipopt", VARIANCE: "pyscipopt"}


def case(groups: int, seed: int) -> list[float]:
    """Seconds that each group takes for a micro-batch: a tenth of them is slow, by up to four times."""
    rng = random.Random(f"{groups}/{seed}")
    return [
        rng.lognormvariate(0.0, 0.02) * (rng.uniform(1.3, 4.0) if rng.random() < 0.1 else 1.0)
        for _ in range(groups)
    ]


def slowest(seconds: Sequence[float], shares: Sequence[int]) -> float:
    """What the slowest group takes."""
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def is_optimal(seconds: Sequence[float], total: int, shares: Sequence[int]) -> bool:
    """Whether these are shares, and no others are done sooner.

    Others would be done before ``slowest``: as many micro-batches as all groups can do before that, and one of each
    group at least, are too few.
    """
    if len(shares) != len(seconds) or sum(shares) != total or min(shares) < 1:
        return False
    limit = slowest(seconds, shares)
    if max(seconds) >= limit:
        return True  # a group's only micro-batch takes so long
    return sum(_before(limit, each) for each in seconds) < total


def _before(limit: float, each: float) -> int:
    """How many micro-batches are done strictly before ``limit``."""
    count = int(limit / each) + 1
    while count * each >= limit:
        count -= 1
    return count


def missing(solver: str) -> str:
    """Why it cannot be asked; "": it can."""
    absent = [name for name in ("cvxpy", SOLVERS[solver]) if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def ours(groups: int, cases: int, repetitions: int = 5) -> dict[str, Any]:
    """keepstep's solver on some cases: the longest and median time (each case's is a median), and wrong answers."""
    from keepstep.mitigate import allocate_microbatches

    took: list[float] = []
    wrong: list[int] = []
    for seed in range(cases):
        seconds = case(groups, seed)
        times: list[float] = []
        shares: list[int] = []
        for _ in range(repetitions):
            began_s = time.perf_counter()
            shares = allocate_microbatches(seconds, EACH * groups)
            times.append(time.perf_counter() - began_s)
        took.append(statistics.median(times))
        if not is_optimal(seconds, EACH * groups, shares):
            wrong.append(seed)
    first = case(groups, 0)
    return {
        "took_s": max(took),
        "median_s": statistics.median(took),
        "cases": cases,
        "wrong": wrong,
        "slowest": slowest(first, allocate_microbatches(first, EACH * groups)),
    }


def other(solver: str, groups: int) -> dict[str, Any]:
    """Another solver on the first case, in a process of its own: as this file prints it, or ``{"failed"}``."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, solver, str(groups), "0"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S + _STARTS_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"> {PATIENCE_S:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no words"])[-1][:200]}
    found = json.loads(done.stdout.splitlines()[-1])
    if found["status"] != "optimal":
        return {
            "failed": f"> {PATIENCE_S:.0f} s" if found["took_s"] >= 0.95 * PATIENCE_S else found["status"]
        }
    return found


def solve(solver: str, groups: int, seed: int) -> dict[str, Any]:
    """With cvxpy and the solver's default settings, but for a time limit."""
    import cvxpy  # pyright: ignore[reportMissingImports]
    import numpy as np

    seconds = np.array(case(groups, seed))
    shares: Any = cvxpy.Variable(groups, integer=True)
    times = cvxpy.multiply(seconds, shares)
    goal = cvxpy.max(times)
    if solver == VARIANCE:
        goal = cvxpy.sum_squares(times - cvxpy.sum(times) / groups)
    problem = cvxpy.Problem(cvxpy.Minimize(goal), [shares >= 1, cvxpy.sum(shares) == EACH * groups])
    limits: dict[str, Any] = {
        "HIGHS": {"time_limit": PATIENCE_S},
        "GLPK_MI": {"tm_lim": int(1000 * PATIENCE_S)},
    }.get(solver, {"scip_params": {"limits/time": PATIENCE_S}})
    began_s = time.perf_counter()
    try:
        problem.solve(solver="SCIP" if solver == VARIANCE else solver, **limits)
        status = str(problem.status)
    except cvxpy.SolverError:
        status = "failed"
    took_s = time.perf_counter() - began_s
    if status != "optimal" or shares.value is None:
        return {"took_s": took_s, "slowest": None, "status": status}
    whole = [round(one) for one in shares.value]
    return {"took_s": took_s, "slowest": slowest(seconds.tolist(), whole), "status": status}


if __name__ == "__main__":
    print(json.dumps(solve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
