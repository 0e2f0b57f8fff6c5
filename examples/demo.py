"""`make demo`: a real 4-rank GPT training (2 data-parallel replicas × 2 pipeline stages) under `keepstep run`.

One rank, drawn by lot, is made slow for a while; keepstep is not told which. The accelerator is emulated by a
calibrated sleep per layer, so that four ranks run on two cores; processes, sockets, collectives and gradients are real.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
ONSET, SLOW_STEPS, STEPS = 25, 20, 65


def main() -> int:
    rank = random.randrange(4)
    fault = f"slow rank {rank} by 2x at step {ONSET} for {SLOW_STEPS} steps"
    run_dir = Path(tempfile.mkdtemp(prefix="keepstep-demo-")) / "run"
    command = [
        sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", "4", "--run-dir", str(run_dir),
        str(EXAMPLES / "gpt" / "train.py"),
        "--dp", "2", "--pp", "2", "--steps", str(STEPS), "--emulate-compute-ms", "20", "--fault", fault,
    ]  # fmt: skip
    print(
        f"demo: 4 ranks, DP2 x PP2, emulated compute; about {STEPS} steps. Somewhere a rank will slow down.\n"
    )
    code = subprocess.call(command)
    if code:
        print(f"demo: the job ended with {code}; its logs are in {run_dir}", file=sys.stderr)
        return code
    incidents = [json.loads(p.read_bytes()) for p in sorted((run_dir / "incidents").glob("[0-9]*.json"))]
    named = [c.get("rank") for i in incidents if i["kind"] == "slow" for c in i["culprits"]]
    print(f"\ndemo: injected: {fault}")
    print(f"demo: keepstep named: {', '.join(f'rank {r}' for r in named) or 'nobody'}")
    print(f"demo: look further:  {Path(sys.executable).parent}/keepstep report {run_dir} 1")
    print(f"demo:                {Path(sys.executable).parent}/keepstep export {run_dir} -o trace.json.gz")
    return 0 if named == [rank] else 1


if __name__ == "__main__":
    sys.exit(main())
