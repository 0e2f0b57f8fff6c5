"""What `/metrics` of 131,072 ranks costs, and how soon an alarm is told, on a real Prometheus and Alertmanager.

The ranks and incidents are made up; times are of the calling process (CPU) and of the clock. The alarm goes the way of
the shipped files with their own intervals: from the snapshot that has the verdict to the POST at a webhook.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.e2e.prometheus_bed import DEPLOY, Bed, bed, dcgm_page, http_server, missing, panels
from tests.unit.view.fake_snapshots import incident, snapshot, story, with_crash, with_hang, with_slow_rank

from benchmarks._report import Line, Report
from benchmarks.operate.fake_runs import make_run
from keepstep.view.metrics import SeriesMemory, exposition
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.run_source import open_source

RANKS, MOST_BYTES, MOST_S, MOST_ALARM_S = 131_072, 200_000, 0.05, 10.0
SCRAPES, ALARMS, VERDICT_UNSEEN_S = 40, 8, 1.0


def report(path: Path) -> None:
    """Measure, print, and write the figures to ``path``."""
    made = Report("operate --part metrics", quick=False, packages=("keepstep", "numpy", "prometheus-client"))
    _scrapes(made)
    if reason := missing():
        for name in ("promtool and amtool", "panels", "alarm at a webhook"):
            made.leave_out(name, reason)
    else:
        _tools(made)
        with tempfile.TemporaryDirectory(prefix="operate-") as top:
            _panels(made, Path(top, "panels"))
            _alarms(made, Path(top, "alarms"))
    made.finish(path)


def large_job(incidents: int) -> RunSnapshot:
    """A job of 131,072 ranks in which much is wrong, after so many incidents."""
    job = with_crash(with_hang(with_slow_rank(snapshot(RANKS), 100_003)))
    before = tuple(incident(number, status="relieved") for number in range(1, incidents + 1))
    return replace(job, incidents=(*before, *job.incidents))


def _scrapes(made: Report) -> None:
    for what, job in (
        ("131,072 ranks", large_job(0)),
        ("131,072 ranks after 10,000 incidents", large_job(10_000)),
        ("4,088 ranks, each by name", with_slow_rank(snapshot(4_088))),
    ):
        memory, taken_s, cpu_s, page = SeriesMemory(), list[float](), list[float](), b""
        for _ in range(SCRAPES):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            page = exposition(job, None, memory)
            taken_s.append(time.perf_counter() - began_s)
            cpu_s.append(time.process_time() - began_cpu_s)
        is_judged = job.world_size == RANKS
        series = sum(not line.startswith(b"#") for line in page.splitlines())
        size_goal = "<= 200 kB" if is_judged else None
        made.add(
            Line(
                f"{what}: size", len(page), "bytes", size_goal, len(page) <= MOST_BYTES if is_judged else None
            )
        )
        made.add(Line(f"{what}: series", series, "series"))
        middle_s = statistics.median(cpu_s)
        made.add(
            Line(
                f"{what}: a scrape, CPU, median of {SCRAPES}",
                round(1e3 * middle_s, 1),
                "ms",
                "<= 50 ms" if is_judged else None,
                middle_s <= MOST_S if is_judged else None,
            )
        )
        made.add(Line(f"{what}: a scrape, CPU, longest", round(1e3 * max(cpu_s), 1), "ms"))
        limit = "CPU time is judged: the clock also has what other programs take"
        made.add(
            Line(
                f"{what}: a scrape, by the clock",
                round(1e3 * statistics.median(taken_s), 1),
                "ms",
                limit=limit,
            )
        )


def _tools(made: Report) -> None:
    here = DEPLOY / "prometheus"
    rules = sorted(str(path) for path in here.glob("*.rules.yml"))
    for command, given in (
        (("promtool", "check", "metrics"), exposition(large_job(0))),
        (("promtool", "check", "config", str(here / "prometheus.yml")), b""),
        (("promtool", "check", "rules", "--lint-fatal", *rules), b""),
        (("promtool", "test", "rules", str(here / "keepstep.tests.yml")), b""),
        (("amtool", "check-config", str(DEPLOY / "alertmanager/alertmanager.yml")), b""),
    ):
        said = subprocess.run(command, input=given, capture_output=True)
        name = " ".join(one for one in command[:3] if "/" not in one)
        made.add(Line(name, said.returncode, "exit code", "clean", said.returncode == 0))


class Replay:
    """Shows snapshots one after the other, a scrape each; the last one stays."""

    def __init__(self, *snapshots: RunSnapshot) -> None:
        self.left, self._memory = list(snapshots), SeriesMemory()

    def __call__(self) -> bytes:
        """The page of the next snapshot."""
        now = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return exposition(replace(now, unix_s=time.time()), None, self._memory)


def _panels(made: Report, folder: Path) -> None:
    began = time.time()
    with ExitStack() as parts:
        shown = {"by hand": Replay(*story("by hand"))}
        for kind in ("slow", "hang", "recovered"):
            run = make_run(folder / kind, kind, ranks=16, steps=60).folder
            source = open_source(run, from_folder=True)
            parts.callback(source.close)
            shown[kind] = Replay(source.read_all())
        dcgm = dcgm_page(["gpu-00000", "gpu-00001"])
        exporter = parts.enter_context(http_server(lambda: dcgm))
        ports = {parts.enter_context(http_server(page)): dict[str, str]() for page in shown.values()}
        one = parts.enter_context(bed(folder / "bed", ports, exporter, intervals={"3s": "1s", "15s": "1s"}))
        one.wait_for('keepstep_job_exit_code{run="by hand"}')
        one.wait_for("keepstep:lost_ratio_1h")
        one.wait_for("keepstep:rank_gpu_sm_clock_hertz")
        for board in ("keepstep-fleet.json", "keepstep-run.json"):
            asked = list(panels(board))
            full = [
                expression
                for _, expression in asked
                if any(one.query_range(expression.replace("$run", run), began) for run in shown)
            ]
            made.add(
                Line(
                    f"{board}: expressions with a result",
                    f"{len(full)} of {len(asked)}",
                    "expressions",
                    "every panel's expression non-empty",
                    len(full) == len(asked),
                    limit="runs were made up; without Grafana",
                )
            )


def _alarms(made: Report, folder: Path) -> None:
    """Verdicts at times that have nothing to do with the intervals."""
    job = snapshot(name="alarmed")
    shown = Replay(job)
    with http_server(shown) as port, bed(folder, {port: {}}) as one:
        one.wait_for("keepstep_job_step")
        took_s = [_alarm_s(one, shown, job, number) for number in range(1, ALARMS + 1)]
    worst_s = max(took_s) + VERDICT_UNSEEN_S
    made.add(
        Line(f"alarm at the webhook after the snapshot, median of {ALARMS}", statistics.median(took_s), "s")
    )
    made.add(
        Line(
            "alarm at the webhook after the verdict, longest",
            worst_s,
            "s",
            "<= 10 s after the verdict",
            worst_s <= MOST_ALARM_S,
            limit="1 s is added, in which `keepstep serve` looks again",
        )
    )


def _alarm_s(one: Bed, shown: Replay, job: RunSnapshot, number: int) -> float:
    time.sleep(0.37 * number)  # another moment of the intervals each time
    began_s = time.monotonic()
    shown.left = [with_slow_rank(job, number=number)]
    came_s, _ = one.webhook.wait_for(lambda came: came["groupLabels"].get("incident") == f"{number:04d}")
    return came_s - began_s
