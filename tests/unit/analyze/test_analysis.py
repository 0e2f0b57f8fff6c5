from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path

import pytest
from tests.unit.locate.synthetic_calls import call_logs

from keepstep.analyze import analyze
from keepstep.analyze._call_stalls import locate_stall
from keepstep.cli import main
from keepstep.core.errors import TraceError
from keepstep.core.traced_operations import Call
from keepstep.locate import CallStep
from keepstep.report.incidents import incident_to_json

SAMPLES = Path(os.environ.get("KEEPSTEP_SAMPLES", "/nonexistent"))
with_samples = pytest.mark.skipif(not SAMPLES.exists(), reason="KEEPSTEP_SAMPLES names no folder")


def megatron_log(path: Path, times: list[float]) -> Path:
    path.write_text(
        "".join(
            f" iteration {n}/ 900 | elapsed time per iteration (ms): {1e3 * seconds} |\n"
            for n, seconds in enumerate(times, 1)
        )
    )
    return path


def flight_dumps(folder: Path, started: dict[int, int], completed: dict[int, int]) -> Path:
    """Ranks of one group: what each enqueued and completed; in between all-reduces are in flight."""
    for rank, last in started.items():
        entries = [
            {
                "pg_id": 0, "process_group": ("0", "dp"), "profiling_name": "nccl:all_reduce",
                "collective_seq_id": seq, "p2p_seq_id": 0, "state": "scheduled", "time_created_ns": seq,
            }
            for seq in range(completed[rank] + 1, last + 1)
        ]  # fmt: skip
        status = {"last_enqueued_collective": last, "last_completed_collective": completed[rank]}
        content = {
            "version": "2.10",
            "pg_config": {"0": {"desc": "dp", "ranks": str(list(started))}},
            "pg_status": {0: status},
            "entries": entries,
        }
        (folder / f"dump_{rank}").write_bytes(pickle.dumps(content))
    return folder


def test_slow_episodes_of_a_training_log(tmp_path: Path) -> None:
    times = [60.0] + [1.0 + 0.01 * (n % 3) for n in range(59)] + [1.6] * 40 + [1.0] * 50 + [1.2] * 30
    found = analyze(megatron_log(tmp_path / "log.txt", times))
    assert [(i.onset_step, i.relief_step, i.status) for i in found.incidents] == [
        (61, 101, "relieved"),
        (151, None, "open"),
    ]
    assert found.incidents[0].job_slowdown == pytest.approx(1.6, rel=0.02)
    assert found.incidents[0].culprits == ()


def test_a_healthy_training_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = megatron_log(tmp_path / "log.txt", [1.0 + 0.01 * (n % 3) for n in range(100)])
    assert analyze(path).incidents == ()
    assert main(["analyze", str(path)]) == 0
    assert "nothing found" in capsys.readouterr().out


def test_a_rank_whose_host_stopped_enqueuing(tmp_path: Path) -> None:
    started = {0: 9, 1: 9, 2: 7, 3: 9}
    (incident,) = analyze(flight_dumps(tmp_path, started, dict.fromkeys(started, 7))).incidents
    assert [culprit.rank for culprit in incident.culprits] == [2]
    culprit = incident.culprits[0]
    assert (culprit.cause, culprit.detail) == ("never entered", "group 0 (dp) ALLREDUCE seq 8")


def test_a_rank_whose_device_stands_still(tmp_path: Path) -> None:
    started = {0: 9, 1: 9, 2: 8, 3: 9}
    (incident,) = analyze(flight_dumps(tmp_path, started, {0: 7, 1: 7, 2: 5, 3: 7})).incidents
    assert [culprit.rank for culprit in incident.culprits] == [2]
    assert incident.culprits[0].cause == "did not finish"


def test_a_lost_dump_of_a_healthy_rank_hides_nobody(tmp_path: Path) -> None:
    started = {0: 9, 1: 9, 2: 8, 3: 9}
    folder = flight_dumps(tmp_path, started, {0: 7, 1: 7, 2: 5, 3: 7})
    (folder / "dump_3").unlink()
    (incident,) = analyze(folder).incidents
    assert [culprit.rank for culprit in incident.culprits] == [2]


