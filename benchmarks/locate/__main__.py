"""Does the locator name the right rank or link, and the right stage? How long does it take, in how much memory?

Jobs are simulated (`benchmarks.simulate`), their jitter and some of their block durations recorded. Each case goes the
way of a live one: the agents' messages are encoded and decoded, then judged by the locators, which know no layout. What
compares the verdict with the fault sees names only.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from benchmarks._report import Line, Report, bench_arguments
from benchmarks.locate import baselines
from benchmarks.locate.cases import ABSORBED, FELT, Case, draw, effects, meant, recorded_blocks
from benchmarks.locate.judge import Judged, Score, judge
from benchmarks.simulate import Fault, Run, Workload

from keepstep import wire
from keepstep.control.cluster import Cluster
from keepstep.control.incidents.agents import PACKED_WORLD
from keepstep.control.incidents.locators import Locators
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.iteration_table import between
from keepstep.core.layout import ParallelLayout
from keepstep.core.summary import BlockSummary, ClockSample, GroupInfo, IterationSummary, RankState
from keepstep.locate import locate_hang
from keepstep.wire.messages import AgentMessage
from keepstep.wire.packed import iterations_of, pack

GOAL_HANG = "hang F1 1.00 and right stage"
GOAL_SLOW = "slowdown F1 ≥ 0.98"
GOAL_STAGE = "right stage ≥ 0.98"
GOAL_ABSORBED = "absorbed delays not blamed"
GOAL_TIME = "131,072 ranks, messages decoded: ≤ 2 s and ≤ 2 GB"
EMULATED = "simulated jobs, jitter as recorded"
_TABLES = tuple(Path("straggler_tables") / f"trace-{name}.parquet" for name in ("AR", "ST"))
_TIMED = ((2, 4, 8, 8), (8, 16, 32, 32), (8, 16, 1024, 32))
_BASELINES = ("fixed threshold", "heat map", "collective times")
Job = tuple[str, int, bool, Path | None]  # kind, seed, at 131,072 ranks, recorded blocks
_any_message = msgspec.msgpack.Decoder(AgentMessage)  # as the controller's channel decodes
_Kind = TypeVar("_Kind", bound=AgentMessage)


def _decode(frame: bytes, kind: type[_Kind]) -> _Kind:
    message = _any_message.decode(frame)
    if not isinstance(message, kind):
        raise TypeError(f"a {kind.__name__} is due, not a {type(message).__name__}")
    return message


def profiles(run: Run, onset: int, silent: frozenset[int]) -> Iterator[tuple[bytes, bytes]]:
    """What the agents answer to a `ProfileRequest`, node by node, encoded, after a heartbeat with clock samples."""
    per_node, nodes = run.workload.ranks_per_node, run.workload.nodes
    traffic, causes, groups = run.traffic(onset), run.causes(), run.workload.groups()
    rows: list[IterationSummary] = []
    last = run.workload.layout.world_size - 1
    for rank, summaries in enumerate(run.summaries()):
        rows += summaries
        if (rank + 1) % per_node and rank != last:
            continue
        node = rank // per_node
        if node not in silent:
            rows.sort(key=lambda one: (one.step, one.rank))
            own = tuple(cause for cause in causes if cause.rank // per_node == node)
            sent = tuple(traffic.get(nodes[rank], ()))
            packed = pack(rows) if last >= PACKED_WORLD else None
            told = () if packed else tuple(rows)
            beat = wire.Heartbeat(node, 1, 0.0, (), _clock_samples(rows, groups))
            yield wire.encode(beat), wire.encode(wire.Profile(1, node, told, (), own, sent, packed=packed))
        rows = []


def _clock_samples(
    rows: Sequence[IterationSummary], groups: Mapping[str, GroupInfo]
) -> tuple[ClockSample, ...]:
    """A node's, as its agent picks them: collectives with other nodes, by the group's lowest rank here.

    Messages, which agents pick too, are left out: summaries have only means of them.
    """
    local = {row.rank for row in rows}
    lowest: dict[str, int] = {}
    for row in rows:
        for one in row.streams:
            lowest[one.group] = min(row.rank, lowest.get(one.group, row.rank))
    members = {name: groups[name].members for name in lowest}
    remote = {
        name for name, those in members.items() if len(those) > len(local) or not local.issuperset(those)
    }
    return tuple(
        ClockSample(
            one.group, one.op, -1, one.first_seq, row.rank, row.start_s + one.start_s, row.start_s + one.end_s
        )
        for row in rows
        for one in row.streams
        if one.peer < 0 and one.count == 1 and one.group in remote and lowest[one.group] == row.rank
    )


def states(run: Run, silent: frozenset[int]) -> Iterator[bytes]:
    """What the agents answer to a `StateRequest`."""
    per_node = run.workload.ranks_per_node
    rows: list[RankState] = []
    last = run.workload.layout.world_size - 1
    for rank, state in enumerate(run.states()):
        rows.append(state)
        if (rank + 1) % per_node and rank != last:
            continue
        if rank // per_node not in silent:
            yield wire.encode(wire.States(1, rank // per_node, tuple(rows)))
        rows = []


def locate_profiles(
    messages: Iterable[tuple[bytes, bytes]],
    onset: int,
    groups: Mapping[str, GroupInfo],
    nodes: Mapping[int, str],
    blocks_of: Callable[[Sequence[int]], Iterable[bytes]] | None = None,
) -> tuple[Diagnosis, Sequence[IterationSummary]]:
    """Decode and judge as the controller does; also the rows of the slow steps, for the baselines.

    ``blocks_of`` is asked for the blocks that would tell more of the culprits, as the agents are.
    """
    locators = Locators()
    names = list(dict.fromkeys(nodes.values()))
    cluster = Cluster(len(names))
    answers: list[wire.Profile] = []
    for heartbeat, profile in messages:
        beat = _decode(heartbeat, wire.Heartbeat)
        cluster.heard(cluster.node(beat.node_rank, names[beat.node_rank]), beat, 0.0)
        answers.append(_decode(profile, wire.Profile))
    rows = iterations_of(answers)
    before, after = between(rows, 0, onset), between(rows, onset, 1 << 30)
    causes = [cause for answer in answers for cause in answer.causes]
    traffic = [one for answer in answers for one in answer.traffic]
    clocks = locators.offsets(cluster.clock_samples())
    evidence = Evidence(
        groups, nodes, clocks, before=before, after=after, onset_step=onset, causes=causes, traffic=traffic
    )
    found = locators.slow(evidence)
    wanted = locators.blocks_wanted(evidence, found.culprits) if blocks_of is not None else ()
    if blocks_of is not None and wanted:
        blocks = [one for message in blocks_of(wanted) for one in _decode(message, wire.Profile).blocks]
        found = locators.sharpen(replace(evidence, blocks=blocks), found)
    return found, after


def judge_slow(case: Case) -> dict[str, Any]:
    """One slowdown: its verdict, and the baselines'."""
    shares = effects(case)
    wanted = meant(case, shares)
    run = case.workload.run(case.steps, case.faults)
    groups, nodes = case.workload.groups(), case.workload.nodes
    messages = profiles(run, case.before, case.silent)

    def blocks_of(ranks: Sequence[int]) -> Iterator[bytes]:
        asked = case.workload.run(case.steps, case.faults, blocks_of=ranks)
        by_node: dict[int, list[BlockSummary]] = defaultdict(list)
        for block in asked.blocks():
            by_node[block.rank // case.workload.ranks_per_node].append(block)
        for node, blocks in by_node.items():
            yield wire.encode(wire.Profile(1, node, (), blocks=tuple(blocks)))

    diagnosis, after = locate_profiles(messages, case.before, groups, nodes, blocks_of)
    inner = case.workload.layout.tp * case.workload.layout.dp
    stages = {rank: rank // inner for rank in nodes}
    others = {
        "fixed threshold": baselines.fixed_threshold(after, stages),
        "heat map": baselines.heatmap(after, stages),
        "collective times": baselines.collective_times(after, groups),
    }
    quiet = _silent_ranks(case)
    judged = {name: judge(found, wanted, quiet) for name, found in others.items()}
    return _row(case, shares, wanted, diagnosis, judge(diagnosis, wanted, quiet), judged)


def judge_hang(case: Case) -> dict[str, Any]:
    """One hang."""
    run = case.workload.run(case.steps, case.faults, stuck=True)
    groups, nodes = case.workload.groups(), case.workload.nodes
    answers = [_decode(message, wire.States) for message in states(run, case.silent)]
    told = [state for answer in answers for state in answer.states]
    silent_nodes = {nodes[node * case.workload.ranks_per_node] for node in case.silent}
    diagnosis = locate_hang(Evidence(groups, nodes, states=told, silent_nodes=silent_nodes))
    wanted = meant(case, [math.inf] * len(case.faults))
    quiet = _silent_ranks(case)
    judged = {"oldest progress": judge(baselines.oldest_progress(told, groups), wanted, quiet)}
    return _row(case, [], wanted, diagnosis, judge(diagnosis, wanted, quiet), judged)


def one_case(kind: str, seed: int, largest: bool, table: Path | None) -> dict[str, Any]:
    """Draw, run and judge the case of a seed; for worker processes."""
    case = draw(seed, kind, largest=largest, recorded=recorded_blocks(table) if table else None)
    began = time.perf_counter()
    row = judge_slow(case) if kind == "slow" else judge_hang(case)
    job = _name((kind, seed, largest, table))
    return {"job": job, **row, "wall_s": round(time.perf_counter() - began, 2)}


def _silent_ranks(case: Case) -> frozenset[int]:
    per_node = case.workload.ranks_per_node
    return frozenset(rank for rank in case.workload.nodes if rank // per_node in case.silent)


def _row(
    case: Case, shares: list[float], wanted: list[Any], found: Diagnosis, judged: Judged, others: dict[str, Judged]
) -> dict[str, Any]:  # fmt: skip
    culprits = [
        {"rank": c.rank, "link": asdict(c.link) if c.link else None, "stage": c.stage, "cause": c.cause}
        for c in found.culprits[:8]
    ]
    return {
        "seed": case.seed, "kind": case.kind, "label": case.label, "source": case.source,
        "layout": str(case.workload.layout), "schedule": case.workload.schedule, "after": case.after,
        "silent_nodes": len(case.silent),
        "faults": [
            {"where": f.where, "rank": f.rank, "peer": f.peer, "micro_batch": f.micro_batch,
             "delay_s": _json(f.delay_s), "factor": f.factor, "skips": f.skips, "dies": f.dies, "node": f.node}
            for f in case.faults
        ],
        "shares": [_json(round(share, 4)) for share in shares],
        "hidden": [one.hidden for one in wanted], "felt": [one.felt for one in wanted],
        "judged": asdict(judged), "culprits": culprits, "summary": found.summary,
        "baselines": {name: asdict(one) for name, one in others.items()},
    }  # fmt: skip


def _json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def campaign(jobs: list[Job], workers: int, path: Path | None, *, resume: bool) -> list[dict[str, Any]]:
    """All cases; each is a line of ``path`` as soon as it is judged, and with ``resume`` those there are kept."""
    rows: list[dict[str, Any]] = []
    if resume and path is not None and path.exists():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    done = {tuple(row["job"]) for row in rows}
    left = [job for job in jobs if _name(job) not in done]
    wanted = {_name(job) for job in jobs}
    rows = [row for row in rows if tuple(row["job"]) in wanted]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ProcessPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(one_case, *job) for job in left]):
            rows.append(future.result())
            if path is not None:
                with open(path, "a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    return sorted(rows, key=lambda row: tuple(row["job"]))


def _name(job: Job) -> tuple[str, str, int]:
    kind, seed, largest, table = job
    return kind, "largest" if largest else table.name if table else "drawn", seed


def score(rows: list[dict[str, Any]], name: str = "") -> Score:
    """Of the locators, or of the baseline ``name``."""
    total = Score()
    for row in rows:
        total.add(Judged(**(row["baselines"][name] if name else row["judged"])))
    return total


def report_hangs(report: Report, rows: list[dict[str, Any]], where: str, peers: tuple[str, ...]) -> None:
    total = score(rows)
    others = {name: round(score(rows, name).f1, 3) for name in peers}
    limit = (
        f"{EMULATED}; {len(rows)} cases, {total.missed} missed, {total.false_named} falsely named{_how(rows)}"
    )
    met = total.f1 == 1.0
    report.add(Line(f"hang F1, {where}", round(total.f1, 4), "", GOAL_HANG, met, others, limit))
    report.add(Line(f"hang precision, {where}", round(total.precision, 4), ""))
    report.add(Line(f"hang recall, {where}", round(total.recall, 4), ""))
    stage = Line(
        f"hang right stage, {where}", round(total.stage_share, 4), "", GOAL_HANG, total.stage_share == 1.0,
        limit=f"{total.stages} cases with a stage",
    )  # fmt: skip
    report.add(stage)
    report.add(Line(f"hang nobody accused where the culprit is silent, {where}", total.quiet, "cases"))


def report_slow(report: Report, rows: list[dict[str, Any]], where: str) -> None:
    total = score(rows)
    others = {name: round(score(rows, name).f1, 3) for name in _BASELINES}
    limit = (
        f"{EMULATED}; {len(rows)} cases, {total.true + total.missed} felt (iteration ≥ {FELT:.0%} longer), "
        f"{total.missed} missed, {total.false_named} falsely named{_how(rows)}"
    )
    report.add(
        Line(f"slowdown F1, {where}", round(total.f1, 4), "", GOAL_SLOW, total.f1 >= 0.98, others, limit)
    )
    report.add(Line(f"slowdown precision, {where}", round(total.precision, 4), ""))
    report.add(Line(f"slowdown recall, {where}", round(total.recall, 4), ""))
    stage = Line(
        f"slowdown right stage, {where}", round(total.stage_share, 4), "", GOAL_STAGE, total.stage_share >= 0.98,
        {name: round(score(rows, name).stage_share, 3) for name in _BASELINES},
    )  # fmt: skip
    report.add(stage)
    absorbed = [row for row in rows if False in row["felt"] and not any(row["hidden"])]
    blamed = score(absorbed).false_named
    line = Line(
        f"absorbed delays blamed, {where}", blamed, "cases", GOAL_ABSORBED, blamed == 0,
        {name: score(absorbed, name).false_named for name in _BASELINES},
        f"{len(absorbed)} cases with a delay that lengthens the iteration by less than {ABSORBED:.0%}",
    )  # fmt: skip
    report.add(line)


def _how(rows: list[dict[str, Any]]) -> str:
    hows = Counter(
        row["judged"]["how"] for row in rows if row["judged"]["positive"] and row["judged"]["right"]
    )
    return "; right by " + ", ".join(f"{how} {count}" for how, count in hows.most_common()) if hows else ""


def measure(report: Report, sizes: Iterable[tuple[int, int, int, int]]) -> None:
    """Time and memory of a slow rank, a slow link and a hang, each in a process of its own that does only this."""
    for tp, pp, dp, batches in sizes:
        layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
        workload = Workload(layout, micro_batches=batches, seed=1)
        rank = layout.world_size * 2 // 3
        for fault in (
            Fault("compute", rank, factor=1.5, first_step=4),
            Fault("link", rank, rank + tp * dp, delay_s=0.05, first_step=4),
            Fault("backward", rank, micro_batch=3, delay_s=math.inf, first_step=1),
        ):
            _measure_one(report, workload, fault)


def _measure_one(report: Report, workload: Workload, fault: Fault) -> None:
    world, hangs = workload.layout.world_size, math.isinf(fault.delay_s)
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        path = Path(folder)
        infos = tuple(workload.groups().values())
        _write(
            path / "groups",
            (wire.encode(wire.Groups(0, infos[i : i + 64])) for i in range(0, len(infos), 64)),
        )
        (path / "nodes.json").write_text(json.dumps(list(workload.nodes.values())))
        if hangs:
            size = _write(path / "answers", states(workload.run(2, [fault], stuck=True), frozenset())) / world
            (path / "beats").touch()
        else:
            with open(path / "answers", "wb") as answers, open(path / "beats", "wb") as beats:
                for beat, profile in profiles(workload.run(7, [fault]), fault.first_step, frozenset()):
                    beats.write(len(beat).to_bytes(4, "big") + beat)
                    answers.write(len(profile).to_bytes(4, "big") + profile)
            size = (path / "answers").stat().st_size / world / 7
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.locate.controller", folder, str(fault.first_step)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = json.loads(done.stdout)
    what = "hang" if hangs else "slow link" if fault.peer >= 0 else "slow rank"
    ends = {workload.nodes[rank] for rank in (fault.rank, fault.peer) if rank >= 0}
    right = found["culprits"] == ([sorted(ends)] if fault.peer >= 0 else [fault.rank])
    largest = world == 131_072
    met = found["seconds"] <= 2 and found["memory_mb"] <= 2000 and right if largest else None
    told = (
        f"{size:.0f} bytes per rank" if hangs else f"{size:.0f} bytes per rank and step, 4 healthy and 3 slow"
    )
    limit = (
        f"{told}; decoding {found['decode_s']:.2f} s of it; CPU {found['cpu_s']:.2f} s, one core; "
        f"the culprit was {'' if right else 'NOT '}named"
    )
    goal = GOAL_TIME if largest else None
    report.add(Line(f"locate, {what}, {world} ranks", round(found["seconds"], 3), "s", goal, met, {}, limit))
    report.add(
        Line(f"memory, {what}, {world} ranks", round(found["memory_mb"]), "MB", goal, met,
             limit="peak resident, everything included")
    )  # fmt: skip


def _write(path: Path, messages: Iterable[bytes]) -> int:
    total = 0
    with open(path, "wb") as file:
        for message in messages:
            file.write(len(message).to_bytes(4, "big") + message)
            total += len(message)
    return total


def table(rows: list[dict[str, Any]], out: Callable[[str], None]) -> None:
    """What was wrong, by kind of fault."""
    by_label: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_label[row["kind"], row["label"]].append(row)
    for (kind, label), here in sorted(by_label.items()):
        total = score(here)
        wrong = [row["seed"] for row in here if not row["judged"]["right"]]
        out(f"{kind} {label}: {len(here)} cases, {total.true} named, {total.missed} missed, "
            f"{total.false_named} falsely named, {total.quiet} rightly nobody; wrong seeds {wrong[:12]}")  # fmt: skip


def main() -> None:
    """Judge, measure, print, write."""
    parser = bench_arguments("locate", __doc__ or "")
    parser.add_argument(
        "--cases", type=int, help="at most 4,096 ranks, half of them hangs (default 1000; quick: 60)"
    )
    parser.add_argument("--largest", type=int, help="cases at 131,072 ranks (default 20; quick: none)")
    parser.add_argument("--recorded", type=int, help="cases on recorded blocks (default 400; quick: 40)")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep the cases that an earlier run has judged")
    arguments = parser.parse_args()
    quick = arguments.quick

    def count(given: int | None, few: int, many: int) -> int:
        return given if given is not None else few if quick else many

    report = Report("locate", quick=quick, packages=("keepstep", "numpy", "msgspec"))
    first = arguments.seed
    half = count(arguments.cases, 60, 1000) // 2
    jobs: list[Job] = []
    for kind in ("hang", "slow"):
        jobs += [(kind, seed, False, None) for seed in range(first, first + half)]
    samples: Path | None = arguments.samples
    tables = [samples / one for one in _TABLES if samples is not None and (samples / one).exists()]
    if tables:
        some = count(arguments.recorded, 40, 400) // 2
        jobs += [
            (kind, seed, False, tables[seed % len(tables)])
            for kind in ("hang", "slow")
            for seed in range(first, first + some)
        ]
    else:
        report.leave_out("recorded blocks", f"no {_TABLES[0].parent} under --samples")
    large = count(arguments.largest, 0, 20)
    if not large:
        report.leave_out("faults at 131072 ranks", "minutes per case; --largest N asks for them")
    jobs += [("slow" if seed % 2 else "hang", first + seed, True, None) for seed in range(large)]
    cases = arguments.json.with_name(f"{arguments.json.stem}-cases.jsonl") if arguments.json else None
    rows = campaign(jobs, arguments.jobs, cases, resume=arguments.resume)
    for row in rows:
        row["size"] = "131072 ranks" if row["layout"] == "tp8-dp1024-pp16" else "≤ 4096 ranks"
    for where in ("≤ 4096 ranks", "131072 ranks"):
        for source, extra in (("drawn", ""), ("recorded", ", recorded blocks")):
            here = [row for row in rows if row["size"] == where and row["source"] == source]
            hangs = [row for row in here if row["kind"] == "hang"]
            slow = [row for row in here if row["kind"] == "slow"]
            if hangs:
                report_hangs(report, hangs, where + extra, ("oldest progress",))
            if slow:
                report_slow(report, slow, where + extra)
    measure(report, _TIMED)
    table(rows, print)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
