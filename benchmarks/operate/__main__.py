"""Jobs under schedulers of six nodes on this host, whose parts are lost by seeds. Needs root.

``keepstep slurm`` runs on a real Slurm, ``keepstep operator`` on a real control plane of Kubernetes with stand-ins for
its nodes (make kubernetes).

    python -m benchmarks.operate --part slurm --seeds 0-119 --out DIR
    python -m benchmarks.operate --part kubernetes --seeds 0-79 --out DIR
    python -m benchmarks.operate --part PART --seeds 3,17,40-119 --out DIR
    python -m benchmarks.operate --part PART --summary --out DIR
    python -m benchmarks.operate --part page        what the page of 131,072 ranks costs; needs Chromium
    python -m benchmarks.operate --part metrics     size and time of /metrics, time to an alarm; needs Prometheus
    python -m benchmarks.operate --part hanging     whether viewers that hang slow a job down; --quick: two minutes

In Slurm a seed draws whether a rank or a launcher is killed, a node is lost or slow, a Python error is raised or
nothing happens; whether there is a spare; whether root or an ordinary user has the job; and how many nodes and ranks
train. Only root may drain nodes: where a node is drained 20 queued jobs of one node each have to keep off it, while of
an ordinary user's job its comment is looked at, and after a requeue its ``ExcNodeList``. In
Kubernetes it draws whether a GPU breaks (the node's kernel says so), also while the API server is away, a node is lost,
a rank is killed or nothing happens. A line of every seed, of failed ones too, is added to ``DIR/seeds.jsonl``. Of a
seed that was run again the newest line counts in the summary, which names failed ones before it.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e import kube_bed, slurm_bed

from benchmarks.operate.kube_judge import summary as kube_summary
from benchmarks.operate.kube_plans import KubePlan
from benchmarks.operate.kube_plans import plan_of as kube_plan_of
from benchmarks.operate.kube_trial import run_seed as run_kube_seed
from benchmarks.operate.plans import plan_of
from benchmarks.operate.rows import seeds_in
from benchmarks.operate.trial import run_seed, undisturbed


def summary(rows: list[dict[str, Any]]) -> str:
    """What the lines of all seeds come to."""
    made, passed = Counter[str](), Counter[str]()
    for row in rows:
        plan = row["plan"]
        kind = f"{plan['fault']}, {'spare' if plan['spare'] else 'no spare'}, {plan['user']}"
        made[kind] += 1
        passed[kind] += row["passed"]
    lines = [f"{kind}: {passed[kind]} of {made[kind]} passed" for kind in sorted(made)]
    for name in ("again_s", "reason_s"):
        values = sorted(value for row in rows if (value := row["found"][name]) is not None)
        if values:
            lines.append(
                f"{name}: {len(values)} seeds, median {values[len(values) // 2]}, worst {values[-1]}"
            )
    lines += [f"seed {row['seed']} failed: {'; '.join(row['why'])}" for row in rows if not row["passed"]]
    return "\n".join([*lines, f"{sum(passed.values())} of {len(rows)} seeds passed"])


def _stop(*_: object) -> None:
    raise KeyboardInterrupt  # the cluster is ended on the way out


def main() -> None:
    signal.signal(signal.SIGTERM, _stop)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", choices=("slurm", "kubernetes", "page", "hanging", "metrics"), default="slurm"
    )
    parser.add_argument("--seeds", default="0-119")
    parser.add_argument("--out", type=Path, help="benchmarks/results/operate-PART")
    parser.add_argument("--summary", action="store_true", help="only sum up the seeds that are there")
    parser.add_argument("--quick", action="store_true", help="hanging: a try, not a figure")
    given = parser.parse_args()
    out: Path = given.out or Path(f"benchmarks/results/operate-{given.part}")
    results = out / "seeds.jsonl"
    if given.part == "page":
        from benchmarks.operate.page import report

        report(out / "figures.json")
        return
    if given.part == "metrics":
        from benchmarks.operate import metrics

        metrics.report(out / "figures.json")
        return
    if given.part == "hanging":
        from benchmarks.operate import hanging_viewers

        hanging_viewers.report(
            given.quick, None if given.quick and given.out is None else out / "figures.json"
        )
        return
    in_slurm = given.part == "slurm"
    if not given.summary:
        if reason := slurm_bed.missing() if in_slurm else kube_bed.missing():
            parser.error(reason)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="operate-") as top:
            for seed in seeds_in(given.seeds):
                plan = plan_of(seed) if in_slurm else kube_plan_of(seed)
                world = plan.nodes * plan.ranks
                folder = Path(top, f"seed-{seed}")
                folder.mkdir()
                Path(top).chmod(0o755)
                reference = undisturbed(world, Path(top, f"undisturbed-{world}"))
                if isinstance(plan, KubePlan):
                    row = run_kube_seed(plan, folder, reference)
                else:
                    row = run_seed(plan, folder, reference)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"seed {seed}: {'passed' if row['passed'] else row['why']}", flush=True)
    sum_up = summary if in_slurm else kube_summary
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    newest = {row["seed"]: row for row in rows}
    print(sum_up(list(newest.values())))
    for row in rows:
        if row is not newest[row["seed"]] and not row["passed"]:
            why = "; ".join(row["why"])
            print(f"seed {row['seed']} was run again, it had failed at {row['commit']}: {why}")


if __name__ == "__main__":
    main()
