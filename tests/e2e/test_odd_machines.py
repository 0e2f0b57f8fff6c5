"""Real jobs on machines that are not as one thinks: full disks, clocks that are set, rings that nobody writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.marked import marked

from keepstep.ring import RETIRED, RingReader

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PATIENCE_S = 120
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer, over = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(1)
while not over.item():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.03)
    if os.path.exists("die") and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9)
    over[0] = float(os.path.exists("go"))
    dist.all_reduce(over)
"""


class Job:
    """One ``keepstep run`` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.mark = f"KEEPSTEP_TEST_MARK={folder}"
        self.launcher: subprocess.Popen[str] | None = None

    def start(self, script: str, *flags: str, **environ: str) -> None:
        path = self.folder / "job.py"
        path.write_text(textwrap.dedent(script))
        name, _, value = self.mark.partition("=")
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(self.run), *flags, str(path)],
            cwd=self.folder,
            env={**os.environ, name: value, "OMP_NUM_THREADS": "1", **environ},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self) -> tuple[int, str]:
        """Have it end; its exit code, and what it said on stderr."""
        assert self.launcher is not None
        (self.folder / "go").touch()
        _, err = self.launcher.communicate(timeout=PATIENCE_S)
        return self.launcher.returncode, err

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert self.launcher is None or self.launcher.poll() is None, self.launcher.communicate()[1]
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.05)
        return found

    def steps(self) -> list[int]:
        """The steps that are in the log."""
        path = self.run / "nodes/0/iterations.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.run / "status.json").read_text())
        except OSError:
            return {}

    def crashes(self) -> list[dict[str, Any]]:
        """The crashes in the run folder; a machine that is slow for a while has other incidents too."""
        found = [json.loads(one.read_bytes()) for one in (self.run / "incidents").glob("[0-9]*.json")]
        return [one for one in found if one["kind"] == "crash"]

    def notices(self) -> list[str]:
        return [text for node in self.status().get("nodes", ()) for text in node["notices"]]

    def agents(self) -> list[int]:
        found: list[int] = []
        for pid in marked(self.mark):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"keepstep.agent" in words and b"--wait" not in words:
                found.append(pid)
        return found

    def kill_agent(self) -> None:
        """Kill the agent, and wait for the next one."""
        (first,) = self.until(self.agents)
        os.kill(first, signal.SIGKILL)
        self.until(lambda: self.agents() not in ([], [first]))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    left = marked(made.mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if made.launcher:
        made.launcher.communicate()
    assert left == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems can be mounted by root only")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.root
def test_a_full_disk_is_told_once_and_files_follow_when_there_is_room(job: Job, small_disk: Path) -> None:
    job.run = small_disk / "run"
    job.start(TRAIN, "--no-check", "--nproc-per-node", "2", "--max-restarts", "1", "--standbys", "0")
    job.until(lambda: len(job.steps()) > 5)
    fill = small_disk / "fill"
    with fill.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass
    job.kill_agent()
    (job.folder / "die").touch()  # its incident cannot be written, the job begins again
    job.until(lambda: len(job.agents()) == 1 and not job.crashes())
    time.sleep(3)
    before = len(job.steps())
    fill.unlink()
    job.until(job.crashes)
    job.until(lambda: job.status().get("state") == "running" and len(job.steps()) > before + 5)
    code, err = job.finish()
    assert code == 0, err
    assert err.count("cannot be written (No space left on device): watching goes on in memory") == 1, err
    ours = [
        line for line in err.splitlines() if not line.startswith("[rank")
    ]  # one may die of the other's death
    assert not [line for line in ours if "Traceback" in line or "Logging error" in line], err
    assert sorted(one.name for one in (job.run / "rings").iterdir()) == ["rank-00000.ring", "rank-00001.ring"]


SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static long long shift_s(void) {
  const char *path = getenv("SHIFT_FILE");
  FILE *file = path ? fopen(path, "re") : 0;
  long long seconds = 0;
  if (file && fscanf(file, "%lld", &seconds) != 1) seconds = 0;
  if (file) fclose(file);
  return seconds;
}
int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(id, now);
  if (!failed && id == CLOCK_REALTIME) now->tv_sec += shift_s();
  return failed;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.mark.long
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("seconds", [-7200, 7200])
def test_a_clock_that_is_set_by_hours_is_no_matter(job: Job, tmp_path: Path, seconds: int) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to make a clock that can be set")
    source, library, told = tmp_path / "shift.c", tmp_path / "shift.so", tmp_path / "shift"
    source.write_text(SHIFT)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environ = {"LD_PRELOAD": str(library), "SHIFT_FILE": str(told)}
    job.start(TRAIN, "--nproc-per-node", "2", "--max-restarts", "2", "--standbys", "0", **environ)
    job.until(lambda: len(job.steps()) > 20)
    (tmp_path / "draft").write_text(str(seconds))
    (tmp_path / "draft").rename(told)
    shown = [sys.executable, "-m", "keepstep.cli", "status", str(job.run)]
    done = subprocess.run(shown, capture_output=True, text=True, check=True, env={**os.environ, **environ})
    assert "run: running; world of 2" in done.stdout
    job.kill_agent()
    before = len(job.steps())
    job.until(lambda: len(job.steps()) > before + 10)
    (job.folder / "die").touch()
    job.until(lambda: job.status().get("incarnation") == 1 or "0001" in str(job.status()))
    job.until(lambda: [one for one in job.steps()[-40:] if one < 5])  # of the next incarnation
    code, err = job.finish()
    assert code == 0, err
    assert "training again" in err
    culprits = [json.loads(one.read_text())["kind"] for one in (job.run / "incidents").glob("*.json")]
    assert "crash" in culprits
    assert "hang" not in culprits


@pytest.mark.usefixtures("cold")
def test_ranks_whose_torch_does_not_load_our_part_are_told_as_not_watched(job: Job) -> None:
    script = """
    import os, time
    import torch
    while not os.path.exists("go"):
        time.sleep(0.05)
    """
    job.start(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    (notice,) = job.until(job.notices)
    assert notice.startswith("rank 0 on ")
    assert notice.endswith(
        ": not watched: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading keepstep's part: unset it"
    )
    columns = job.status()["rank_columns"]
    (beat,) = (
        dict(zip(columns, cells, strict=True)) for node in job.status()["nodes"] for cells in node["ranks"]
    )
    assert (beat["rank"], beat["alive"], beat["watched"]) == (0, True, False)
    code, err = job.finish()
    assert code == 0
    assert err.count(f"keepstep: {notice}\n") == 1
    assert ": watched, " not in err


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_ranks_that_the_script_starts_itself_are_left_alone_and_told_once(job: Job, how: str) -> None:
    script = f"""
    import os
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def work(rank, address):
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.start_processes(work, args=("file://{job.folder}/meet",), nprocs=2, start_method="{how}")
    """
    job.start(script)
    code, err = job.finish()
    assert code == 0, err
    said = [line for line in err.splitlines() if "trains unwatched" in line]
    assert len(said) == 1, err
    assert "the script starts ranks itself (2, where keepstep run started 1)" in said[0]
    assert said[0].endswith("start each with keepstep run --nproc-per-node 2")
    assert job.steps() == []


@pytest.mark.long
def test_a_job_may_make_more_groups_in_its_life_than_a_ring_has_places(job: Job) -> None:
    script = """
    import os, time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for number in range(1100):
        group = dist.new_group([0])
        if number % 10 == 0:
            dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    del group
    open("made", "w").close()
    while not os.path.exists("more"):
        time.sleep(0.01)
    kept = [dist.new_group([0]) for _ in range(1100)]
    while not os.path.exists("go"):
        time.sleep(0.01)
    """
    job.start(script)
    job.until((job.folder / "made").exists)
    rings = json.loads((job.run / "run.json").read_text())["rings"]
    reader = RingReader(rings["0"])
    assert reader.header.overflowed == 0
    groups = reader.groups()
    assert [group.name for group in groups[:2]] == ["set-up", "0"]
    assert len(groups) > 1100
    assert sum(group is not RETIRED for group in groups) == 1024
    (job.folder / "more").touch()
    (notice,) = job.until(job.notices)
    assert "no room in its ring for more process groups" in notice
    code, err = job.finish()
    assert code == 0, err
    assert err.count(notice) == 1
