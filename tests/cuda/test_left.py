"""On NCCL a rank that is stopped, or left with exit code 0, is named as on Gloo: others wait for it, and say so."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stand_in.launch import start

JOB = Path(__file__).with_name("left_job.py")


def hangs(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(one.read_bytes()) for one in (folder / "run/incidents").glob("*.json")]
    return [one for one in found if one["kind"] == "hang"]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("stop", "stopped"), pytest.param("leave", "left with exit code 0", marks=pytest.mark.long)],
)
def test_who_others_wait_for_is_named_with_more_than_low_confidence(
    tmp_path: Path, kind: str, cause: str
) -> None:
    # A dead peer is not noticed over NVLink: then only the hang tells.
    settings = {"STAND_IN_NOTICE_DEATH": "0"}
    with start(JOB, [kind], tmp_path, ranks=2, flags=("--no-validate",), settings=settings) as job:
        until_s = time.monotonic() + 120
        while not (named := [one for one in hangs(tmp_path) if one["culprits"]]):
            assert time.monotonic() < until_s, job.console()
            assert not job.is_over(), job.console()
            time.sleep(0.2)
    (culprit,) = named[0]["culprits"]
    assert (culprit["rank"], culprit["cause"]) == (1, cause)
    assert culprit["confidence"] in ("medium", "high")
