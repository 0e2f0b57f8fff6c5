"""Call logs replayed into rings: the agents and the controller of a live job name whom ``analyze`` names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.recorded.replayed_calls import ReplayedCalls
from tests.unit.locate.synthetic_calls import pipeline_calls

from keepstep.analyze import analyze
from keepstep.core.incident import Incident
from keepstep.core.traced_operations import Call
from keepstep.traces.call_log import read_call_log

SAMPLE = Path(os.environ.get("KEEPSTEP_SAMPLES", "/nonexistent")) / "megatrace_log" / "log_rank2_slow.tar.gz"
with_samples = pytest.mark.skipif(
    not SAMPLE.exists(), reason="KEEPSTEP_SAMPLES names no folder with call logs"
)

Logs = Mapping[int, Sequence[Call]]
SLOW = range(24, 40)
STEPS = 50


def live(logs: Logs, into: Path, patch: pytest.MonkeyPatch) -> list[Incident]:
    with ReplayedCalls(logs, into / "live", patch) as job:
        job.run()
        return list(job.incidents.values())


def offline(logs: Logs, into: Path) -> list[Incident]:
    folder = into / "logs"
    folder.mkdir()
    for rank, calls in logs.items():
        lines = [
            f"[{call.at_s:.9f}] [Rank {rank}] Fun {call.function} Data {call.nbytes}\n" for call in calls
        ]
        (folder / f"rank_{rank}.log").write_text("".join(lines))
    return list(analyze(folder).incidents)


def told(incidents: Sequence[Incident]) -> list[tuple[str, list[int | None], set[int]]]:
    """Kind, culprits and victims of each incident."""
    return [(one.kind, [c.rank for c in one.culprits], set(one.victims)) for one in incidents]


def renamed(logs: Logs, names: Mapping[int, int]) -> Logs:
    return {names[rank]: logs[rank] for rank in sorted(logs, key=lambda rank: names[rank])}


@pytest.mark.parametrize(("stages", "slow"), [(2, 0), (2, 3), (4, 1), (4, 2), (4, 6)])
def test_a_slow_rank_is_named_live_as_offline(
    stages: int, slow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = pipeline_calls(STEPS, SLOW, {slow: 2.0}, stages=stages, seed=slow)
    incidents = live(logs, tmp_path, monkeypatch)
    assert told(incidents) == told(offline(logs, tmp_path))
    assert [one.rank for one in incidents[0].culprits] == [slow]
    assert incidents[0].culprits[0].confidence == "low"  # waits were not recorded


def test_a_rank_of_which_early_steps_are_lost_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = {2: SLOW.start - 3, 3: SLOW.start - 3}
    logs = pipeline_calls(STEPS, SLOW, {2: 2.0}, stages=4, lost=lost)
    (incident,) = live(logs, tmp_path, monkeypatch)
    assert [one.rank for one in incident.culprits] == [2]


@pytest.mark.parametrize(
    ("factors", "slow_transfer"),
    [
        pytest.param({}, 2, id="a slow link"),
        pytest.param(dict.fromkeys(range(8), 2.0), None, id="all ranks"),
        pytest.param({2: 2.0, 7: 2.0}, None, id="ranks of two stages"),
    ],
)
def test_nobody_is_named_where_more_than_one_rank_may_be_slow(
    factors: Mapping[int, float],
    slow_transfer: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = pipeline_calls(STEPS, SLOW, factors, stages=4, slow_transfer=slow_transfer)
    (incident,) = live(logs, tmp_path, monkeypatch)
    assert incident.culprits == ()


def test_a_healthy_job_has_no_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live(pipeline_calls(STEPS, range(0), {}, stages=4), tmp_path, monkeypatch) == []


@with_samples
@pytest.mark.parametrize(
    "names",
    [
        pytest.param({}, id="as recorded"),
        pytest.param({0: 1, 1: 0, 2: 5, 3: 4, 4: 3, 5: 2, 6: 7, 7: 6}, id="renamed"),
    ],
)
def test_the_slow_rank_of_a_real_call_log_is_named_live(
    names: Mapping[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = read_call_log([SAMPLE]).calls
    logs = renamed(recorded, {rank: names.get(rank, rank) for rank in recorded})
    incidents = live(logs, tmp_path, monkeypatch)
    assert told(incidents) == told(offline(logs, tmp_path))
    assert [one.rank for one in incidents[0].culprits] == [names.get(2, 2)]


@with_samples
def test_the_healthy_steps_of_a_real_call_log_have_no_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last 13 s, in which it has recovered, four times over."""
    recorded = read_call_log([SAMPLE]).calls
    ends = {
        rank: [call for call in calls if call.function == "AllGather" and call.nbytes > 1 << 30]
        for rank, calls in recorded.items()
    }
    logs: dict[int, list[Call]] = {}
    for rank, calls in recorded.items():
        first_s, last_s = ends[rank][-9].at_s, ends[rank][-1].at_s
        usual = [call for call in calls if first_s < call.at_s <= last_s]
        shift_s = ends[0][-1].at_s - ends[0][-9].at_s
        logs[rank] = [replace(call, at_s=call.at_s + turn * shift_s) for turn in range(4) for call in usual]
    assert live(logs, tmp_path, monkeypatch) == []
