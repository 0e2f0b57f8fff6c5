"""The jobs of the bench of remedies: one trial of each kind, and what is read of it."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.stand_in.launch import Done, Job, run, start
from benchmarks.stand_in.ports import Ports

JOB = Path(__file__).with_name("jobs") / "remedies.py"
RANKS, EACH = 4, 8
HEALTHY, AFTER, BACK = 45, 30, 15  # steps: before, with the remedy, and once it is taken back
MOVES_KERNEL_US = 20_000.0  # of S3 and S4, in real pace
GBPS = "0.2"  # so that a transfer takes a part of the step that a slow link can make longer
_MOST_STEPS = 100_000
_PATIENCE_S = 300.0
_SETTLE = 3  # steps that are left out after a change


class Row(NamedTuple):
    """A step as a rank of `jobs/remedies.py` has written it."""

    step: int
    incarnation: int
    share: int
    launches: int
    slowness: float
    value: str
    at_s: float


class Run:
    """A job under way, through what its ranks write."""

    def __init__(self, job: Job, ports: Ports | None = None) -> None:
        self.job, self.folder, self._ports = job, job.folder, ports
        self._lossy: tuple[int, ...] = ()

    def rows(self, rank: int = 0) -> list[Row]:
        return rows_of(self.folder, rank)

    def newest(self) -> int:
        rows = self.rows()
        return rows[-1].step if rows else -1

    def turns(
        self, devices: Mapping[str, float] | None = None, link: tuple[int, int, int] | None = None
    ) -> int:
        """Let devices be slow, or the link between two nodes by so many percent, and all else fast. The newest step."""
        links = [[f"node-{link[0]}", f"node-{link[1]}", link[2]]] if link else []
        self._lossy = link[:2] if link else ()
        draft = self.folder / "bad.draft"
        draft.write_text(json.dumps({"devices": devices or {}, "links": links}))
        draft.rename(self.folder / "bad")
        return self.newest()

    def until(self, what: str, condition: Callable[[], Any]) -> None:
        """Wait. Raises ``TimeoutError`` when no step is made for long, or the job ends."""
        made, until_s = -1, time.monotonic() + _PATIENCE_S
        while not condition():
            if (newest := self.newest()) > made:
                made, until_s = newest, max(until_s, time.monotonic() + _PATIENCE_S / 2)
            if self.job.is_over() or time.monotonic() > until_s:
                raise TimeoutError(f"while waiting for {what} at step {made}: {self.job.console()[-3000:]}")
            if self._ports is not None:
                self._ports.grow(time.monotonic(), self._lossy, bool(self._lossy))
            time.sleep(0.1)

    def more(self, steps: int) -> None:
        """So many further rows of rank 0."""
        wanted = len(self.rows()) + steps
        self.until(f"{steps} steps", lambda: len(self.rows()) >= wanted)

    def within(self, what: str, condition: Callable[[], Any], steps: int = 400) -> None:
        """Wait for so many steps at most."""
        last = len(self.rows()) + steps
        self.until(what, lambda: condition() or len(self.rows()) > last)
        if not condition():
            raise TimeoutError(f"no {what} within {steps} steps: {self.job.console()[-3000:]}")

    def is_warm(self, nodes: int, times: int) -> bool:
        """Whether all nodes have said so often that their standbys are warm."""
        return self.job.console().count("standbys are warm") >= nodes * times

    def end(self) -> Done:
        (self.folder / "enough").write_text(str(self.newest() + 20))
        return self.job.finish(_PATIENCE_S)


def rows_of(folder: Path, rank: int) -> list[Row]:
    path = folder / f"rows-{rank}"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [Row(*json.loads(line)) for line in whole.splitlines()]


def incidents_of(done: Done) -> list[dict[str, Any]]:
    return [
        json.loads(path.read_bytes()) for path in sorted((done.folder / "run/incidents").glob("[0-9]*.json"))
    ]


def told(incidents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "onset_step": one["onset_step"],
            "detected_step": one["detected_step"],
            "status": one["status"],
            "culprits": [
                {"rank": each["rank"], "link": each["link"] and each["link"]["nodes"], "cause": each["cause"],
                 "slowdown": each["slowdown"], "confidence": each["confidence"]}
                for each in one["culprits"]
            ],
            "actions": [
                {key: action[key] for key in ("name", "detail", "expected_iteration_s", "measured_iteration_s")}
                for action in one["actions"]
            ],
        }
        for one in incidents
    ]  # fmt: skip


@cache
def undisturbed(layout: str, steps: int) -> tuple[tuple[str, ...], ...]:
    """By rank and step, the values of the same training without slowness and remedies."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, flags = Path(name), ("--mitigate", "off", "--no-validate")
        words = [layout, str(steps), name]
        done = run(JOB, words, folder, ranks=RANKS, flags=flags, clock="virtual", values=True, timeout_s=600)
        if done.exit_code != 0:
            raise RuntimeError(f"the undisturbed job ended with {done.exit_code}: {done.console[-2000:]}")
        return tuple(tuple(row.value for row in rows_of(folder, rank)) for rank in range(RANKS))


