"""Parts of `benchmarks.gpu` on the stand-in, so that a GPU is not the first to run them. It is one GPU here, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stand_in.faults import write_card
from benchmarks.stand_in.launch import PYTHON, ROOT, environment

LIMIT_S = 900


def lines_of(part: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The lines of a part by name, all of which say that they are a stand-in's."""
    settings = {"STAND_IN_DEVICES": "1", "STAND_IN_MEMORY_GB": "8"}
    path = folder / "report.json"
    write_card(folder / "cards", 0)
    words = [PYTHON, "-m", "benchmarks.gpu", "--quick", "--part", part, "--json", path]
    with (folder / "console").open("wb") as console:
        bench = subprocess.Popen(
            words,
            env=environment(folder, values=True, nvml=True, settings=settings),
            cwd=ROOT,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )
        try:
            code = bench.wait(LIMIT_S)
        finally:
            if bench.poll() is None:
                os.killpg(bench.pid, signal.SIGKILL)
                bench.wait()
    said = (folder / "console").read_text(errors="replace")
    assert code == 0, said
    report = json.loads(path.read_text())
    assert report["left_out"] == [], said
    assert report["bench"] == "gpu, stand-in"
    assert all(one["met"] is None and "stand-in" in one["limit"] for one in report["lines"])
    return {one["name"].removeprefix("stand-in: "): one for one in report["lines"]}


@pytest.mark.long
def test_the_gate(tmp_path: Path) -> None:
    lines = lines_of("gate", tmp_path)
    meanwhile = "while the gate holds the compute stream: done meanwhile"
    found = {
        name: lines[name]["value"]
        for name in (
            "the gate stands",
            f"a copy to pinned memory on another stream {meanwhile}",
            f"cudaMalloc {meanwhile}",
            "the held step is made once the gate opens",
            "abort of an all-reduce that never ends, under load: steps fed while the gate was closed",
        )
    }
    assert list(found.values()) == ["yes", "2 of 2", "2 of 2", "2 of 2", "0 of 2"], found
    assert lines["step time added by the gate, GPU-bound"]["peers"]["pairs"] >= 2


@pytest.mark.long
def test_snapshots(tmp_path: Path) -> None:
    lines = lines_of("snapshot", tmp_path)
    assert lines["restored bytes are those saved"]["value"] == "yes"
    waits = lines["waits added to a step by a snapshot"]
    assert waits["value"] == 0, waits
    assert lines["step time added by a snapshot in each step"]["peers"]["pairs"] >= 2


@pytest.mark.long
def test_validation(tmp_path: Path) -> None:
    lines = lines_of("validation", tmp_path)
    for what in ("a healthy GPU", "a GPU that another process loads"):
        assert lines[f"validation of {what}: verdict"]["value"] == "nobody named"
        assert lines[f"validation of {what}: the job is held"]["peers"]["fp32 (TFLOP/s)"] > 0
    assert lines["validation of a link: tested over"]["value"] == "nccl"


@pytest.mark.long
def test_recovery(tmp_path: Path) -> None:
    lines = lines_of("recovery", tmp_path)
    for way in ("warm standby", "in place"):
        for what in ("kill -9", "exception", "kernel error"):
            assert lines[f"{what} to the next step of all, {way}"]["peers"]["times"] == 1
        assert lines[f"losses that differ from an undisturbed training's, {way}"]["value"] == 0
        assert f"killed process, {way}: memory free" in lines
        assert lines[f"{way}: ranks taken over by warm standbys"]["value"] == "3 of 3"
    assert lines["in place: ranks that went on in their process"]["value"] == "3 of 3"
