"""Where the shim or the plugin cannot see NCCL one line says so, and what to do; the training goes on."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.stand_in.launch import run


def test_what_is_not_seen_of_nccl_is_told_once_and_the_job_trains_on(tmp_path: Path) -> None:
    words = ["--layout", "ddp", "--steps", "120", "--layers", "4"]
    done = run(
        Path(__file__).with_name("wrapped_job.py"), words, tmp_path, ranks=4, kernel_us=2000, timeout_s=180
    )
    assert done.exit_code == 0, done.console
    assert all(f"rank {rank} is done" in done.console for rank in range(4))
    unseen = "NCCL's calls are not seen, so a slow GPU is not told from a slow host: "
    lines = re.findall(r"rank \d on .*", done.console)
    told = [line for line in lines if "not seen" in line or "not told" in line]
    begins = {line.split(" on ")[0]: line.split(": ", 1)[1] for line in told}
    assert len(told) == 3, done.console
    assert begins["rank 0"].startswith(f"{unseen}keepstep's library is not in LD_PRELOAD")
    assert begins["rank 1"].startswith(
        "a slow or cut link of NCCL is not told: NCCL_PROFILER_PLUGIN=other has"
    )
    assert begins["rank 2"] == f"{unseen}version 2.17.3 is older than 2.18: use NCCL 2.18 or newer"
