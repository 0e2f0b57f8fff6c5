"""Seeds of the control plane under simulation, by the thousand; every invariant is checked at every event.

    python -m benchmarks.control_seeds --json benchmarks/results/control-seeds.json [--seeds 100000] [--parallel 2]

Two simulations, the same as in the tests (which play 2,000 seeds of each): nodes that begin again together
(``reforming``: real controller, launchers' parts and rank tables; the network, the nodes and the time are virtual) and
the election of the controller's host (``election``). Each block of 1,000 seeds is written at once to
FILE-blocks.jsonl, with the seeds that violated an invariant and what they said; the same command, given again while
the simulated code is the same (``code``: a digest of its files), goes on where it was ended.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments, versions

_TESTS = Path(__file__).resolve().parent.parent / "tests"
_BLOCK = 1000
GOAL = "100,000 seeds of the control plane without a violated invariant"


def play(task: tuple[str, int, int]) -> dict[str, Any]:
    """A block of seeds: how many were played, what they reached, and which of them violated what."""
    simulation, first, count = task
    reached, violated = 0, list[dict[str, Any]]()
    run = _simulations()[simulation]
    for seed in range(first, first + count):
        try:
            reached += run(seed)
        except Exception as error:  # noqa: PERF203 - one that is violated ends no other
            violated.append({"seed": seed, "what": f"{type(error).__name__}: {error}"[:500]})
    return {
        "simulation": simulation,
        "first": first,
        "seeds": count,
        "reached": reached,
        "violated": violated,
    }


def _simulations() -> dict[str, Callable[[int], int]]:
    """By name: one seed, and how many incarnations or terms it came to."""
    from tests.property.virtual_council import Assembly
    from tests.unit.control.virtual_faults import World

    def reforming(seed: int) -> int:
        world = World(seed)
        world.run()
        return world.newest + 1

    def election(seed: int) -> int:
        assembly = Assembly(seed)
        assembly.run()
        return max(assembly.leaders)

    return {"reforming": reforming, "election": election}


def code() -> str:
    """A digest of all files of keepstep and of the simulations that a seed runs."""
    _simulations()
    ours = {name: module for name, module in sys.modules.items() if name.startswith(("keepstep", "tests."))}
    digest = hashlib.sha256()
    for _, module in sorted(ours.items()):
        if (file := getattr(module, "__file__", None) or "").endswith(".py"):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:12]


def main() -> int:
    parser = bench_arguments("control_seeds", "Seeds of the control plane under simulation.")
    parser.add_argument("--seeds", type=int, default=100_000, help="of each simulation (100,000)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="processes")
    arguments = parser.parse_args()
    seeds = 2 * _BLOCK if arguments.quick else arguments.seeds
    report = Report("control_seeds", quick=arguments.quick, packages=("keepstep",))
    of = {"commit": versions(())["commit"], "code": code()}
    blocks = list[dict[str, Any]]()
    log = arguments.json.with_name(arguments.json.stem + "-blocks.jsonl") if arguments.json else None
    if log is not None and log.exists():
        blocks = [
            row for row in map(json.loads, log.read_text().splitlines()) if row.get("code") == of["code"]
        ]
    done = {(row["simulation"], row["first"]) for row in blocks}
    tasks = [
        (name, first, min(_BLOCK, seeds - first))
        for first in range(0, seeds, _BLOCK)
        for name in ("reforming", "election")
        if (name, first) not in done
    ]
    with Pool(arguments.parallel) as pool:
        for row in pool.imap_unordered(play, tasks):
            blocks.append({**row, **of})
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(blocks[-1]) + "\n")
    for name, reached in (("reforming", "incarnations"), ("election", "terms")):
        mine = [row for row in blocks if row["simulation"] == name]
        played, violated = sum(row["seeds"] for row in mine), [bad for row in mine for bad in row["violated"]]
        told = f"{sum(row['reached'] for row in mine):,} {reached}; virtual nodes, network and time"
        met = not violated and (played >= seeds)
        report.add(Line(f"{name}, seeds played", played, "seeds", None, limit=told))
        report.add(Line(f"{name}, seeds that violated an invariant", len(violated), "seeds", GOAL, met))
        for bad in violated[:10]:
            print(f"{name} seed {bad['seed']}: {bad['what']}", file=sys.stderr)
    report.finish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
