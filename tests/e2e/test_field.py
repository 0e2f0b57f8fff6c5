"""The bench of the field cases on a folder of two: a job that fails and one that must be ended, judged by its truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.field.__main__ import main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

HEAD = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
FAILS = (
    HEAD
    + """
for step in range(80):
    if rank == 1 and step == 60:
        raise FileNotFoundError("shard-00017.tar")
    dist.all_reduce(torch.ones(1)); time.sleep(0.05)
"""
)
GOES_ON = (
    HEAD
    + """
print("no end", flush=True)
while True:
    dist.all_reduce(torch.ones(1)); time.sleep(0.1)
"""
)


@pytest.mark.long
def test_jobs_are_run_judged_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = tmp_path / "samples" / "field_cases"
    truth = {
        "01-fails": {"ranks": 2, "limit_s": 100, "culprits": [1], "kinds": ["crash"], "says": "shard-00017"},
        "02-goes-on": {"ranks": 2, "limit_s": 5, "healthy": True},
        "03-needs": {"ranks": 1, "needs": "no_such_package", "healthy": True},
    }
    for name, script in (("01-fails", FAILS), ("02-goes-on", GOES_ON)):
        (cases / name).mkdir(parents=True)
        (cases / name / "train.py").write_text(script)
    (cases / "truth.json").write_text(json.dumps(truth))
    written = tmp_path / "field.json"
    flags = ["--samples", str(tmp_path / "samples"), "--runs", str(tmp_path / "runs"), "--json", str(written)]
    assert main(flags) == 0
    kept = [json.loads(line) for line in (tmp_path / "field-trials.jsonl").read_text().splitlines()]
    fails, goes_on = kept
    assert (fails["name"], fails["status"], fails["why"]) == ("01-fails", "right", [])
    assert "culprit   rank 1" in fails["verdicts"][-1]
    assert (goes_on["status"], goes_on["cut_off"], goes_on["harmed"]) == ("wrong", True, False)
    assert goes_on["why"] == ["the job did not end by itself"]
    assert str(tmp_path) not in json.dumps(kept)
    told = json.loads(written.read_text())
    assert told["left_out"][0]["name"] == "03-needs"
    assert {line["name"]: line["value"] for line in told["lines"]}["right"] == "1/2"
    capsys.readouterr()
    assert main(flags) == 0  # nothing is run again
    assert (tmp_path / "field-trials.jsonl").read_text().count("\n") == 2