def compared(folder: Path, layout: str) -> tuple[float, int, list[str]]:
    """The largest relative difference to the undisturbed values, how many were compared, and what is missing."""
    rows = [rows_of(folder, rank) for rank in range(RANKS)]
    last = min(row[-1].step for row in rows)
    reference = undisturbed(layout, -(-(last + 1) // 100) * 100)
    worst, count, missed = 0.0, 0, list[str]()
    for rank, own in enumerate(rows):
        if not {row.step for row in own} >= set(range(last + 1)):
            missed.append(f"rank {rank} has not made all steps to {last}")
        for row in own:
            if row.step <= last:
                right, found = float.fromhex(reference[rank][row.step]), float.fromhex(row.value)
                worst, count = max(worst, abs(found - right) / max(abs(right), 1e-300)), count + 1
    return worst, count, missed


def best_possible(times: Sequence[tuple[float, float]], total: int) -> tuple[float, list[int]]:
    """The least that the slowest of these takes, and its shares: each micro-batch goes where it is done first.

    ``times``: of each replica, what a micro-batch takes, and what a step takes besides.
    """
    shares = [1] * len(times)
    for _ in range(total - len(times)):
        done = [(share + 1) * each + rest for share, (each, rest) in zip(shares, times, strict=True)]
        shares[done.index(min(done))] += 1
    return max(share * each + rest for share, (each, rest) in zip(shares, times, strict=True)), shares


class SharesCase(NamedTuple):
    """A layout whose replicas share out micro-batches."""

    layout: str
    replicas: tuple[tuple[int, ...], ...]  # ranks of each, by stage
    kernel_us: float
    rounding: float  # largest relative difference of a value: other shares change the order of sums


DDP = SharesCase("replicas", ((0,), (1,), (2,), (3,)), 2000.0, 1e-9)
MEGATRON = SharesCase("megatron", ((0, 2), (1, 3)), 500.0, 1e-4)


def shares(case: SharesCase, seed: int, folder: Path) -> dict[str, Any]:
    """S2: a device turns slow, and later fast again."""
    draw = random.Random(f"s2 {seed}")
    rank, factor, healthy = draw.randrange(RANKS), draw.choice((1.5, 2.0, 4.0)), HEALTHY + draw.randrange(10)
    count = EACH * len(case.replicas)
    with start(
        *(JOB, [case.layout, str(_MOST_STEPS), str(folder)], folder), ranks=RANKS, flags=["--no-validate"],
        clock="virtual", kernel_us=case.kernel_us, values=True,
        settings={"KEEPSTEP_NODE_NAME": "node-0", "PACE_S": "0.3", "NCCL_RAS_ENABLE": "0"},
    ) as job:  # fmt: skip
        live = Run(job)
        live.until("healthy steps", lambda: live.newest() >= healthy)
        live.turns({f"node-0/{rank}": factor})
        live.within("other shares", lambda: len({live.rows(one)[-1].share for one in range(RANKS)}) > 1)
        live.more(AFTER)
        live.turns()
        live.within("equal shares", lambda: {live.rows(one)[-1].share for one in range(RANKS)} == {EACH})
        live.more(BACK)
        done = live.end()
    rows = [{row.step: row for row in rows_of(folder, one)} for one in range(RANKS)]
    last = min(max(of) for of in rows)
    slow = [step for step, row in rows[rank].items() if row.slowness != 1.0]
    divided = [tuple(rows[one[0]][step].share for one in case.replicas) for step in range(last + 1)]
    unequal = [step for step in range(last + 1) if len(set(divided[step])) > 1]
    first, back = unequal[0], unequal[-1] + 1
    bound_s, best = best_possible(_times(case, rows, slow, rank, factor), count)
    took = dict(zip(range(1, last + 1), done.devices[0].periods_ns(), strict=False))

    def pace_s(steps: Sequence[int]) -> float:
        return round(1e-9 * statistics.median(took[step] for step in steps), 6)

    after_s = pace_s(range(first + 1, slow[-1])[-AFTER // 2 :])
    worst, compared_values, missed = compared(folder, case.layout)
    incidents = told(incidents_of(done))
    wrong = [*missed, *_wrongly_named(incidents, (rank,))]
    if worst > case.rounding:
        wrong.append(f"values differ by {worst:.2g}")
    return {
        "rank": rank,
        "factor": factor,
        "onset": slow[0],
        "over": slow[-1] + 1,
        "shares": [(step, now) for step, now in enumerate(divided) if step == 0 or now != divided[step - 1]],
        "best": best,
        "in_force_after": first - slow[0],
        "equal_after": back - slow[-1] - 1,
        "before_s": pace_s(range(10, slow[0] - 1)),
        "slowed_s": pace_s(range(slow[0] + 1, first - 1)),
        "after_s": after_s,
        "bound_s": round(bound_s, 6),
        "ratio": round(after_s / bound_s, 4),
        "back_s": pace_s(range(back + 1, last)),
        "error": worst,
        "compared": compared_values,
        "incidents": incidents,
        "failed": "; ".join(_failed(done, wrong)),
    }


def _times(
    case: SharesCase, rows: Sequence[Mapping[int, Row]], slow: Sequence[int], rank: int, factor: float
) -> list[tuple[float, float]]:
    """Seconds of each replica for a micro-batch, and besides, by the kernels that its ranks have launched.

    A replica of two stages takes the slower one's for each micro-batch, and once the other's, to fill the pipeline.
    """
    times: list[tuple[float, float]] = []
    for replica in case.replicas:
        stages: list[tuple[float, float]] = []
        for stage, one in enumerate(replica):
            alike = [rows[ranks[stage]] for ranks in case.replicas]
            of = next(of for of in alike if of[slow[-1]].share != of[slow[0]].share)
            equal, other = of[slow[0]], of[slow[-1]]
            kernels = (equal.launches - other.launches) / (equal.share - other.share)
            kernel_s = 1e-6 * case.kernel_us * (factor if one == rank else 1.0)
            stages.append((kernel_s * kernels, kernel_s * (equal.launches - equal.share * kernels)))
        each, rest = max(stages)
        times.append((each, rest + sum(one for one, _ in stages) - each))
    return times


def exchange(seed: int, folder: Path) -> dict[str, Any]:
    """S3: a link of a data-parallel pair turns slow, and later fast again."""
    draw = random.Random(f"s3 {seed}")
    one, percent, healthy = draw.randrange(2), draw.choice((500, 900)), HEALTHY + draw.randrange(10)
    link = one, one + 2
    ports = Ports(folder, RANKS)
    with _moves(folder, RANKS, 0, ports.command) as job:
        live = Run(job, ports)
        live.until("healthy steps", lambda: live.newest() >= healthy and live.is_warm(RANKS, 1))
        slow_step, slow_s = live.turns(link=(*link, percent)), time.time()
        live.within("exchange", lambda: live.rows()[-1].incarnation == 1)
        live.more(AFTER)
        live.until("warm standbys", lambda: live.is_warm(RANKS, 2))
        fast_step, fast_s = live.turns(), time.time()
        live.within("exchange back", lambda: live.rows()[-1].incarnation == 2)
        live.more(BACK)
        done = live.end()
    found = _judged(done, slow_step, slow_s, fast_step)
    if len(found["moves"]) > 1:
        found["fast_until_back_s"] = round(found["moves"][1]["from_s"] - fast_s, 1)
    names = [f"node-{place}" for place in link]
    wrong = [*found.pop("wrong"), *_wrongly_named(found["incidents"], link=names)]
    return {"link": link, "percent": percent, **found, "failed": "; ".join(_failed(done, wrong))}


def replacement(seed: int, folder: Path) -> dict[str, Any]:
    """S4: the devices of a node turn slow for good, a spare waits."""
    draw = random.Random(f"s4 {seed}")
    factor, healthy = draw.choice((2.0, 4.0)), HEALTHY + draw.randrange(10)
    with _moves(folder, 2, 1) as job:
        live = Run(job)
        live.until("healthy steps", lambda: live.newest() >= healthy and live.is_warm(2, 1))
        slow_step, slow_s = live.turns({"node-1/0": factor, "node-1/1": factor}), time.time()
        live.within("replacement", lambda: live.rows()[-1].incarnation == 1)
        live.more(AFTER)
        done = live.end()
    found = _judged(done, slow_step, slow_s, None)
    wrong = [*found.pop("wrong"), *_wrongly_named(found["incidents"], (2, 3))]
    if done.exit_codes != (0, 75, 0):
        wrong.append(f"exit codes {done.exit_codes}")
    failed = [one for one in wrong if one] + ([] if done.exit_code in (0, 75) else [done.console[-2000:]])
    return {"factor": factor, **found, "failed": "; ".join(failed)}


def _moves(
    folder: Path,
    nodes: int,
    spares: int,
    on_node: Callable[[int, Sequence[str]], Sequence[str]] | None = None,
) -> Job:
    flags = ["-v", "--max-restarts", "1", "--standbys", str(RANKS // nodes)]
    given: dict[str, Any] = {"on_node": on_node} if on_node else {}
    return start(
        *(JOB, ["pipelines", str(_MOST_STEPS), str(folder)], folder), ranks=RANKS, nodes=nodes, spares=spares,
        flags=flags, kernel_us=MOVES_KERNEL_US, values=True, **given,
        settings={"STAND_IN_GBPS": GBPS, "NCCL_RAS_ENABLE": "0"},
    )  # fmt: skip


def _judged(done: Done, slow_step: int, slow_s: float, fast_step: int | None) -> dict[str, Any]:
    """Seconds an iteration before, during and after; of each move the pause, and the steps that were made again."""
    rows = rows_of(done.folder, 0)
    begun = [
        place for place, (one, other) in enumerate(pairwise(rows), 1) if one.incarnation != other.incarnation
    ]
    moves: list[dict[str, Any]] = []
    for place in begun:
        last = rows[place - 1]
        new = next(row for row in rows[place:] if row.step > last.step)
        moves.append(
            {
                "step": rows[place].step,
                "from_s": last.at_s,
                "pause_s": round(new.at_s - last.at_s, 2),
                "made_again": last.step + 1 - rows[place].step,
            }
        )

    def pace_s(part: Sequence[Row]) -> float | None:
        took = [other.at_s - one.at_s for one, other in pairwise(part)]
        return round(statistics.median(took), 4) if took else None

    ends = [*begun, len(rows)]
    first = rows[: ends[0]]
    second = rows[ends[0] + _SETTLE : ends[1]] if begun else []
    found: dict[str, Any] = {
        "onset": slow_step,
        "slow_until_moved_s": round(moves[0]["from_s"] - slow_s, 1) if moves else None,
        "moves": moves,
        "before_s": pace_s([row for row in first if 10 <= row.step <= slow_step]),
        "during_s": pace_s([row for row in first if row.step > slow_step + _SETTLE]),
        "after_s": pace_s([row for row in second if fast_step is None or row.step <= fast_step]),
    }
    if len(begun) > 1:
        found["back_s"] = pace_s(rows[ends[1] + _SETTLE :])
    worst, count, missed = compared(done.folder, "pipelines")
    wrong = [*missed, *([f"values differ by {worst:.2g}"] if worst else [])]
    if len(begun) != (1 if fast_step is None else 2):
        wrong.append(f"the ranks moved {len(begun)} times")
    return {**found, "compared": count, "incidents": told(incidents_of(done)), "wrong": wrong}


def _wrongly_named(
    incidents: Sequence[Mapping[str, Any]], ranks: Sequence[int] = (), link: Sequence[str] = ()
) -> list[str]:
    """What is wrong where anybody but these ranks and the link between these nodes is named, or nobody is.

    That a rank had to wait for its core is true of a machine with other work, and not counted.
    """
    named = [
        (one["rank"], one["link"])
        for incident in incidents
        for one in incident["culprits"]
        if one["cause"] != "run queue"
    ]
    wrong = [one for one in named if one[0] not in ranks and not (one[1] and set(one[1]) == set(link))]
    return [f"named {wrong}"] if wrong else [] if named else ["nobody was named"]


def _failed(done: Done, wrong: Sequence[str]) -> list[str]:
    return [*wrong, *([] if done.exit_code == 0 else [f"exit code {done.exit_code}: {done.console[-2000:]}"])]
