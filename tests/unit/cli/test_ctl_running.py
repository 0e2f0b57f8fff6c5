"""Orders on a job that goes on training, on the command line: what is asked, and what is said of the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep import wire
from keepstep.cli import _ctl_running, ctl
from keepstep.core.errors import RunError, UsageError


class Controller:
    """Answers each question as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[wire.Message] = []
        self.answer: wire.Message = wire.Operated("done")
        monkeypatch.setattr(_ctl_running, "ask", self._ask)

    def _ask(self, name: str, question: wire.Message, kind: type, timeout_s: float, **_: Any) -> wire.Message:
        self.asked.append(question)
        assert isinstance(self.answer, kind)
        return self.answer


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    return Controller(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps({"id": "12"}))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("thresholds hang-after", "hang-after: give NAME=VALUE, for example hang-after=300"),
        ("thresholds =3", "=3: give NAME=VALUE"),
        ("thresholds --default hang-after=3", "give the name alone with --default"),
        (f"thresholds a={'9' * 101}", "is too long for a threshold"),
        ("watch", "the following arguments are required: on|off"),
        ("watch maybe", "argument on|off: invalid choice: 'maybe'"),
        ("profile", "the following arguments are required: --ranks"),
        ("profile --ranks 0-16", "give 1 to 16 ranks of the job"),
        ("profile --ranks 4000000", "give 1 to 16 ranks of the job"),
        (f"profile --ranks {'1,' * 200}", "give 1 to 16 ranks of the job"),
        ("profile --ranks 1 --steps 0", "0 is not between 1 and 50"),
        ("profile --ranks 1 --steps 1e9", "invalid int value"),
        ("profile --ranks 0,1 -o x", "-o is of one rank; 2 are given"),
        ("profile --ranks 1 -o .", "is a folder; give a file"),
        ("profile --ranks 1 --timeout 0", "0 is not between 1 and 3600"),
        ("checkpoint soon", "invalid choice: 'soon'"),
        ("--timeout 3 watch off", "give watch right after the run"),
    ],
)
def test_what_has_no_meaning_is_told_in_a_line(words: str, said: str, controller: Controller) -> None:
    with pytest.raises(UsageError) as raised:
        ctl.main(["run", *words.split()])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert controller.asked == []


def test_thresholds_are_a_table(
    run: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        wire.Threshold("mitigate", "off", "order", "auto", "what is done"),
        wire.Threshold("hang-after", "0", "default", "0", "s; \x1b[31m"),
    )
    controller.answer = wire.Tuned(rows, "changed: mitigate auto → off")
    assert ctl.main([str(run), "thresholds", "mitigate=off"]) == 0
    assert controller.asked == [wire.Tune((("mitigate", "off"),))]
    assert capsys.readouterr().out.splitlines() == [
        f"{run}: changed: mitigate auto → off",
        "NAME        VALUE  ORIGIN           MEANING",
        "mitigate    off    order, was auto  what is done",
        r"hang-after  0      default          s; \x1b[31m",
    ]
    ctl.main([str(run), "thresholds", "--default", "mitigate", "--dry-run"])
    assert controller.asked[-1] == wire.Tune((("mitigate", ""),), True, True)
    controller.answer = wire.Tuned(refused="speed is no threshold")
    with pytest.raises(RunError, match=r"not done \(thresholds\): speed is no threshold"):
        ctl.main([str(run), "thresholds", "speed=1"])


def test_watch_and_checkpoint_are_asked_for(
    run: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main([str(run), "watch", "off", "--dry-run"]) == 0
    assert ctl.main([str(run), "checkpoint", "now", "--timeout", "20"]) == 0
    assert ctl.main(["--dry-run", str(run), "checkpoint"]) == 0
    assert controller.asked == [
        wire.Watch(False, True), wire.PersistNow(20.0), wire.PersistNow(300.0, True)
    ]  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [f"{run}: done"] * 3
    controller.answer = wire.Operated(refused="the job is ending")
    with pytest.raises(RunError, match=r"not done \(watch\): the job is ending"):
        ctl.main([str(run), "watch", "on"])


def test_where_each_trace_is_and_why_one_is_not(
    run: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "traces/rank-00003-step-41.json.gz"
    (run / "traces").mkdir()
    (run / name).write_bytes(b"\x1f\x8b")
    controller.answer = wire.Traced(
        (
            wire.TraceFile(3, "here", 41, name, 3 << 20),
            wire.TraceFile(5, "gpu-7", 40, "traces/rank-00005-step-40.json.gz", 1 << 20),
            wire.TraceFile(6, "gpu-7", why="it did\nnot end"),
        )
    )
    assert ctl.main([str(run), "profile", "--ranks", "3,5-6", "--steps", "2"]) == 1
    assert controller.asked == [wire.TraceSteps((3, 5, 6), 2, 120.0)]
    assert capsys.readouterr().out.splitlines() == [
        f"{run}: rank 3: {run / name} (3.0 MiB, from step 41 on)",
        f"{run}: rank 5: traces/rank-00005-step-40.json.gz in the run's folder on gpu-7 (1.0 MiB, from step 40 on)",
        rf"{run}: rank 6: no trace: it did\nnot end",
    ]


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "traces/../x", "/etc/passwd", "traces/rank-00003-step-1.json.gz"]
)
def test_only_a_trace_of_the_run_is_copied(name: str, run: Path, controller: Controller) -> None:
    controller.answer = wire.Traced((wire.TraceFile(3, "here", 41, name, 10),))
    target = run / "copy"
    with pytest.raises(RunError):
        ctl.main([str(run), "profile", "--ranks", "3", "-o", str(target)])
    assert not target.exists()


def test_a_trace_is_copied(run: Path, controller: Controller) -> None:
    name = "traces/rank-00003-step-1.json.gz"
    (run / "traces").mkdir()
    (run / name).write_bytes(b"trace")
    controller.answer = wire.Traced((wire.TraceFile(3, "here", 1, name, 5),))
    assert ctl.main([str(run), "profile", "--ranks", "3", "-o", str(run / "copy")]) == 0
    assert (run / "copy").read_bytes() == b"trace"
