"""Real runs of tiny worker scripts: exit codes, signals, restarts, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.marked import marked

pytestmark = pytest.mark.e2e

PATIENCE_S = 60
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Run:
    """One ``keepstep run`` in a folder of its own, findable (with all it starts) by a word in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"KEEPSTEP_TEST_MARK={folder}"
        self.process: subprocess.Popen[str] | None = None

    def start(
        self, script: str, *flags: str, arguments: tuple[str, ...] = (), **environ: str
    ) -> subprocess.Popen[str]:
        path = self.folder / "job.py"
        path.write_text(
            "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(script)
        )
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "keepstep.cli",
                "run",
                "--run-dir",
                str(self.folder / "run"),
                *flags,
                path,
                *arguments,
            ],
            cwd=self.folder,
            env={**os.environ, name: value, **environ},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self.process

    def finish(self, script: str, *flags: str, **more: object) -> tuple[int, str, str]:
        process = self.start(script, *flags, **more)  # type: ignore[arg-type]
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def said(self, name: str) -> str:
        """Wait for a file that a worker writes."""
        path = self.folder / name
        self.until(lambda: path.exists() and path.read_text().endswith("\n"))
        return path.read_text().strip()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.01)

    def left(self) -> list[int]:
        """Processes that carry our mark."""
        return marked(self.mark)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    left = made.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if made.process:
        made.process.communicate()
    assert left == []


SAY_READY = "open(f'ready{rank}', 'w').write(f'{os.getpid()}\\n')\n"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("sys.exit(7 if rank == 1 else 0)", 7),
        ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)", 137),
        ("if rank == 0: raise ValueError('boom')\ntime.sleep(60)", 1),
        ("if rank == 0: os.abort()\ntime.sleep(60)", 134),
    ],
)
def test_the_exit_code_is_the_jobs(run: Run, script: str, code: int) -> None:
    assert run.finish(script, "--no-watch", "--nproc-per-node", "2")[0] == code
    ended = json.loads((run.folder / "run" / "end.json").read_text())
    assert ended["exit_code"] == code


def test_arguments_and_streams_pass_through_untouched(run: Run) -> None:
    code, out, err = run.finish(
        "print(sys.argv[1:]); print('to stderr', file=sys.stderr)",
        "--no-watch",
        "-q",
        arguments=("--nnodes", "9", "-q", "--", "a b"),
    )
    assert (code, out, err) == (0, "['--nnodes', '9', '-q', '--', 'a b']\n", "to stderr\n")


def test_a_program_that_cannot_be_started_is_one_line(run: Run) -> None:
    script = run.folder / "absent"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "keepstep.cli",
            "run",
            "--no-watch",
            "--run-dir",
            run.folder / "r",
            "--no-python",
            script,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot start" in done.stderr


def test_the_root_cause_is_the_first_error_file(run: Run) -> None:
    code, _, err = run.finish(
        """
        import json
        if rank == 1:
            extra = {"py_callstack": "Traceback\\nValueError: the root"}
            said = {"message": "ValueError: the root", "extraInfo": extra}
            open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps({"message": said}))
            open("written", "w").close()
            time.sleep(60)
        while not os.path.exists("written"): time.sleep(0.01)
        sys.exit(5)  # the victim dies first
        """,
        "--no-watch",
        "--nproc-per-node",
        "2",
        "--shutdown-timeout",
        "20",
        "--signals-to-handle",
        "SIGTERM",
        TORCHELASTIC_ERROR_FILE=str(run.folder / "up.json"),
    )
    root = err[err.index("Root Cause") :]
    assert "rank      : 1" in root
    assert "ValueError: the root" in root
    assert "rank      : 0" in err[: err.index("Root Cause")]
    assert code == 5  # rank 1 was ended by us before it could say its own
    assert json.loads((run.folder / "up.json").read_text())["message"]["message"] == "ValueError: the root"


def test_other_workers_get_sigterm_then_sigkill(run: Run) -> None:
    code, _, err = run.finish(
        """
        signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close() if rank == 0 else None)
        open(f"ready{rank}", "w").close()
        while not all(os.path.exists(f"ready{r}") for r in (0, 1)): time.sleep(0.01)
        if rank == 1: sys.exit(3)
        while True: time.sleep(1)
        """,
        "--no-watch",
        "--nproc-per-node",
        "2",
        "--shutdown-timeout",
        "1",
    )
    assert code == 3
    assert (run.folder / "asked").exists()
    assert "rank      : 1" in err[err.index("Root Cause") :]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_everything(run: Run, number: signal.Signals) -> None:
    process = run.start(SAY_READY + "time.sleep(60)", "--no-watch", "--nproc-per-node", "2")
    run.said("ready0")
    run.said("ready1")
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    assert run.left() == []


def test_the_second_ctrl_c_kills_at_once(run: Run) -> None:
    script = "signal.signal(signal.SIGINT, lambda *_: open('asked', 'w').write('x\\n'))\n" + SAY_READY
    process = run.start(script + "while True: time.sleep(1)", "--no-watch", "--shutdown-timeout", "3600")
    run.said("ready0")
    process.send_signal(signal.SIGINT)
    run.said("asked")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130


