"""Lightning with keepstep's callback: a killed rank costs no bit of a loss, and no sample is repeated or skipped."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None,
        reason="Lightning is not installed: pip install 'keepstep[lightning]'",
    ),
]

JOB = Path(__file__).with_name("lightning_train.py")
BATCHES = 15  # three epochs of five, of four samples of each of two ranks
PATIENCE_S = 240


def train(folder: Path, strategy: str, ranks: int = 2, /, **settings: str) -> tuple[list[list[str]], str]:
    """What each rank wrote, in order and with what was done again once; and what was said."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--no-watch",
        "--max-restarts",
        "1",
        "--run-dir",
        str(folder / "run"),
        "--nproc-per-node",
        str(ranks),
        str(JOB),
        str(folder),
        strategy,
    ]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [(folder / f"lines-{rank}").read_text().splitlines() for rank in range(ranks)]
    assert not settings.get("DIE") or "resumed after step" in done.stderr
    return [list(dict.fromkeys(one)) for one in lines], done.stderr


def batches(lines: list[str]) -> list[str]:
    return [line for line in lines if line[0].isdigit()]


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("7 forward", {}),
        *(
            pytest.param(where, settings, marks=pytest.mark.long)
            for where, settings in (
                ("7 after step", {"ACCUMULATE": "2"}),
                ("9 after validation", {}),
                ("9 epoch end", {"WORKERS": "1"}),
                ("8 forward", {"LOADER": "stateful"}),
                ("6 forward", {"LOADER": "stream", "ACCUMULATE": "2"}),
                ("8 forward", {"AVERAGE": "1"}),
            )
        ),
    ],
)
def test_a_killed_rank_costs_no_bit_and_no_sample(
    tmp_path: Path, where: str, settings: dict[str, str]
) -> None:
    undisturbed, _ = train(tmp_path / "undisturbed", "ddp", KEEP="no", **settings)
    found, _ = train(tmp_path / "killed", "ddp", DIE=where, **settings)
    assert found == undisturbed
    assert all(len(batches(lines)) == BATCHES for lines in found)


@pytest.mark.long
def test_shards_of_fsdp2_come_back(tmp_path: Path) -> None:
    undisturbed, _ = train(tmp_path / "undisturbed", "fsdp2", KEEP="no")
    found, _ = train(tmp_path / "killed", "fsdp2", DIE="7 forward")
    assert found == undisturbed
