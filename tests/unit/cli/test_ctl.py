"""Orders by hand on the command line: what is asked of the controller, and what is said of the scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep import wire
from keepstep.cli import ctl
from keepstep.core.errors import UsageError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("drain", "drain: give one node, by name or node rank"),
        ("drain n1 --now", "no --now, nodes take over a step that is sealed"),
        ("restart --dry-run", "no --dry-run, which is of exchange, replace, drain"),
        ("replace n1 --reason x", "no --reason, which is of drain"),
        (f"drain n1 --reason {'x' * 121}", "--reason has 121 characters; give 120 at most"),
    ],
)
def test_what_has_no_meaning_is_told(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ctl.main(["run", *words.split()])


def test_swap_is_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[wire.Message] = []

    def ask(name: str, question: wire.Message, *_: Any, **__: Any) -> wire.Operated:
        asked.append(question)
        return wire.Operated("n1 would leave the job")

    monkeypatch.setattr(ctl, "ask", ask)
    for verb in ("swap", "replace"):
        assert ctl.main([str(tmp_path), verb, "n1", "--dry-run"]) == 0
    assert asked == [wire.Operate("replace", False, ("n1",), "", True)] * 2


@pytest.mark.parametrize(
    ("drains", "flags", "said"),
    [
        (
            {},
            [],
            "no scheduler is told, as no `keepstep slurm` is at work: keep other jobs from the node yourself",
        ),
        (
            {"drains": "keepstep slurm"},
            [],
            "keepstep slurm has Slurm drain it; the job's output tells whether Slurm does",
        ),
        ({"drains": "keepstep slurm"}, ["--dry-run"], "keepstep slurm would have Slurm drain it;"),
    ],
)
def test_who_tells_the_scheduler_is_said(
    drains: dict[str, str],
    flags: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"id": "12", **drains}))
    asked: list[wire.Message] = []

    def ask(name: str, question: wire.Message, *_: Any, **__: Any) -> wire.Operated:
        asked.append(question)
        return wire.Operated("n1 has left the job")

    monkeypatch.setattr(ctl, "ask", ask)
    assert ctl.main([str(tmp_path), "drain", "n1", "--reason", "fan\n\x1b[31m", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}: n1 has left the job"
    assert lines[1].startswith(f"{tmp_path}: {said}")
    assert asked == [wire.Operate("drain", False, ("n1",), r"fan\n\x1b[31m", bool(flags))]
