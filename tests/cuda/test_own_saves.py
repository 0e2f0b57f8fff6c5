"""Scripts without keepstep in them, on NCCL: after a death warm standbys go on with the newest save of their own."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from benchmarks.stand_in.aborts import losses_of
from benchmarks.stand_in.launch import ROOT, is_installed, run, start

AS_IT_IS = ROOT / "benchmarks/stand_in/jobs/unmodified.py"
SCRIPT = ROOT / "tests/e2e/own_saves.py"
RANKS, STEPS, EVERY, WAITS_AT, DIES_AT = 2, 20, 5, 8, 12


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words",
    [
        ["--layout", "fsdp2"],
        pytest.param(["--layout", "ddp"], marks=pytest.mark.long),
        pytest.param(["--layout", "fsdp2", "--asynchronous"], marks=pytest.mark.long),
        pytest.param(["--layout", "deepspeed"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_standbys_go_on_with_the_newest_save_of_the_scripts_own_and_no_loss_changes(
    tmp_path: Path, words: list[str]
) -> None:
    if "deepspeed" in words and not is_installed("deepspeed"):
        pytest.skip("make frameworks installs DeepSpeed")
    plain, folder = tmp_path / "plain", tmp_path / "hurt"
    done = run(AS_IT_IS, [str(SCRIPT), str(plain), str(STEPS), *words], plain, ranks=RANKS, values=True)
    assert done.exit_code == 0, done.console
    words = [str(folder), str(STEPS), *words, "--wait-at", str(WAITS_AT), "--die", "1", str(DIES_AT)]
    flags, settings = ("--max-restarts", "1", "--verbose"), {"KEEPSTEP_STANDBY_IDLE_S": "0.5"}
    with start(AS_IT_IS, [str(SCRIPT), *words], folder, ranks=RANKS, flags=flags, values=True, nvml=True,
               settings=settings) as job:  # fmt: skip
        until_s = time.monotonic() + 300
        while "standbys are warm" not in job.console() and time.monotonic() < until_s:
            assert not job.is_over(), job.console()
            time.sleep(0.05)
        (folder / "go").touch()
        done = job.finish(300)
    assert done.exit_code == 0, done.console
    assert re.search(r"training again .* after rank 1 was killed \(ended \S+, standbys ", done.console)
    incidents = [json.loads(one.read_bytes()) for one in (folder / "run/incidents").glob("*.json")]
    (incident,) = [one for one in incidents if one["kind"] == "crash"]
    assert incident["recovery"]["standbys"] == RANKS, done.console
    told = {one["rank"]: (one["gpu"], one["held_bytes"]) for one in incident["recovery"]["gpu_memory"]}
    assert {rank: gpu for rank, (gpu, _) in told.items()} == {0: 0, 1: 1}, done.console
    assert f"GPU 1: rank 1 had {told[1][1] / 1e9:.1f} GB, " in done.console
    assert all(one["free_bytes"] > one["held_bytes"] > 0 for one in incident["recovery"]["gpu_memory"])
    newest = DIES_AT - DIES_AT % EVERY
    for rank in range(RANKS):
        begun = [int(line.split()[0]) for line in (folder / f"begun-{rank}").read_text().splitlines()]
        # A save in the background may not have been whole yet.
        assert begun in [[0, newest], *([[0, newest - EVERY]] if "--asynchronous" in words else [])]
    whole = losses_of(plain, RANKS)
    assert all(set(steps) == set(range(STEPS)) for steps in whole)
    assert losses_of(folder, RANKS) == whole