def test_a_rank_without_a_dump_is_named_when_all_others_wait(tmp_path: Path) -> None:
    started = dict.fromkeys(range(4), 9)
    folder = flight_dumps(tmp_path, started, dict.fromkeys(started, 7))
    (folder / "dump_1").write_bytes(b"")
    found = analyze(folder)
    assert [culprit.rank for culprit in found.incidents[0].culprits] == [1]
    assert any("rank 1" in line for line in found.missing)


def test_all_done_is_no_incident(tmp_path: Path) -> None:
    started = dict.fromkeys(range(4), 9)
    found = analyze(flight_dumps(tmp_path, started, started))
    assert found.incidents == ()
    assert any("all that was enqueued is done" in line for line in found.missing)


@pytest.mark.parametrize("name", ["none", "empty", "notes.txt", "dump_3"])
def test_what_is_no_trace_is_refused_with_what_is_wanted(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello\n")
    (tmp_path / "dump_3").write_bytes(pickle.dumps({"version": "2.9", "entries": []}))
    with pytest.raises(TraceError, match=name):
        analyze(tmp_path / name)
    assert main(["analyze", str(tmp_path / name)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_prints_verdicts_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = {0: 9, 1: 7}
    folder = flight_dumps(tmp_path, started, dict.fromkeys(started, 7))
    assert main(["analyze", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "HANG" in text
    assert "rank 1" in text
    assert "keepstep report" not in text
    assert main(["analyze", str(folder), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["incidents"][0]["culprits"][0]["rank"] == 1
    assert isinstance(content["missing"], list)


@with_samples
@pytest.mark.parametrize("sample", ["gpu_error_2nd", "lock_gil_1st"])
def test_the_injected_ranks_of_real_dumps(sample: str) -> None:
    folder = SAMPLES / "flight_recorder" / sample
    if not folder.exists():
        pytest.skip(f"{folder} is not there")
    (incident,) = analyze(folder).incidents
    assert incident.kind == "hang"
    assert sorted(culprit.rank or 0 for culprit in incident.culprits) == [9, 14]


@with_samples
def test_the_injected_episodes_of_a_real_log() -> None:
    path = SAMPLES / "megatron_log" / "1f1b_dp2_tp8_pp8.log.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    found = analyze(path).incidents
    episodes = [(15, 85), (120, 190), (230, 300), (340, 410)]
    assert len(found) == len(episodes)
    for incident, (onset, relief) in zip(found, episodes, strict=True):
        assert abs((incident.onset_step or 0) - onset) <= 3
        assert abs((incident.relief_step or 0) - relief) <= 3


@with_samples
@pytest.mark.parametrize(
    ("table", "ranks", "slowdown"), [("trace-AR.parquet", [0], 1.973), ("trace-ST.parquet", [6, 7], 1.179)]
)
def test_the_stragglers_of_real_tables(table: str, ranks: list[int], slowdown: float) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow (extra `traces`)")
    path = SAMPLES / "straggler_tables" / table
    if not path.exists():
        pytest.skip(f"{path} is not there")
    (incident,) = analyze(path).incidents
    assert [culprit.rank for culprit in incident.culprits] == ranks
    assert incident.job_slowdown == pytest.approx(slowdown, abs=0.02)


def test_the_slow_rank_of_call_logs_and_its_episode(tmp_path: Path) -> None:
    for rank, calls in call_logs(60, range(30, 45), {1: 2.0}, lost={2: 25, 3: 25}).items():
        (tmp_path / f"rank_{rank}.log").write_text(
            "".join(
                f"[save_count 1] [{call.at_s:.9f}] [Rank {rank}] Fun {call.function} Data {call.nbytes} "
                "stream 0x5585 opCount 1\n"
                for call in calls
            )
        )
    (incident,) = analyze(tmp_path).incidents
    assert [culprit.rank for culprit in incident.culprits] == [1]
    assert (incident.relief_step or 0) - (incident.onset_step or 0) == 15


@pytest.mark.parametrize("form", ["[save_count 1] {} stream 0x5585 opCount 1", "{} stream 0x5585"])
def test_one_stalled_step_of_call_logs_and_the_logs_beside_them(tmp_path: Path, form: str) -> None:
    logs = call_logs(40, range(0), {})
    begun_s = logs[0][len(logs[0]) // 2].at_s
    for rank, calls in logs.items():
        # Rank 2 stands still for 2 s; the others wait for it, and go on after it.
        late = {0: 2.2, 1: 2.21, 2: 2.0, 3: 2.22}[rank]
        lines = [
            form.format(f"[{at_s:.9f}] [Rank {rank}] Fun {call.function} Data {call.nbytes}") + "\n"
            for call in calls
            for at_s in (call.at_s + (late if call.at_s > begun_s else 0.0),)
        ]
        (tmp_path / f"rank_{rank}.log").write_text("".join(lines))
    megatron_log(tmp_path / "training.log", [1.0] * 40)
    (tmp_path / "notes.txt").write_text("hello\n")
    found = analyze(tmp_path)
    (incident,) = found.incidents
    assert [culprit.rank for culprit in incident.culprits] == [2]
    assert incident.relief_step == (incident.onset_step or 0) + 1
    assert any("one stalled step" in line for line in incident.evidence)
    assert any("training.log (training log), left aside" in line for line in found.missing)


@with_samples
@pytest.mark.parametrize(
    ("gone", "told"), [([3], "operations of ranks 12,28,44"), ([0], "operations of ranks 0")]
)
def test_ranks_that_a_table_leaves_out_are_said(gone: list[int], told: str, tmp_path: Path) -> None:
    """Shuffled, and without some replicas of the pipeline."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    whole = parquet.read_table(SAMPLES / "straggler_tables" / "trace-AR.parquet")
    kept = [row for row, replica in enumerate(whole.column("dp_rank").to_pylist()) if replica not in gone]
    random.Random(1).shuffle(kept)
    path = tmp_path / "part.parquet"
    parquet.write_table(whole.take(arrow.array(kept)), path)
    found = analyze(path)
    assert any(told in line for line in found.missing)
    assert [c.rank for one in found.incidents for c in one.culprits] == ([0] if 0 not in gone else [])


@with_samples
def test_the_slow_rank_of_a_real_call_log() -> None:
    path = SAMPLES / "megatrace_log" / "log_rank2_slow.tar.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    (incident,) = analyze(path).incidents
    assert [culprit.rank for culprit in incident.culprits] == [2]
    assert abs((incident.relief_step or 0) - (incident.onset_step or 0) - 11) <= 1


def test_a_layout_tells_where_culprits_are_and_must_have_their_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, calls in call_logs(40, range(20, 30), {1: 2.0}).items():
        lines = [
            f"[save_count 1] [{c.at_s:.9f}] [Rank {rank}] Fun {c.function} Data {c.nbytes} stream 0x5 opCount 1\n"
            for c in calls
        ]
        (tmp_path / f"rank_{rank}.log").write_text("".join(lines))
    assert main(["analyze", str(tmp_path), "--layout", "tp2-dp2", "--json"]) == 1
    (incident,) = json.loads(capsys.readouterr().out)["incidents"]
    assert (incident["culprits"][0]["rank"], incident["culprits"][0]["detail"][-10:]) == (1, "tp 1, dp 0")
    for layout, said in (
        ("dp2", "has rank 3, but --layout dp2 has ranks 0 to 1"),
        ("tp2dp2", "write it like"),
    ):
        assert main(["analyze", str(tmp_path), "--layout", layout]) == 2
        assert said in capsys.readouterr().err


def test_a_run_folder_gives_what_its_controller_wrote(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "status.json").write_text("{}")
    (tmp_path / "incidents").mkdir()
    log = analyze(megatron_log(tmp_path.parent / "log.txt", [1.0] * 40 + [2.0] * 40)).incidents[0]
    (tmp_path / "incidents" / "0001.json").write_bytes(incident_to_json(log))
    (tmp_path / "incidents" / "0002.json").write_bytes(incident_to_json(log)[:200])
    found = analyze(tmp_path)
    assert found.incidents == (log,)
    (line,) = found.missing
    assert "0002.json: is no incident of keepstep" in line
    assert "\n" not in line


def test_what_cannot_be_read_of_a_run_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "nodes" / "a"
    folder.mkdir(parents=True)
    (tmp_path / "run.json").write_text('{"command": ["train')
    good = '{"step": 1, "ranks": {"0": {"t": 1.0, "d": 0.5}}}'
    half = '{"step": 2, "ranks": {"0": {"t": 1.5, "d": 0.5}, "1": {"t": 1.5}}}'
    (folder / "iterations.jsonl").write_text(f"{good}\n{half}\n[]\n{good[:20]}")
    found = analyze(tmp_path)
    assert any("run.json: not the JSON that keepstep writes" in line for line in found.missing)
    assert any(line.endswith("iterations.jsonl: 3 lines cannot be read") for line in found.missing)


def test_a_run_folder_without_a_controller_is_judged_by_its_iterations(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    folder = tmp_path / "nodes" / "1"
    folder.mkdir(parents=True)
    lines: list[str] = []
    for step in range(60):
        slow = 30 <= step < 45
        total = (1.0 if slow else 0.5) + 0.001 * (step % 3)
        ranks = {
            str(rank): {"t": step, "d": total, "self": total - 0.1 if rank == 5 else 0.4, "blocked": 0.1}
            for rank in (4, 5, 6, 7)
        }
        lines.append(json.dumps({"step": step, "ranks": ranks}) + "\n")
    (folder / "iterations.jsonl").write_text("".join(lines))
    found = analyze(tmp_path)
    (incident,) = found.incidents
    assert [culprit.rank for culprit in incident.culprits] == [5]
    assert (incident.onset_step, incident.relief_step, incident.status) == (30, 45, "relieved")
    assert "node 0" in found.missing[0]
    (folder / "iterations.jsonl").write_text("")
    assert analyze(tmp_path).incidents == ()


def test_a_table_whose_durations_are_lost_is_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "rank": rank,
            "step": step,
            "optype": "forward-compute",
            "start_ts": 0.0,
            "duration": 0.0,
            "seq_id": 0,
        }
        | {"dp_rank": rank, "stage": 0}
        for rank in range(2)
        for step in range(3)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="its operations take no time"):
        analyze(tmp_path / "t.parquet")


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dump_0")
    with pytest.raises(TraceError, match="dump_0: is a FIFO"):
        analyze(tmp_path / "dump_0")
    with pytest.raises(TraceError, match="dump_0 cannot be read: is a FIFO"):
        analyze(tmp_path)


def test_a_log_comes_before_what_lies_in_folders_and_empty_files(tmp_path: Path) -> None:
    megatron_log(tmp_path / "train.log", [1.0] * 40)
    (tmp_path / "stderr.0").touch()
    (tmp_path / "dumps").mkdir()
    flight_dumps(tmp_path / "dumps", {0: 9, 1: 9}, {0: 7, 1: 7})
    found = analyze(tmp_path)
    assert found.source == "training log"
    assert any("dumps (flight-recorder dumps), left aside" in line for line in found.missing)


def test_who_went_on_first_is_not_told_by_clocks_that_differ() -> None:
    def steps(behind_s: float, stood_s: float) -> list[CallStep]:
        begins = [float(n) + (5.0 if n > 10 else 0.0) for n in range(20)]
        return [
            CallStep(
                at - behind_s, (Call(at + 0.1 - behind_s, "AllReduce", 1), Call(end - behind_s, "Send", 1))
            )
            for n, at in enumerate(begins)
            for end in (at + (stood_s if n == 10 else 0.9),)
        ]

    told = locate_stall({0: steps(0.0, 5.9), 1: steps(0.02, 5.9005)}, 10.0, 1.0)
    assert told.culprits == ()
    sure = locate_stall({0: steps(0.0, 5.9), 1: steps(0.02, 6.1)}, 10.0, 1.0)
    assert [culprit.rank for culprit in sure.culprits] == [0]
