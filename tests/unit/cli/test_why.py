"""``keepstep why``: the page, JSON, tables of one's own, and errors of one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from keepstep.cli import main
from keepstep.core.incident import Culprit, FailureCause, Incident, SpokenLine
from keepstep.report.incidents import incident_to_json

LOG = """\
2024-03-01 10:00:00 step 1 loss 2.0
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 10, in <module>
[rank1]: Traceback (most recent call last):
[rank3]:     save()
[rank3]: OSError: [Errno 28] No space left on device: '/ckpt/a.pt?token=hf_abcdefghijklmnopqrst'
[rank1]: torch.distributed.DistBackendError: NCCL error in: a.cpp:1, remote process exited or there was a network error
"""
HEALTHY = "step 1 loss 2.0\nstep 2 loss 1.9\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "job.log"
    path.write_text(LOG)
    return path


def test_the_page_names_cause_and_shows_the_traceback_last(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(log)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[:7]] == [
        "FAILED", "cause", "culprit", "first", "then", "advice", "next",
    ]  # fmt: skip
    assert "storage: a disk is full" in out[1]
    assert "job.log:6" in out[3]
    assert [line.partition(": ")[2] for line in out[-4:-1]] == [
        "Traceback (most recent call last):", '  File "train.py", line 10, in <module>', "    save()",
    ]  # fmt: skip
    assert "hf_" not in "\n".join(out)


def test_a_run_that_failed_without_an_incident_is_not_said_to_be_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    for category, code, expected in (("training", 1, 1), ("stopped", 130, 0), ("finished", 0, 0)):
        end = {"exit_code": code, "category": category, "reason": "rank 0: exit code 1", "ended_unix_s": 1.0}
        (tmp_path / "end.json").write_text(json.dumps(end))
        assert main(["why", str(tmp_path)]) == expected
        told = capsys.readouterr().out
        assert ("nothing failed" in told, "rank 0: exit code 1" in told) == (not expected, bool(expected))
        assert main(["why", str(tmp_path), "--json"]) == expected
        assert json.loads(capsys.readouterr().out)["class"] == ("other" if expected else "none")


def test_json_has_class_kind_root_line_and_culprits(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(log), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["class"], told["sub"]) == ("storage", "no-space")
    assert told["culprits"] == ["path /ckpt/a.pt?token=***"]
    assert told["root_line"].startswith("[rank3]: OSError: [Errno 28] No space left on device")
    assert told["line"] == 6


def test_a_healthy_log_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.log"
    path.write_text(HEALTHY)
    assert main(["why", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == "none"
    assert main(["why", str(path)]) == 0
    assert capsys.readouterr().out == "nothing failed (2 lines)\n"


def test_a_folder_has_a_log_of_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = "torch.distributed.DistBackendError: NCCL error in: a.cpp:1, remote process exited\n"
    for rank in range(4):
        said = "ValueError: odd\n" if rank == 2 else lost
        folder = tmp_path / f"rank-{rank:05}"
        folder.mkdir()
        (folder / "stderr.log").write_text(f"2024-03-01 10:00:0{4 - rank} {said}")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert main(["why", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["culprits"] == ["rank 2"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "gzip"])
def test_other_encodings_are_read(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(gzip.compress(LOG.encode()) if encoding == "gzip" else LOG.encode(encoding))
    assert main(["why", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["sub"] == "no-space"


def test_explain_shows_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "--explain", "NVRM: Xid (PCI:0000:9b:00): 95, pid=1, x"]) == 0
    out = capsys.readouterr().out
    assert "xid-95" in out
    assert "gpu, pci 0000:9b:00" in out
    assert main(["why", "--explain", "all is well"]) == 1


def test_own_rows_go_first(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "own.toml"
    table.write_text(
        '[[row]]\nname = "own"\nrole = "cause"\nclass = "storage"\nkind = "our-quota"\ntitle = "ours"\n'
        'text = "No space left on device: \'/ckpt/"\n'
    )
    assert main(["why", str(log), "--json", "--table", str(table)]) == 1
    assert json.loads(capsys.readouterr().out)["sub"] == "our-quota"
    config = tmp_path / "keepstep.toml"
    config.write_text('[why]\ntables = ["own.toml"]\n')
    monkeypatch.setenv("KEEPSTEP_CONFIG", str(config))
    assert main(["why", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["sub"] == "our-quota"
    config.write_text('[why]\ntables = "own.toml"\n')
    assert main(["why", str(log), "--json"]) == 2
    assert "write [why] and tables" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "wants a PATH"),
        (["/nowhere/at/all"], "there is nothing there"),
        (["{log}", "3"], "is no run of keepstep"),
        (["{log}", "--table", "/nowhere.toml"], "/nowhere.toml"),
        (["{empty}"], "no log is in it"),
        (["{binary}"], "is no text"),
    ],
)
def test_bad_input_is_told_in_one_line(
    arguments: list[str], said: str, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(bytes(5000) + b"\x01\x02" * 500)
    places = {"log": log, "empty": tmp_path / "empty", "binary": tmp_path / "model.bin"}
    assert main(["why", *(word.format(**places) for word in arguments)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_analyze_hands_such_a_log_on(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(log)]) == 1
    assert "storage: a disk is full" in capsys.readouterr().out
    assert main(["analyze", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["why"]["sub"] == "no-space"
    notes = tmp_path / "notes.txt"
    notes.write_text("hello\n")
    assert main(["analyze", str(notes)]) == 2


def test_a_death_of_a_run_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "incidents").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    assert main(["why", str(run)]) == 0
    culprit = Culprit(
        3, None, "n", confidence="high", detail="exit code 1; OSError: [Errno 28] No space left on device"
    )
    incident = Incident(1, "crash", 5, 5, None, None, (culprit,), (0,), (), (), summary="rank 3 died")
    (run / "incidents" / "0001.json").write_bytes(incident_to_json(incident))
    capsys.readouterr()
    assert main(["why", str(run)]) == 1
    assert "storage: a disk is full" in capsys.readouterr().out
    assert main(["why", str(run), "1", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["class"], told["culprits"]) == ("storage", ["rank 3 on n"])
    assert main(["why", str(run), "7"]) == 2
    assert "no death in incident 7" in capsys.readouterr().err


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A run whose rank 3 met a full disk in incarnation 1, of which two others told."""
    run = tmp_path / "run"
    (run / "incidents").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    first = SpokenLine("OSError: [Errno 28] No space left on device", 3, "n", "stderr", 14, 1000.25)
    lost = "torch.distributed.DistBackendError: Connection closed by peer [10.0.0.1]:4711"
    followed = tuple(SpokenLine(lost, rank, "n", "stderr", 2, 1000.5 + rank) for rank in (0, 1))
    cause = FailureCause(
        "storage", "no-space", "a disk is full", "high", first=first, following=2, following_ranks=(0, 1),
        followed=followed,
    )  # fmt: skip
    incident = Incident(1, "crash", 5, 5, None, None, (), (0, 1), (), (), incarnation=1, cause=cause)
    (run / "incidents" / "0001.json").write_bytes(incident_to_json(incident))
    steps = "".join(f"step {step}\n" for step in range(10))
    traceback = 'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\n    save()\n'
    told = {
        (3, "stderr.0.log"): "ValueError: of an earlier incarnation\n",
        (3, "stderr.1.log"): f"{steps}{traceback}OSError: [Errno 28] No space left on device\nbye\x1b[2J\n",
        (3, "stderr.1.end.log"): "",
        (0, "stderr.log"): f"step 1\n{lost}\n",
    }
    for (rank, name), text in told.items():
        folder = run / "logs" / f"rank-{rank:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return run


