"""``keepstep why``: how fast words become facts on one core, and how well messages are put into templates.

    python -m benchmarks.why [--part throughput|nodes|templates] [--samples DIR] [--quick] [--json FILE]

Throughput: a healthy Megatron-LM log, lines of which no two are alike, and a failed job's log of a million lines (a
tenth with ``--quick``) that ``keepstep why`` reads in a process of its own. Nodes: the messages of 12,500 agents that
all tell of one failure, decoded, kept and explained as the controller does it. Templates: the 16 samples of 2,000 lines
of logpai/loghub in ``DIR`` or ``DIR/loghub`` (``HDFS/HDFS_2k.log_structured.csv``, …), by grouping accuracy: the share
of lines whose group has exactly the lines of one event. Settings for each system are those published with Drain in
logpai/logparser (Apache-2.0); beside it one setting for all, keepstep's own.
"""

from __future__ import annotations

import csv
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks._report import Line, Report, bench_arguments
from keepstep.control.incidents.job_words import JobWords, cause_of
from keepstep.detect.failure_rows import RowMatcher, shipped_rows
from keepstep.detect.listener import Listener
from keepstep.detect.templates import TemplateTree
from keepstep.wire.messages import Said
from keepstep.wire.messages import Words as WireWords

HEALTHY_GOAL, NEW_GOAL = "healthy log ≥ 250,000 lines/s", "all lines new ≥ 20,000/s"
FAILED_GOAL = "1,000,000-line failed log by `keepstep why` ≤ 10 s and ≤ 200 MB"
GROUPING_GOAL = (
    "mean grouping accuracy ≥ 0.85 with the published settings per system, ≥ 0.80 with one setting for all"
)
NODES_GOAL = "12,500 agents that all tell of one failure ≤ 2 s on one core"
EACH_GOAL = {"HDFS": 0.998, "BGL": 0.96, "Thunderbird": 0.95}
_CHUNK = 1 << 20
# The command, then its largest memory in KiB: the kernel's maximum for children has the parent's before the exec, too.
_MEASURED = (
    "import sys; from keepstep.cli import main; main(sys.argv[1:]); "
    "print(next(x.split()[1] for x in open('/proc/self/status') if x.startswith('VmHWM')), file=sys.stderr)"
)
_ADDRESS, _HOST = r"(\d+\.){3}\d+", r"([\w-]+\.){2,}[\w-]+"
PUBLISHED: dict[str, tuple[int, float, tuple[str, ...]]] = {  # depth, similarity, masks
    "HDFS": (4, 0.5, (r"blk_-?\d+", r"(\d+\.){3}\d+(:\d+)?")),
    "Hadoop": (4, 0.5, (_ADDRESS,)),
    "Spark": (4, 0.5, (_ADDRESS, r"\b[KGTM]?B\b", _HOST)),
    "Zookeeper": (4, 0.5, (r"(/|)(\d+\.){3}\d+(:\d+)?",)),
    "BGL": (4, 0.5, (r"core\.\d+",)),
    "HPC": (4, 0.5, (r"=\d+",)),
    "Thunderbird": (4, 0.5, (_ADDRESS,)),
    "Windows": (5, 0.7, (r"0x.*?\s",)),
    "Linux": (6, 0.39, (_ADDRESS, r"\d{2}:\d{2}:\d{2}")),
    "Android": (6, 0.2, (
        r"(/[\w-]+)+", _HOST, r"\b(\-?\+?\d+)\b|\b0[Xx][a-fA-F\d]+\b|\b[a-fA-F\d]{4,}\b",
    )),
    "HealthApp": (4, 0.2, ()),
    "Apache": (4, 0.5, (_ADDRESS,)),
    "Proxifier": (3, 0.6, (r"<\d+\ssec", r"([\w-]+\.)+[\w-]+(:\d+)?", r"\d{2}:\d{2}(:\d{2})*", r"[KGTM]B")),
    "OpenSSH": (5, 0.6, (_ADDRESS, _HOST)),
    "OpenStack": (5, 0.5, (r"((\d+\.){3}\d+,?)+", r"/.+?\s", r"\d+")),
    "Mac": (6, 0.7, (_HOST,)),
}  # fmt: skip