def test_nohup_is_respected(run: Run) -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = run.start(SAY_READY + "while not os.path.exists('go'): time.sleep(0.01)", "--no-watch")
    finally:
        signal.signal(signal.SIGHUP, old)
    run.said("ready0")
    process.send_signal(signal.SIGHUP)
    (run.folder / "go").touch()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


GRANDCHILDREN = """
import subprocess
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
to = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
subprocess.Popen(sleep, **to)
subprocess.Popen(sleep, start_new_session=True, **to)
"""


@pytest.mark.parametrize("watch", [(), ("--no-watch",)])
def test_killing_the_launcher_leaves_no_process(run: Run, watch: tuple[str, ...]) -> None:
    before = set(os.listdir("/dev/shm"))
    process = run.start(GRANDCHILDREN + SAY_READY + "time.sleep(600)", *watch, "--nproc-per-node", "2")
    run.said("ready0")
    run.said("ready1")
    process.kill()
    process.wait()
    run.until(lambda: not run.left())
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "keepstep" in name]


@pytest.mark.parametrize("code", [0, 3])
def test_helpers_that_workers_leave_are_ended_unless_they_have_called_setsid(run: Run, code: int) -> None:
    """torchrun leaves those alone, too: an upload or a server that is to outlive the job."""
    script = GRANDCHILDREN + f"if rank == 1: sys.exit({code})\nwhile {code}: time.sleep(1)"
    assert run.finish(script, "--no-watch", "--nproc-per-node", "2")[0] == code
    left = run.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    run.until(lambda: not run.left())
    # A worker that was ended early has not started its second one.
    assert len(left) == 2 or (code and len(left) == 1)