def test_lines_of_a_run_are_those_of_the_cause_and_of_who_followed(
    crashed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(crashed), "1", "--lines"]) == 1
    out = capsys.readouterr().out.split("\n\n")
    assert out[0].splitlines()[-1] == f"next      keepstep why {crashed} 0001 --lines"
    told = out[1].splitlines()
    assert [line.split()[:4] for line in told[:2]] == [
        ["followed", "rank", "0", "+0.25"],
        ["rank", "1", "+1.25", "s"],
    ]
    assert told[2].startswith("missing   no words of rank 1 are in")
    assert out[2].splitlines() == [
        "logs/rank-00003/stderr.1.log  (rank 3)",
        *(f"  {number:>2}  step {number - 1}" for number in range(8, 11)),
        "  11  Traceback (most recent call last):",
        '  12    File "t.py", line 9, in <module>',
        "  13      save()",
        "> 14  OSError: [Errno 28] No space left on device",
        "  15  bye\\x1b[2J",
    ]
    assert out[3].splitlines()[0] == "logs/rank-00000/stderr.log  (rank 0)"
    assert [line[0] for line in out[3].splitlines()[1:]] == [" ", ">"]


def test_lines_as_json(crashed: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(crashed), "--lines", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [(one["log"], one["rank"], one["first"], one["marked"]) for one in told["lines"]] == [
        ("logs/rank-00003/stderr.1.log", 3, 8, [6]),
        ("logs/rank-00000/stderr.log", 0, 1, [1]),
    ]
    assert len(told["lines_missing"]) == 1
    assert main(["why", str(log), "--lines", "--json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["lines"]
    assert (one["first"], one["marked"][0]) == (1, 1)
    assert "hf_" not in str(one)


def test_lines_of_a_log_stand_below_the_page(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(log), "--lines"]) == 1
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("> ")] == ["2", "4", "6", "7"]
    assert main(["why", str(log.with_name("healthy.log").absolute()), "--lines"]) == 2


def test_a_run_that_its_scheduler_ended_says_so(crashed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "the job's time is over (SIGTERM from pid 812 (slurmstepd), uid 0, 60 s before its end)"
    end = {"exit_code": 75, "reason": reason, "cause": {"class": "other", "kind": "time-limit"}}
    (crashed / "end.json").write_text(json.dumps(end))
    assert main(["why", str(crashed)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["ENDED", "cause", "culprit", "first", "advice"]
    assert "other: the job's time was over" in out[1]
    assert out[3].endswith(reason)
    assert main(["why", str(crashed), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["class"], told["sub"], told["culprits"]) == ("other", "time-limit", [])
    assert main(["why", str(crashed), "1"]) == 1
    assert "storage: a disk is full" in capsys.readouterr().out
    (crashed / "end.json").write_text('{"exit_code": "x", "cause": []}')
    assert main(["why", str(crashed)]) == 1
    assert "storage: a disk is full" in capsys.readouterr().out
