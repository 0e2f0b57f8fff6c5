"""FSDP2 jobs save and load through DCP on keepstep's storage, with other numbers of ranks, and refuse damage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.warm.forked import WarmPopen

from keepstep.cli import main

JOB = Path(__file__).with_name("dcp_job.py")


def run(verb: str, world_size: int, folder: Path) -> tuple[list[int], str]:
    """Exit codes of the ranks and what they said."""
    words = [verb, folder / "run", folder / "reference.pt", folder / f"meet-{verb}-{world_size}"]
    ranks = [
        WarmPopen(
            [sys.executable, JOB, *map(str, words)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], "\n".join(said)


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_saved_by_two_ranks_loaded_by_one_and_four(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes, said = run("save", 2, tmp_path)
    assert codes == [0, 0], said
    for world_size in (1, 4):
        codes, said = run("load", world_size, tmp_path)
        assert codes == [0] * world_size, said
    where = str(tmp_path / "run")
    assert main(["checkpoint", "verify", where]) == 0
    assert main(["checkpoint", "export", where, "--safetensors", str(tmp_path / "all.safetensors")]) == 0
    found = load_file(tmp_path / "all.safetensors")
    assert tuple(found["model.0.weight"].shape) == (10, 11)
    assert tuple(found["optimizer.state.2.weight.exp_avg"].shape) == (7, 10)
    damaged = tmp_path / "run" / "step-0000000005-i0000" / "rank-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    for at in range(begin, len(content), 16):
        content[at] ^= 1
    damaged.write_bytes(content)
    codes, said = run("load", 1, tmp_path)
    assert codes == [1], said
    assert "rank-00001.safetensors: bytes of storage" in said
    assert main(["checkpoint", "verify", where]) == 1
    assert "rank-00001.safetensors: its bytes are not those that were written" in capsys.readouterr().out
