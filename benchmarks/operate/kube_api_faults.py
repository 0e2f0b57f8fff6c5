"""Faults of an API server, by rounds: what the operator asks is refused, or its watches end; a job has to run through.

    python -m benchmarks.operate.kube_api_faults --rounds 0-99 --out DIR

In each round a job of two pods, which only sleep for seconds, is made and a fault is drawn: 409 for a write, 410 for
all watches, or all watches cut, each at a drawn moment and up to three times. Once the job has succeeded there must be
two pods, each made once, and the operator must be the same process. A line of every round is added to
``DIR/api-faults.jsonl``; of a round that was run again the newest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.faulty_api import FaultyApi
from tests.e2e.kube_bed import KubeBed, kubernetes, missing, until
from tests.e2e.stand_in_job import PODS, make_secret

from benchmarks._report import code_commit
from benchmarks.operate.kube_trial import JOBS, install
from benchmarks.operate.rows import seeds_in

_KINDS = ("409", "410", "cut")
_WRITES = (
    ("PUT", r"/trainingjobs/[^/]+/status"),
    ("POST", r"/pods$|/pods\?"),
    ("POST", r"/services"),
    ("PUT", r"/leases/"),
)
_LONGER_S = {
    _WRITES[1]: 12.0,
    _WRITES[3]: 8.0,
}  # until a pod is tried three times more, and the Lease is renewed
_PATIENCE_S = 60.0
_ROUND_S = 90.0


def run_round(number: int, bed: KubeBed, api: FaultyApi) -> dict[str, Any]:
    """Run one round and judge it; its line for the results."""
    draw, name = random.Random(number), f"job-{number}"
    kind, times = draw.choice(_KINDS), draw.randint(1, 3)
    write = draw.choice(_WRITES)
    before, began_s, hit = len(api.seen), time.monotonic(), 0
    operators = _restarts(bed)
    if kind == "409":
        api.refuse(*write, 409, times)
    sleep_s = _LONGER_S.get(write, 0.5) if kind == "409" else 0.5
    main = {"name": "main", "image": "none", "command": ["sleep", str(sleep_s)]}
    spec = {"nodes": 2, "template": {"spec": {"containers": [main]}}}
    kept = {"apiVersion": "keepstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}}
    bed.api.post(JOBS, {**kept, "spec": spec})
    for _ in range(times if kind != "409" else 0):
        time.sleep(draw.uniform(0.0, 0.8))
        hit += api.end_watches(expired=kind == "410")
    wrong: list[str] = []
    try:
        until(
            lambda: bed.api.get(f"{JOBS}/{name}").get("status", {}).get("phase") == "Succeeded",
            name,
            _ROUND_S,
        )
    except AssertionError:
        wrong.append(f"it is {bed.api.get(f'{JOBS}/{name}').get('status', {}).get('phase')}")
    took_s = time.monotonic() - began_s
    asked = api.seen[before:]
    if kind == "409":
        hit = sum(code == 409 for _, _, code in asked)
    pods = bed.api.get(PODS, labelSelector=f"keepstep.dev/job={name}")["items"]
    made = sum(method == "POST" and "/pods" in path and code == 201 for method, path, code in asked)
    if (len(pods), made) != (2, 2):
        wrong.append(f"{len(pods)} pods, of which {made} were made")
    if _restarts(bed) != operators:
        wrong.append("the operator has begun again")
    if not hit:
        wrong.append("nothing was hit")
    bed.api.delete(f"{JOBS}/{name}")
    until(lambda: not bed.api.get(PODS, labelSelector=f"keepstep.dev/job={name}")["items"], "pods are gone")
    api.forgive()
    return {
        "round": number,
        "commit": code_commit(),
        "passed": not wrong,
        "why": wrong,
        "fault": kind if kind != "409" else f"409 for {' '.join(write)}",
        "hit": hit,
        "took_s": round(took_s, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def _restarts(bed: KubeBed) -> dict[str, int]:
    pods = bed.api.get("/api/v1/namespaces/keepstep/pods")["items"]
    return {
        one["metadata"]["name"]: state["restartCount"]
        for one in pods
        for state in one["status"].get("containerStatuses", [])
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", default="0-99", help="as 0-99,104")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/operate-kubernetes"))
    given = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "api-faults.jsonl"
    with tempfile.TemporaryDirectory(prefix="operate-") as folder, kubernetes(Path(folder), 7) as bed:
        api = FaultyApi(bed.api.server, bed.network.address, bed.tls)
        bed.kubelets.service = api.server
        make_secret(bed.api)
        install(bed)
        until(lambda: len(_restarts(bed)) == 2 and api.watches >= 8, "both operators watch", _PATIENCE_S)
        for number in seeds_in(given.rounds):
            row = run_round(number, bed, api)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"round {number}: {row['fault']}: {'passed' if row['passed'] else row['why']}", flush=True)
        api.close()
    told = [json.loads(line) for line in results.read_text().splitlines()]
    rows = {row["round"]: row for row in told}.values()
    passed = Counter(row["fault"].partition(" ")[0] for row in rows if row["passed"])
    for kind, count in sorted(Counter(row["fault"].partition(" ")[0] for row in rows).items()):
        print(f"{kind}: {passed[kind]} of {count} passed")


if __name__ == "__main__":
    main()
