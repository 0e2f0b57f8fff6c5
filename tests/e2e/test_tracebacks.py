"""Tracebacks of a watched process: those of an unwatched one, with true lines where keepstep's functions are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

JOB = Path(__file__).with_name("traceback_job.py")
OWN = "src/keepstep/"
PATIENCE_S = 240
FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n    (?P<text>.+)$', re.M
)


def tracebacks(*command: str) -> dict[str, list[tuple[str, ...]]]:
    """Frames by place: file, line, function and text."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [*command, str(JOB)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **alone},
        check=True,
    )
    told = re.split(r"^in (\w+)\n", done.stdout, flags=re.M)[1:]
    return {name: FRAME.findall(text) for name, text in zip(told[::2], told[1::2], strict=True)}


def test_no_line_of_another_function_is_shown(tmp_path: Path) -> None:
    plain = tracebacks(sys.executable)
    run = "-m", "keepstep.cli", "run", "--run-dir", str(tmp_path / "run"), "--nproc-per-node", "1"
    watched = tracebacks(sys.executable, *run)
    assert watched.keys() == plain.keys() == {"forward", "backward", "sizes", "data", "saving"}
    for place, frames in watched.items():
        more = [frame for frame in frames if frame not in plain[place]]
        assert [frame for frame in frames if frame not in more] == plain[place]
        assert more
        for file, line, name, text in more:
            assert Path(file).read_text().splitlines()[int(line) - 1].strip() == text
            assert OWN in file or text.startswith(f"def {name}(")