def test_stopped_workers_end_too(run: Run) -> None:
    process = run.start(SAY_READY + "time.sleep(60)", "--no-watch")
    os.kill(int(run.said("ready0")), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143


def test_the_guard_is_replaced_when_killed(run: Run) -> None:
    process = run.start(GRANDCHILDREN + SAY_READY + "time.sleep(600)", "--no-watch", "--keep-words", "off")
    worker = int(run.said("ready0"))

    def guards() -> list[int]:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return [int(pid) for pid in listed if int(pid) != worker]

    # A process that forks workers may still be there for a moment.
    run.until(lambda: len(guards()) == 1)
    (guard,) = guards()
    os.kill(guard, signal.SIGKILL)
    run.until(lambda: guards() and guards() != [guard])
    process.kill()
    process.wait()
    run.until(lambda: not run.left())


def test_restarts_count_up_and_renew_the_group(run: Run) -> None:
    code, out, err = run.finish(
        """
        names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
        print(rank, *(os.environ[name] for name in names), flush=True)
        if rank == 1: sys.exit(9 if os.environ[names[0]] < "2" else 0)
        if os.environ[names[0]] < "2": time.sleep(60)
        """,
        "--no-watch",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        "-t",
        "1",
    )
    assert code == 0
    shown = sorted(out.split("\n"))
    assert [f"[default1]:1 {attempt} 3" for attempt in range(3)] == [
        line for line in shown if "default1" in line
    ]
    assert "restart 2 of 3" in err


def test_restarts_run_out(run: Run) -> None:
    code, _, err = run.finish("sys.exit(6)", "--no-watch", "--max-restarts", "1")
    assert code == 6
    assert err.count("Root Cause") == 1


def test_redirect_and_tee(run: Run) -> None:
    code, out, err = run.finish(
        # whole lines in one write each: that of rank 2 and the teed ones go to one pipe
        "sys.stdout.write(f'out {rank}\\n'); sys.stderr.write(f'err {rank}\\n'); sys.stdout.write('no end')",
        "--no-watch",
        "-q",
        "--nproc-per-node",
        "3",
        "-r",
        "0:3,1:3",
        "-t",
        "1:3",
        "--duplicate-stdout-filters",
        "out",
    )
    assert code == 0
    assert sorted(out.replace("no end", "\nno end\n").split()) == sorted(
        ["[default1]:out", "1", "[default1]:", "no", "end", "out", "2", "no", "end"]
    )
    assert sorted(err.splitlines()) == ["[default1]:err 1", "err 2"]
    logs = run.folder / "run" / "logs"
    assert (logs / "rank-00000" / "stdout.log").read_text() == "out 0\nno end"
    assert (logs / "rank-00001" / "stderr.log").read_text() == "err 1\n"
    assert (logs / "filtered_stdout.log").read_text() == "[default1]:out 1\n"


def test_redirected_stderr_explains_the_failure(run: Run) -> None:
    code, _, err = run.finish("raise ValueError('boom')", "--no-watch", "-r", "3")
    assert code == 1
    assert "ValueError: boom" in err[err.index("Root Cause") :]


def test_the_environment_is_torchruns(run: Run) -> None:
    """Both launchers run the same script with the same flags."""
    pytest.importorskip("torch")
    script = run.folder / "job.py"
    dump = "import json\nopen(os.environ['DUMP'] + str(rank), 'w').write(json.dumps(dict(os.environ)))"
    flags = [
        "--nproc_per_node=2",
        "--max-restarts",
        "1",
        "--role",
        "t",
        "--rdzv-id",
        "j",
        "--master-port",
        "29711",
    ]
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    assert run.finish(dump, "--no-watch", *flags, DUMP=str(run.folder / "ours"))[0] == 0
    theirs_run = [sys.executable, "-m", "torch.distributed.run", *flags, script]
    subprocess.run(
        theirs_run, env={**clean, "DUMP": str(run.folder / "theirs")}, check=True, capture_output=True
    )
    for rank in (0, 1):
        ours = json.loads((run.folder / f"ours{rank}").read_text())
        theirs = json.loads((run.folder / f"theirs{rank}").read_text())
        differs = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE", HANDLING, "DUMP"}
        set_there = {name for name in theirs if theirs[name] != os.environ.get(name)} - differs
        assert {name: ours.get(name) for name in set_there} == {name: theirs[name] for name in set_there}
        assert set(theirs) <= set(ours)
        assert (ours[HANDLING], theirs[HANDLING]) == (
            "3",
            "1",
        )  # torch's own default, under which nothing is aborted


def test_a_watched_worker_has_the_nccl_shim_preloaded_unless_told_otherwise(run: Run) -> None:
    script = "print('libkeepstep_nccl.so' in open('/proc/self/maps').read(), os.environ.get('LD_PRELOAD'))"
    code, out, err = run.finish(script)
    assert (code, out.split()[0]) == (0, "True"), err
    assert run.finish(script, KEEPSTEP_NCCL_SHIM="0")[1] == "False None\n"
    assert run.finish(script, "--no-watch")[1] == "False None\n"


def test_the_words_of_a_rank_are_kept_and_tell_why_it_died(run: Run) -> None:
    code, out, err = run.finish(
        """
        sys.stderr.write("\\rstep 5/9")
        if rank == 1: raise ValueError("boom")
        time.sleep(60)
        """,
        "--no-watch",
        "--nproc-per-node",
        "2",
    )
    assert (code, out) == (1, "")
    before, _, root = err.partition("Root Cause")
    assert "ValueError: boom" in before, "the console has it as before"
    assert root.count("Traceback (most recent call last)") == 1
    assert "ValueError: boom" in root
    assert "rank 1: ValueError: boom" in json.loads((run.folder / "run" / "end.json").read_text())["reason"]
    kept = (run.folder / "run" / "logs" / "rank-00001" / "stderr.0.log").read_bytes()
    assert kept.startswith(b"\rstep 5/9Traceback"), "stdout goes elsewhere and is not kept"
    assert not list((run.folder / "run" / "logs").glob("*/stdout*"))


def test_stdout_and_stderr_of_one_console_keep_their_order(run: Run) -> None:
    script = """
    import multiprocessing
    def child(): os.write(2, b"child\\n")
    for number in range(2000):
        os.write(1 + number % 2, b"%d\\r" % number)
    if __name__ == "__main__":
        one = multiprocessing.get_context("fork").Process(target=child)
        one.start(); one.join()
    os.write(1, b"\\xff\\x00 no end")
    """
    path = run.folder / "both.py"
    path.write_text("import os\n" + textwrap.dedent(script))
    command = [sys.executable, "-m", "keepstep.cli", "run", "--no-watch", "-q", "--run-dir", run.folder / "r"]
    done = subprocess.run(
        [*command, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S
    )
    wanted = b"".join(b"%d\r" % number for number in range(2000)) + b"child\n\xff\x00 no end"
    assert (done.returncode, done.stdout) == (0, wanted)
    assert (run.folder / "r" / "logs" / "rank-00000" / "output.0.log").read_bytes() == wanted


def test_a_keeper_of_words_that_is_killed_is_replaced_and_nothing_is_lost(run: Run) -> None:
    script = """
    for number in range(3000):
        os.write(2, b"%d\\n" % number)
        time.sleep(0.0005)
        if number == 1000: open("ready", "w").write("x\\n")
    """
    process = run.start(SAY_READY + textwrap.dedent(script), "--no-watch", "-q")
    worker = int(run.said("ready0"))
    run.said("ready")
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    _guard, keeper, *_ = (int(pid) for pid in listed if int(pid) != worker)  # in the order of their births
    os.kill(keeper, signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert sorted(set(err.split()), key=int) == [str(number) for number in range(3000)]


def test_a_helper_that_outlives_the_job_is_still_shown(run: Run) -> None:
    helper = "import time; time.sleep(2); print('late', flush=True)"
    script = (
        f"import subprocess; subprocess.Popen([sys.executable, '-c', {helper!r}], start_new_session=True)"
    )
    code, out, _ = run.finish(script, "--no-watch", "-q", "--keep-words", "all")
    assert (code, out) == (0, "late\n")
    run.until(lambda: not run.left())
