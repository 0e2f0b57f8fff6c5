import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.launch.local_run import LocalRun


def run(folder: Path, *, quiet: bool = False, verbose: bool = False) -> LocalRun:
    job: Any = SimpleNamespace(quiet=quiet, verbose=verbose)
    nothing: Any = None
    return LocalRun(job, folder, folder / "secret", nothing)


@pytest.mark.parametrize(
    ("flags", "heard"),
    [({"quiet": True}, "w"), ({}, "ws"), ({"verbose": True}, "wsn"), ({"quiet": True, "verbose": True}, "w")],
)
def test_how_much_is_said(
    flags: dict[str, bool], heard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run(tmp_path, **flags)
    told.warn("w")
    told.say("s")
    told.note("n")
    assert capsys.readouterr().err == "".join(f"keepstep: {letter}\n" for letter in heard)


def test_the_end_is_written(tmp_path: Path) -> None:
    run(tmp_path).ended(3, "rank 0: exit code 3", "training")
    ending = json.loads((tmp_path / "end.json").read_text())
    assert (ending["exit_code"], ending["reason"]) == (3, "rank 0: exit code 3")


def test_the_end_names_the_newest_incident_and_the_nodes_that_it_blames(tmp_path: Path) -> None:
    (tmp_path / "incidents").mkdir()
    for number, nodes in (("0001", ["gpu-1"]), ("0012", ["gpu-7", "gpu-3", "gpu-7", ""])):
        verdict = {"culprits": [{"node": node, "rank": 3} for node in nodes]}
        (tmp_path / f"incidents/{number}.json").write_text(json.dumps(verdict))
    run(tmp_path).ended(75, "rank 3: ECC error", "infrastructure", "hardware")
    ending = json.loads((tmp_path / "end.json").read_text())
    assert (ending["incident"], ending["nodes"]) == ("0012", ["gpu-3", "gpu-7"])
    assert (ending["category"], ending["cause"]) == ("infrastructure", {"class": "node", "kind": "hardware"})
    run(tmp_path).ended(0, "finished", "finished")
    ending = json.loads((tmp_path / "end.json").read_text())
    assert (ending["incident"], ending["nodes"], "cause" in ending) == ("", [], False)


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "gone", quiet=True).ended(0, "finished", "finished")
    assert capsys.readouterr().err.startswith(f"keepstep: {tmp_path}/gone/end.json: cannot be written: ")
