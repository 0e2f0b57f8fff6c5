"""Restarts on warm standbys: not a bit is lost, and a script cannot tell that its process was warmed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stand_in.aborts import losses_of
from tests.e2e.marked import marked

pytestmark = pytest.mark.e2e

JOB = Path(__file__).with_name("standby_train.py")
OWN_SAVES = Path(__file__).with_name("own_saves.py")
OTHER_SAVES = (["--layout", "ddp"], ["--layout", "fsdp2", "--asynchronous"])
PATIENCE_S = 250
ALL_WARM = "standbys are warm"


class Run:
    """One ``keepstep run`` in a folder of its own, findable (with all it starts) by a word in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"KEEPSTEP_TEST_MARK={folder}"
        self.said = ""
        self.on_hang = "report"
        self.process: subprocess.Popen[str] | None = None

    def start(self, *words: str, name: str = "run", **environ: str) -> None:
        """``words``: flags, script and arguments."""
        mark, _, value = self.mark.partition("=")
        command = [sys.executable, "-m", "keepstep.cli", "run", "-v", "--run-dir", str(self.folder / name)]
        command += ["--on-hang", self.on_hang]
        self.process = subprocess.Popen(
            [*command, *words],
            cwd=self.folder,
            env={**os.environ, mark: value, "OMP_NUM_THREADS": "1", **environ},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.said += line

    def finish(self) -> int:
        assert self.process is not None
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, self.said
            assert self.process is not None
            assert self.process.poll() is None, self.said
            time.sleep(0.02)
        return found

    def until_warm(self, times: int = 1) -> None:
        self.until(lambda: self.said.count(ALL_WARM) >= times)

    def kill_worker(self, incarnation: int, *, times_warm: int | None = None) -> None:
        """Kill the rank that waits for it in this incarnation, once its successors are warm."""
        dying = self.folder / f"dying-{incarnation}"
        self.until(dying.exists)
        self.until_warm(incarnation + 1 if times_warm is None else times_warm)
        os.kill(int(dying.read_text()), signal.SIGKILL)

    def standbys(self) -> list[int]:
        """Processes of the program, workers that were standbys among them."""
        found: list[int] = []
        for pid in self.left():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.endswith(b"launch/workers/standby.py") for word in words):
                found.append(pid)
        return sorted(found)

    def left(self) -> list[int]:
        """Processes that carry our mark."""
        return marked(self.mark)

    def recoveries(self, name: str = "run") -> list[dict[str, Any]]:
        incidents = [
            json.loads(path.read_text()) for path in sorted((self.folder / name / "incidents").glob("*.json"))
        ]
        return [one for one in incidents if one["kind"] == "crash"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    left = made.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if made.process:
        made.process.wait()
    assert left == []


def losses(folder: Path) -> dict[str, set[str]]:
    """The losses by rank and step; one, if every time that the step was made it came out the same."""
    found: dict[str, set[str]] = {}
    for rank in range(4):
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss = line.split()
            found.setdefault(f"{rank}/{step}", set()).add(loss)
    return found


def test_two_deaths_cost_no_bit_and_each_restart_runs_on_standbys(run: Run) -> None:
    undisturbed = run.folder / "undisturbed"
    undisturbed.mkdir()
    run.start("--no-watch", "--nproc-per-node", "4", str(JOB), str(undisturbed), "12", "", name="plain")
    assert run.finish() == 0, run.said
    run.start("--max-restarts", "3", "--nproc-per-node", "4", str(JOB), str(run.folder), "12", "2:5,1:9")
    run.kill_worker(0)
    run.kill_worker(1)
    assert run.finish() == 0, run.said
    assert losses(run.folder) == losses(undisturbed)
    told = re.findall(r"training again [0-9.]+ s after rank (\d) was killed \((.*)\)", run.said)
    assert [rank for rank, _ in told] == ["2", "1"], run.said
    for _, phases in told:
        assert re.sub(r"[0-9.]", "", phases) == "ended , standbys , groups , state , first step "
    first, second = run.recoveries()
    assert [one["culprits"][0]["rank"] for one in (first, second)] == [2, 1]
    assert [one["incarnation"] for one in (first, second)] == [0, 1]
    assert [one["recovery"]["incarnation"] for one in (first, second)] == [1, 2]
    assert [one["recovery"]["standbys"] for one in (first, second)] == [4, 4]


@pytest.mark.parametrize(
    "words",
    [["--layout", "fsdp2"], *(pytest.param(words, marks=pytest.mark.long) for words in OTHER_SAVES)],
    ids=" ".join,
)
def test_a_script_without_keepstep_goes_on_with_its_own_newest_save(run: Run, words: list[str]) -> None:
    """On NCCL: tests/cuda/test_own_saves.py."""
    undisturbed = run.folder / "undisturbed"
    undisturbed.mkdir()
    run.start(
        "--no-watch", "--nproc-per-node", "2", str(OWN_SAVES), str(undisturbed), "20", *words, name="plain"
    )
    assert run.finish() == 0, run.said
    words = [str(run.folder), "20", *words, "--wait-at", "8", "--die", "1", "12"]
    run.start("--max-restarts", "1", "--nproc-per-node", "2", str(OWN_SAVES), *words)
    run.until_warm()
    (run.folder / "go").touch()
    assert run.finish() == 0, run.said
    assert [one["recovery"]["standbys"] for one in run.recoveries()] == [2]
    for rank in range(2):
        begun = [line.split()[0] for line in (run.folder / f"begun-{rank}").read_text().splitlines()]
        # A save in the background may not have been whole yet.
        assert begun in [["0", "10"], *([["0", "5"]] if "--asynchronous" in words else [])]
    assert losses_of(run.folder, 2) == losses_of(undisturbed, 2)


@pytest.mark.parametrize(
    ("how", "words"),
    [("stopped", "stopped for"), pytest.param("asleep", "nothing of it has moved", marks=pytest.mark.soak)],
)
def test_a_rank_that_hangs_is_ended_and_the_job_goes_on(run: Run, how: str, words: str) -> None:
    undisturbed = run.folder / "undisturbed"
    undisturbed.mkdir()
    run.start("--no-watch", "--nproc-per-node", "4", str(JOB), str(undisturbed), "30", "", name="plain")
    assert run.finish() == 0, run.said
    run.on_hang = "restart"
    stops = {"STOPS": "1"} if how == "stopped" else {}
    flags = (
        "--hang-patience",
        "20",
        "--stopped-patience",
        "3",
        "--max-restarts",
        "2",
        "--nproc-per-node",
        "4",
    )
    run.start(*flags, str(JOB), str(run.folder), "30", "2:25", **stops)
    assert run.finish() == 0, run.said
    assert losses(run.folder) == losses(undisturbed)
    assert re.search(rf"rank 2: it hung: .*{words}.*; restart 1 of 2", run.said), run.said
    assert "training again" in run.said
    incidents = [
        json.loads(path.read_text()) for path in sorted((run.folder / "run" / "incidents").glob("*.json"))
    ]
    (hang,) = [one for one in incidents if one["kind"] != "slow"]
    assert (hang["kind"], hang["status"]) == ("hang", "relieved")
    assert [one["rank"] for one in hang["culprits"]] == [2]
    assert [one["name"] for one in hang["actions"]] == ["end the hung process"]
    assert hang["evidence"][0].startswith("rank 2 was ended")
    assert (hang["incarnation"], hang["recovery"]["incarnation"]) == (0, 1)


@pytest.mark.long
@pytest.mark.usefixtures("cold")
def test_without_standbys_a_restart_begins_fresh_processes(run: Run) -> None:
    flags = ("--max-restarts", "1", "--standbys", "0", "--nproc-per-node", "4")
    run.start(*flags, str(JOB), str(run.folder), "8", "3:5")
    run.kill_worker(0, times_warm=0)
    assert run.finish() == 0, run.said
    assert ALL_WARM not in run.said
    assert "training again" in run.said
    (death,) = run.recoveries()
    assert death["recovery"]["standbys"] == 0
    assert not list((run.folder / "run").rglob("standbys.log"))


TELL = """
    '''What a script sees of its process.'''
    import json, os, signal, sys, threading
    import torch
    import random
    seen = {
        "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "cwd": os.getcwd(),
        "globals": sorted(globals()), "name": __name__, "file": globals().get("__file__"), "doc": __doc__,
        "spec": getattr(__spec__, "name", None), "package": __package__, "loader": type(__loader__).__name__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "threads": [one.name for one in threading.enumerate()],
        "drawn": not torch.equal(
            torch.Generator().manual_seed(torch.initial_seed()).get_state(), torch.get_rng_state()
        ),
        "random": [torch.manual_seed(5).initial_seed(), torch.rand(3).tolist()],
        "handlers": {n: repr(signal.getsignal(n)) for n in (1, 2, 3, 13, 15)},
        "scheduler": os.sched_getscheduler(0), "nice": os.nice(0), "affinity": sorted(os.sched_getaffinity(0)),
        "stdin": os.fstat(0).st_rdev, "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.write_through],
        "stderr": [sys.stderr.encoding, sys.stderr.errors, sys.stderr.line_buffering, sys.stderr.write_through],
        "env": {k: v for k, v in os.environ.items()},
        "started": torch.distributed.is_initialized(), "grad": torch.is_grad_enabled(),
        "threads of torch": torch.get_num_threads(), "hook": sys.excepthook.__module__,
        "limits": open("/proc/self/limits").read(), "autogroup": open("/proc/self/autogroup").read().split()[1:],
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = int(os.environ["RANK"])
    json.dump(seen, open(f"seen-{restart}", "w"), default=str)
    parameter = torch.nn.Parameter(torch.zeros(1)); parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()
"""
DIE_WHEN_ASKED = """
    if restart < 2:
        open(f".dying-{restart}", "w").write(str(os.getpid()))
        os.rename(f".dying-{restart}", f"dying-{restart}")
        import time
        time.sleep(600)
"""
VARIES = {"TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "KEEPSTEP_INCARNATION"}
VARIES |= {"TORCHINDUCTOR_CACHE_DIR"}  # left by an import, as documented
VARIES |= {"KEEPSTEP_RING", "KEEPSTEP_ORDERS", "KEEPSTEP_LINKS", "KEEPSTEP_CACHE", "KEEPSTEP_IMPORTS"}


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("as_module", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_script_sees_what_a_fresh_process_shows_it(run: Run, as_module: bool) -> None:
    package = run.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("open('imported', 'a').write('once\\n')\n")
    path = package / "tell.py" if as_module else run.folder / "tell.py"
    path.write_text(textwrap.dedent(TELL) + textwrap.dedent(DIE_WHEN_ASKED))
    entry = ("-m", "package.tell") if as_module else ("./tell.py",)
    run.start("--max-restarts", "2", "--restart-budget", "same=0", *entry, "--lr", "0.1", "a b")
    run.kill_worker(0)
    run.kill_worker(1)
    assert run.finish() == 0, run.said
    seen = [json.loads((run.folder / f"seen-{number}").read_text()) for number in range(3)]
    assert all(one["recovery"]["standbys"] == 1 for one in run.recoveries())
    for one in seen:
        one["env"] = {name: value for name, value in one["env"].items() if name not in VARIES}
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert not seen[0]["drawn"]
    if as_module:
        assert (run.folder / "imported").read_text() == "once\n" * 3


FAILS = """
    restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if restart == 0 or ENDING == "wait":
        parameter = torch.nn.Parameter(torch.zeros(1)); parameter.grad = torch.zeros(1)
        torch.optim.SGD([parameter], lr=0.1).step()
        open(".dying-0", "w").write(str(os.getpid())); os.rename(".dying-0", "dying-0")
        time.sleep(600)
    def fail():
        if ENDING == "raise": raise ValueError("boom")
        if ENDING == "exit": sys.exit(7)
        if ENDING == "say": sys.exit("said")
        if ENDING == "interrupt": raise KeyboardInterrupt
        if ENDING == "abort": os.abort()
    fail()
"""


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise", 1),
        pytest.param("exit", 7, marks=pytest.mark.long),
        pytest.param("say", 1, marks=pytest.mark.long),
        pytest.param("interrupt", 130, marks=pytest.mark.long),
        pytest.param("abort", 134, marks=pytest.mark.long),
    ],
)
def test_a_standby_ends_as_a_fresh_process(run: Run, ending: str, code: int) -> None:
    script = run.folder / "job.py"
    head = f"import os, sys, time, torch\nENDING = {ending!r}\n"
    script.write_text(head + textwrap.dedent(FAILS))
    run.start("--max-restarts", "1", str(script))
    run.kill_worker(0)
    assert run.finish() == code, run.said
    before, _, after = run.said.partition("restart 1 of 1")
    assert "Traceback" not in before
    assert "standby.py" not in after
    error = run.folder / "run/logs/rank-00000/error.json"
    assert error.exists() == (ending == "raise")
    if ending == "raise":
        fresh = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "TORCHELASTIC_RESTART_COUNT": "1", "RANK": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        # Others write to the same stderr: their lines may stand between those of the traceback, or before one.
        said = iter(run.said.splitlines())
        assert all(any(one.endswith(line) for one in said) for line in fresh.stderr.splitlines()), run.said
        message = json.loads(error.read_text())["message"]
        assert message["message"] == "ValueError: boom"
        assert message["extraInfo"]["py_callstack"] == fresh.stderr


RAISES = """
    import atexit, os, time, torch
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    @atexit.register
    def over():
        time.sleep(PATIENCE_S * 2 if first else 1)
        open("over", "a").write("once\\n")
    raise ValueError("boom")
"""


def test_a_process_that_has_raised_is_waited_for_only_when_no_restart_follows(run: Run) -> None:
    script = run.folder / "job.py"
    script.write_text(f"PATIENCE_S = {PATIENCE_S}\n{textwrap.dedent(RAISES)}")
    run.start("--max-restarts", "1", "--standbys", "0", "--restart-budget", "same=0", str(script))
    assert run.finish() == 1, run.said
    first, found, _ = run.said.partition("rank 0: ValueError: boom; restart 1 of 1")
    assert found, run.said
    assert first.count("Traceback") == 1
    assert (run.folder / "over").read_text() == "once\n"


def test_a_module_that_needs_its_rank_or_fails_is_no_obstacle(run: Run) -> None:
    """Installed modules: one reads the rank when it is imported, one cannot be imported a second time."""
    site = run.folder / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "ranked.py").write_text("import os\nrank = int(os.environ['LOCAL_RANK'])\n")
    (site / "once.py").write_text(
        "import os\nif os.path.exists('imported'): raise RuntimeError('only once')\n"
    )
    (run.folder / "job.py").write_text(
        "import ranked\nimport os, time, torch\n"
        "restart = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if restart == 0:\n    import once\n    open('imported', 'w').close()\n"
        "parameter = torch.nn.Parameter(torch.zeros(1)); parameter.grad = torch.zeros(1)\n"
        "torch.optim.SGD([parameter], lr=0.1).step()\n"
        "if restart == 0:\n"
        "    open('.dying-0', 'w').write(str(os.getpid())); os.rename('.dying-0', 'dying-0')\n"
        "    time.sleep(600)\n"
        "assert ranked.rank == int(os.environ['RANK'])\n"
    )
    run.start("--max-restarts", "1", "job.py", PYTHONPATH=str(site))
    run.kill_worker(0)
    assert run.finish() == 0, run.said
    (death,) = run.recoveries()
    assert death["recovery"]["standbys"] == 1


WAITS = "import os, sys, time, torch\nENDING = 'wait'\n" + textwrap.dedent(FAILS)


def test_standbys_that_die_are_replaced_three_times(run: Run) -> None:
    (run.folder / "job.py").write_text(WAITS)
    run.start("--max-restarts", "1", "job.py")
    killed: set[int] = set()
    while len(killed) < 3:
        (pid,) = run.until(lambda: set(run.standbys()) - killed)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    run.until(lambda: "no standby for rank 0: ended with status -9" in run.said)
    assert run.said.count("no standby for rank") == 1
    assert not set(run.standbys()) - killed
    assert run.process is not None
    run.process.terminate()
    assert run.finish() == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.long)])
def test_no_standby_outlives_the_launcher(run: Run, number: signal.Signals, warm: bool) -> None:
    (run.folder / "job.py").write_text(WAITS)
    run.start("--max-restarts", "1", "--nproc-per-node", "2", "job.py")
    if warm:
        run.until_warm()
    assert run.until(run.standbys)
    assert run.process is not None
    run.process.send_signal(number)
    run.process.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while run.left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert run.left() == []
