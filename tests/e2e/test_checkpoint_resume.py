"""A training that is killed and resumes from its node's cache gives the very losses of an undisturbed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("checkpoint_resume")]

JOB = Path(__file__).with_name("checkpoint_train.py")
STEPS = 12
PATIENCE_S = 180


def run(
    folder: Path, *arguments: str, flags: tuple[str, ...], run: str = "run", **environment: str
) -> tuple[int, str]:
    """Run the job with two ranks; exit code, and what was said."""
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / run), *flags]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(JOB), str(folder), str(STEPS), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    return done.returncode, done.stderr


def train(
    folder: Path, *arguments: str, flags: tuple[str, ...] = (), kind: str = "ddp"
) -> tuple[dict[str, list[str]], str]:
    """Run the job without an agent; the losses, and what was said."""
    folder.mkdir()
    code, said = run(folder, *arguments, flags=("--no-watch", *flags), KIND=kind)
    assert code == 0, said
    return losses_of(folder), said


def losses_of(folder: Path) -> dict[str, list[str]]:
    """The losses by rank and step, one for each time the step was made."""
    losses: dict[str, list[str]] = {}
    for rank in range(2):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            losses.setdefault(f"{rank}/{step}", []).append(loss)
    return losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("jobs")
    found = {kind: train(folder / kind, kind=kind)[0] for kind in ("ddp", "fsdp2")}
    assert all(len(losses) == 2 * STEPS for losses in found.values())
    return found


@pytest.mark.parametrize(
    ("kind", "rank", "step", "where", "resumed"),
    [
        ("ddp", 1, 6, "forward", (5, 6)),  # the copy of step 6 may or may not be done
        ("ddp", 0, 6, "backward", (5, 6)),
        ("ddp", 1, 5, "before save", (5,)),
        pytest.param("ddp", 0, 5, "after save", (5, 6), marks=pytest.mark.long),
        ("ddp", 1, 0, "forward", (0,)),
        ("fsdp2", 1, 6, "forward", (5, 6)),
    ],
)
def test_a_killed_rank_costs_no_bit(
    tmp_path: Path,
    undisturbed: dict[str, dict[str, list[str]]],
    kind: str,
    rank: int,
    step: int,
    where: str,
    resumed: tuple[int, ...],
) -> None:
    arguments = (str(rank), str(step), where)
    losses, said = train(tmp_path / "killed", *arguments, flags=("--max-restarts", "1"), kind=kind)
    starts = {(tmp_path / "killed" / f"start-{r}-1").read_text() for r in range(2)}
    assert len(starts) == 1
    start = int(starts.pop())
    assert start in resumed
    assert (f"resumed after step {start} from this node's cache" in said) == (start > 0)
    assert losses.keys() == undisturbed[kind].keys()
    for name, found in losses.items():
        assert set(found) == set(undisturbed[kind][name]), name


def same(folder: Path, undisturbed: dict[str, list[str]]) -> bool:
    losses = losses_of(folder)
    return losses.keys() == undisturbed.keys() and all(
        set(found) == set(undisturbed[name]) for name, found in losses.items()
    )


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_a_new_run_with_empty_caches_resumes_from_storage(
    tmp_path: Path, undisturbed: dict[str, dict[str, list[str]]], kind: str
) -> None:
    storage = tmp_path / "ckpt"
    flags = ("--checkpoint-dir", str(storage), "--checkpoint-every", "0")
    code, said = run(tmp_path, "1", "6", "forward", flags=flags, PERSIST_AT="2,4", KIND=kind)
    assert code == 128 + 9, said
    assert "3 snapshots of rank 0 take" in said
    (tmp_path / "start-0-0").unlink()
    code, said = run(tmp_path, flags=flags, run="again", KIND=kind)
    assert code == 0, said
    assert f"resumed after step 4 from storage {storage}" in said
    assert {(tmp_path / f"start-{rank}-0").read_text() for rank in range(2)} == {"4"}
    assert same(tmp_path, undisturbed[kind])


def test_a_rank_whose_cache_is_damaged_takes_all_back_to_storage(
    tmp_path: Path, undisturbed: dict[str, dict[str, list[str]]]
) -> None:
    storage = tmp_path / "ckpt"
    flags = ("--checkpoint-dir", str(storage), "--checkpoint-every", "0", "--max-restarts", "1")
    code, said = run(
        tmp_path, "0", "7", "backward", flags=flags, PERSIST_AT="3,5", DAMAGED_RANK="1", KIND="ddp"
    )
    assert code == 0, said
    assert "the snapshot of rank 1 at step" in said
    assert f"resumed after step 5 from storage {storage}" in said
    assert same(tmp_path, undisturbed["ddp"])


def test_an_agent_that_is_killed_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    storage = tmp_path / "ckpt"
    flags = ("--checkpoint-dir", str(storage), "--checkpoint-every", "0")
    code, said = run(tmp_path, flags=flags, PERSIST_AT="2,4", KILL_AGENT_AT="4", KIND="ddp")
    assert code == 0, said
    log = (tmp_path / "run" / "nodes" / "0" / "agent.log").read_text()
    assert log.count("agent of node 0") == 2
    # Step 4 is put off if the dead agent had not told that step 2 was on storage; then the last step goes there, too.
    first, *later = sorted(int(path.parent.name[5:15]) for path in storage.glob("*/manifest.json"))
    assert first == 2
    assert later
    assert min(later) >= 4
    assert "is lost" not in said


def test_the_interval_brings_steps_to_storage_and_the_end_waits_for_them(tmp_path: Path) -> None:
    storage = tmp_path / "ckpt"
    flags = ("--checkpoint-dir", str(storage), "--checkpoint-every", "5", "--checkpoint-keep", "1")
    code, said = run(tmp_path, flags=flags, KIND="ddp")
    assert code == 0, said
    stored = sorted(path.parent.name for path in storage.glob("step-*/manifest.json"))
    assert stored[-1].startswith("step-0000000012-")  # the last step, which the interval does not divide
    assert "is lost" not in said
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli", "checkpoint", "verify", str(storage)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_training_ends_well_when_storage_cannot_be_written(tmp_path: Path) -> None:
    storage = tmp_path / "ckpt"
    storage.mkdir()
    (storage / "step-0000000005-i0000").write_text("a file where the folder should be")
    flags = ("--checkpoint-dir", str(storage), "--checkpoint-every", "5")
    os.environ["KEEPSTEP_CHECKPOINT_WAIT_S"] = "1"
    try:
        code, said = run(tmp_path, flags=flags, KIND="ddp")
    finally:
        del os.environ["KEEPSTEP_CHECKPOINT_WAIT_S"]
    assert code == 0, said
    assert f" is not on storage {storage} and is lost" in said
    status = subprocess.run(
        [sys.executable, "-m", "keepstep.cli", "status", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert "step 5 (incarnation 0): rank 0's part is not on storage" in status.stdout


def test_without_keepstep_run_nothing_is_kept_and_that_is_said(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import keepstep.checkpoint as c\nassert c.load({'a': 1}) is None\nc.save({'a': 1}, 1)\nc.wait()\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP")}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=PATIENCE_S,
    )
    assert done.stderr == (
        "keepstep: no checkpoint is kept in memory: this process was not started by `keepstep run`\n"
    )