def healthy(count: int, draw: random.Random) -> Iterator[str]:
    """Lines as Megatron-LM writes them."""
    for number in range(count):
        yield (
            f" [2025-02-03 10:{number // 60 % 60:02}:{number % 60:02}] iteration {number:8}/ 5000000 | "
            f"consumed samples: {number * 512:12} | elapsed time per iteration (ms): {draw.uniform(3000, 3300):.1f} | "
            f"learning rate: 1.5E-04 | global batch size: 512 | lm loss: {draw.uniform(2, 3):.6E} | loss scale: 1.0 | "
            f"grad norm: {draw.uniform(0, 2):.3f} | number of skipped iterations: 0 |"
        )


def new(count: int, draw: random.Random) -> Iterator[str]:
    """Lines of twelve words, no two alike."""
    words = ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(5000)]
    for _ in range(count):
        yield " ".join(draw.choices(words, k=12))


def failed(count: int, draw: random.Random) -> Iterator[str]:
    """The log of 64 ranks that work, until rank 17 meets a full disk and all others lose it: a third of the lines."""
    ranks = 64
    for number in range(count * 2 // 3):
        yield f"[rank{number % ranks}]: 2025-02-03 10:00:00 step {number // ranks} loss {draw.uniform(2, 3):.4f}"
    yield "[rank17]: Traceback (most recent call last):"
    yield '[rank17]:   File "train.py", line 88, in save'
    yield "[rank17]: OSError: [Errno 28] No space left on device: '/ckpt/step-900/rank17.pt'"
    for number in range(count // 30):
        rank = number % ranks
        if rank != 17:
            yield f"[rank{rank}]: Traceback (most recent call last):"
            for depth in range(7):
                yield f'[rank{rank}]:   File "/opt/torch/{depth}.py", line {draw.randint(1, 4000)}, in call_{depth}'
            yield f"[rank{rank}]: torch.distributed.DistBackendError: NCCL error in: x.cpp:{rank}, remote"
            yield f"[rank{rank}]:[E203 10:00:01.5 Process.cpp:616] [Rank {rank}] ncclRemoteError: gone {number}"


def lines_a_second(lines: Iterator[str]) -> float:
    data = ("\n".join(lines) + "\n").encode()
    listener = Listener(RowMatcher(shipped_rows()))
    began = time.process_time()
    for at in range(0, len(data), _CHUNK):
        listener.take(data[at : at + _CHUNK])
    words = listener.words()
    return words.lines / (time.process_time() - began)


def throughput(report: Report, *, quick: bool) -> None:
    draw = random.Random(32)
    count = 100_000 if quick else 1_000_000
    speed = round(lines_a_second(healthy(count // 2, draw)))
    peers = {
        "nvidia-resiliency-ext, not run here": 2_900,
        "drain3, not run here": 52_000,
        "ByteBrain, of its paper": 229_000,
    }
    report.add(Line("healthy log", speed, "lines/s", HEALTHY_GOAL, speed >= 250_000, peers))
    speed = round(lines_a_second(new(count // 5, draw)))
    report.add(Line("all lines new", speed, "lines/s", NEW_GOAL, speed >= 20_000))
    with tempfile.TemporaryDirectory(prefix="keepstep-why-") as folder:
        path = Path(folder) / "job.log"
        path.write_text("\n".join(failed(count, draw)) + "\n")
        began = time.monotonic()
        command = [sys.executable, "-c", _MEASURED, "why", str(path), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        took_s = time.monotonic() - began
    said, most_mb = done.stdout, int(done.stderr.split()[-1]) / 1024
    right = '"sub":"no-space"' in said and '"culprits":["path /ckpt/step-900/rank17.pt"]' in said
    limit = None if count == 1_000_000 else f"{count:,} lines"
    report.add(Line("failed log, its cause found", str(right), "", FAILED_GOAL, right, limit=limit))
    report.add(Line("failed log, time", round(took_s, 2), "s", FAILED_GOAL, took_s <= 10, limit=limit))
    report.add(Line("failed log, memory", round(most_mb), "MB", FAILED_GOAL, most_mb <= 200, limit=limit))


def many_nodes(report: Report) -> None:
    nodes, ranks = 12_500, 8
    root = "RuntimeError: CUDA error: an illegal memory access was encountered"
    echo = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:{port}"
    sent: list[bytes] = []
    for node in range(nodes):
        line, row = (
            (root, "cuda-illegal-access") if node == 700 else (echo.format(port=node), "torch-store-lost")
        )
        said = Said(node * ranks, row, line, "stderr", 7, 1e9 + (node != 700))
        sent.append(msgspec.msgpack.encode(WireWords(node, (said,))))
    words, decoder = JobWords(lambda at_s: at_s), msgspec.msgpack.Decoder(WireWords)
    began = time.process_time()
    for node, data in enumerate(sent):
        words.heard(f"gpu-{node}", decoder.decode(data))
    kept_s = time.process_time() - began
    cause = cause_of(words.failure((), range(nodes * ranks)))
    took_s = time.process_time() - began
    right = cause is not None and cause.first is not None and cause.first.rank == 700 * ranks
    report.add(Line(f"{nodes:,} nodes, one failure: kept", round(kept_s, 2), "s", NODES_GOAL, took_s <= 2))
    report.add(
        Line(f"{nodes:,} nodes, one failure: explained", round(took_s, 2), "s", NODES_GOAL, took_s <= 2)
    )
    report.add(Line(f"{nodes:,} nodes, its cause found", str(right), "", NODES_GOAL, right))


def grouping_accuracy(path: Path, tree: TemplateTree) -> float:
    """The share of lines whose group has exactly the lines of one event of the truth."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    events: dict[str, set[int]] = defaultdict(set)
    groups: dict[int, set[int]] = defaultdict(set)
    for at, row in enumerate(rows):
        events[row["EventId"]].add(at)
        found = tree.add(row["Content"])
        groups[found.number if found else -1].add(at)
    right = [members for members in groups.values() if events[rows[min(members)]["EventId"]] == members]
    return sum(map(len, right)) / len(rows)


def templates(report: Report, samples: Path | None) -> None:
    places = [samples / "loghub", samples] if samples else []
    folder = next((one for one in places if (one / "HDFS" / "HDFS_2k.log_structured.csv").is_file()), None)
    if folder is None:
        where = f"{samples} has no loghub" if samples else "no --samples"
        report.leave_out("templates", f"{where}; clone https://github.com/logpai/loghub and give its folder")
        return
    means = {"published settings": 0.0, "one setting": 0.0}
    for name, (depth, similarity, masks) in PUBLISHED.items():
        path = folder / name / f"{name}_2k.log_structured.csv"
        published = grouping_accuracy(path, TemplateTree(depth, similarity, masks, values_count=False))
        own = grouping_accuracy(path, TemplateTree())
        means["published settings"] += published / len(PUBLISHED)
        means["one setting"] += own / len(PUBLISHED)
        goal = EACH_GOAL.get(name)
        met = None if goal is None else round(published, 3) >= goal
        wanted = None if goal is None else f"{name} ≥ {goal:g}"
        report.add(Line(f"{name}, published settings", round(published, 3), "", wanted, met))
        report.add(Line(f"{name}, one setting", round(own, 3), ""))
    peers = {"published settings": {"Drain as published": 0.865}, "one setting": {"drain3 default": 0.73}}
    for (name, mean), least in zip(means.items(), (0.85, 0.80), strict=True):
        report.add(Line(f"mean, {name}", round(mean, 3), "", GROUPING_GOAL, mean >= least, peers[name]))


def main() -> int:
    parser = bench_arguments("why", __doc__ or "")
    parser.add_argument("--part", choices=("throughput", "nodes", "templates"), help="only this part")
    options = parser.parse_args()
    report = Report("why", quick=options.quick)
    if options.part in (None, "throughput"):
        throughput(report, quick=options.quick)
    if options.part in (None, "nodes"):
        many_nodes(report)
    if options.part in (None, "templates"):
        templates(report, options.samples)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
