"""``keepstep run`` on a terminal: workers see one, their words are shown as they came and kept, keys reach all."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.e2e.test_run_life import SAY_READY, Run, run
from tests.screen import PATIENCE_S, Screen

__all__ = ["run"]
pytestmark = pytest.mark.e2e


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.close()


def start(run: Run, screen: Screen, script: str, *flags: str) -> subprocess.Popen[str]:
    """Start a job whose controlling terminal is the screen, as a shell does."""
    path = run.folder / "job.py"
    path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + script)
    name, _, value = run.mark.partition("=")

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--run-dir",
        str(run.folder / "run"),
        *flags,
        str(path),
    ]
    run.process = subprocess.Popen(
        command, cwd=run.folder, env={**os.environ, name: value}, text=True, preexec_fn=take_terminal,
        stdin=screen.slave, stdout=screen.slave, stderr=screen.slave,
    )  # fmt: skip
    return run.process


def end(process: subprocess.Popen[str], screen: Screen) -> int:
    screen.until(lambda: process.poll() is not None)
    screen.read()
    return process.returncode


def kept(run: Run, rank: int) -> bytes:
    return (run.folder / "run" / "logs" / f"rank-{rank:05d}" / "output.0.log").read_bytes()


def test_workers_see_a_terminal_and_what_they_write_is_shown_and_kept(run: Run, screen: Screen) -> None:
    script = """
assert os.isatty(1) and os.isatty(2)
assert os.get_terminal_size(1) == os.get_terminal_size(2) == (101, 33)
os.write(1, b"out \\x1b[32mgreen\\x1b[0m\\n")
for step in range(5):
    os.write(2, b"\\r%d%%|##" % step)
os.write(2, b"\\nerr\\n")
os.write(1, b"no end of a line")
"""
    process = start(run, screen, script, "--no-watch", "-q")
    assert end(process, screen) == 0
    said = (
        b"out \x1b[32mgreen\x1b[0m\n"
        + b"".join(b"\r%d%%|##" % n for n in range(5))
        + b"\nerr\nno end of a line"
    )
    assert screen.seen == said.replace(b"\n", b"\r\n")
    assert kept(run, 0) == said


def test_a_traceback_on_a_terminal_tells_why(run: Run, screen: Screen) -> None:
    process = start(
        run,
        screen,
        "if rank: raise ValueError('odd')\ntime.sleep(600)",
        "--no-watch",
        "--nproc-per-node",
        "2",
    )
    assert end(process, screen) == 1
    report = screen.seen[screen.seen.index(b"Root Cause") :]
    assert b"rank      : 1" in report
    assert b"ValueError: odd" in report
    assert b"ValueError: odd" in kept(run, 1)


def test_the_size_follows_the_consoles_and_workers_that_handle_it_are_told(run: Run, screen: Screen) -> None:
    script = f"""
def resized(*_):
    if os.get_terminal_size(2) == (80, 24): open("resized", "w").write("x\\n")
signal.signal(signal.SIGWINCH, resized)
{SAY_READY}
while not os.path.exists("resized"): time.sleep(0.01)
"""
    process = start(run, screen, script, "--no-watch")
    screen.until((run.folder / "ready0").exists)
    screen.resize(24, 80)
    assert end(process, screen) == 0


def test_ctrl_c_reaches_the_launcher_and_the_workers_through_it(run: Run, screen: Screen) -> None:
    script = (
        "signal.signal(signal.SIGINT, lambda *_: (print('asked', flush=True), sys.exit(0)))\n" + SAY_READY
    )
    process = start(run, screen, script + "time.sleep(600)", "--no-watch")
    screen.until((run.folder / "ready0").exists)
    screen.press(b"\x03")
    assert end(process, screen) == 130
    assert screen.seen.count(b"asked") == 1
    assert b"SIGINT from the kernel (a key of the terminal, or its end): the job ends" in screen.seen


def test_words_that_are_not_to_be_kept_go_to_the_terminal_itself(run: Run, screen: Screen) -> None:
    process = start(
        run, screen, "print(os.ttyname(1), flush=True)", "--no-watch", "-q", "--keep-words", "off"
    )
    assert end(process, screen) == 0
    assert screen.seen.decode().strip() == os.ttyname(screen.slave)


def test_a_killed_launcher_leaves_no_process_and_loses_no_words(run: Run, screen: Screen) -> None:
    process = start(
        run, screen, "os.write(2, b'said\\n' * 1000)\n" + SAY_READY + "time.sleep(600)", "--no-watch"
    )
    screen.until((run.folder / "ready0").exists)
    process.send_signal(signal.SIGKILL)
    screen.until(lambda: process.poll() is not None)
    screen.until(lambda: screen.seen.count(b"said\r\n") == 1000)
    screen.until(lambda: not run.left())
    assert kept(run, 0) == b"said\n" * 1000


def test_what_is_typed_is_read_by_a_worker_that_asks(run: Run, screen: Screen) -> None:
    process = start(run, screen, "print('said ' + input('name> '), flush=True)", "--no-watch", "-q")
    screen.until(lambda: screen.seen.endswith(b"name> "))
    screen.press(b"abc\r")
    assert end(process, screen) == 0
    assert screen.seen.endswith(b"said abc\r\n")


def test_workers_write_on_when_whoever_reads_them_is_killed_again_and_again(run: Run, screen: Screen) -> None:
    script = """
for number in range(10**9):
    os.write(2, b"x" * 60_000 + b"\\n")
    open("written", "w").write(str(number))
    if os.path.exists("enough"): break
"""
    process = start(run, screen, script, "--no-watch")

    def keepers() -> list[int]:
        found: list[int] = []
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in map(int, children):
            with suppress(OSError):
                fds = Path(f"/proc/{child}/fd")
                found += [child] if any(os.readlink(fd).endswith("/ptmx") for fd in fds.iterdir()) else []
        return found

    written = run.folder / "written"
    screen.until(lambda: bool(written.exists() and keepers()))
    told = "processes that show the workers' words have died"
    screen.seen = b""

    def has_given_up() -> bool:
        for keeper in keepers():
            os.kill(keeper, signal.SIGKILL)
        screen.seen = screen.seen[-500:]
        return told.encode() in screen.seen

    screen.until(has_given_up)
    counts: set[str] = set()
    screen.until(lambda: bool(counts.add(written.read_text()) or len(counts) > 20))
    (run.folder / "enough").touch()
    assert end(process, screen) == 0


def test_a_terminal_that_is_closed_ends_the_job(run: Run) -> None:
    screen = Screen()
    process = start(run, screen, SAY_READY + "while True: os.write(2, b'x\\n')", "--no-watch")
    screen.until((run.folder / "ready0").exists)
    screen.close()
    assert process.wait(PATIENCE_S) == 129
    assert run.left() == []
