"""Snapshots of a training on the GPU, through pinned buffers on a stream of their own."""

from __future__ import annotations

import statistics

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.gate import PAIRS
from benchmarks.gpu.judge import added

_NO_WAITS = "a snapshot makes no stream of the training wait"


def snapshot(bench: Bench) -> None:
    """What they add to a step, how fast they are, whom they hold up, and whether they come back."""
    bench.room("snapshot")
    (found,) = bench.job("snapshot")
    nbytes = found["bytes"]
    mean, low, high = added([(one, other) for one, other in found["pairs"]])
    without = statistics.median(other for _, other in found["pairs"])
    peers: dict[str, float | int | str] = {
        "from": round(low, 4),
        "to": round(high, 4),
        "step without (s)": round(without, 4),
        "pairs": len(found["pairs"]),
        "state (GB)": round(nbytes / 1e9, 3),
        "save returns after (s)": round(found["returned_s"], 4),
    }
    bench.add("step time added by a snapshot in each step", mean, "s", peers=peers, limit=PAIRS)
    speed, rate = nbytes / found["whole_s"] / 1e9, found["pcie_bytes_per_s"] / 1e9
    peers = {"copy to pinned memory (GB/s)": round(rate, 2), "of that (%)": round(100 * speed / rate, 1)}
    limit = "nothing else on the GPU; summed and stored in the node's cache"
    bench.add("snapshot, until it is whole", speed, "GB/s", peers=peers, limit=limit)
    waits = {name: round(count / found["steps"], 2) for name, count in found["waits"].items()}
    of_training = [name for name in waits if "unknown" not in name]
    met = all(waits[name] <= 0 for name in of_training)
    total = sum(waits[name] for name in of_training)
    bench.add("waits added to a step by a snapshot", total, "", peers=waits, met=met, limit=_NO_WAITS)
    bench.add("restored bytes are those saved", "yes" if found["same"] else "no", "", met=found["same"])
