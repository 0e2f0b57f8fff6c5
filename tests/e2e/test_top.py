"""`keepstep top` in a real terminal: sizes, keys, and the terminal as before afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.e2e.tmux import Terminal
from tests.unit.view.example_runs import SLOW

from keepstep.core.incident import Culprit, Incident
from keepstep.report.incidents import incident_to_json
from keepstep.wire.messages import RankBeat

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed (apt-get install tmux)"),
]
TOP = [sys.executable, "-m", "keepstep.cli", "top"]
Screen = Callable[..., Terminal]


class Run:
    """The folder of a run of eight ranks that lives: its status is written anew all the time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "incidents").mkdir(parents=True)
        described = {"started_unix_s": time.time() - 600, "world_size": 8, "nodes": 2}
        (path / "run.json").write_text(json.dumps(described))
        self._incidents: tuple[Incident, ...] = ()
        self._name = "gpu"
        self._write()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def has(self, *incidents: Incident, name: str = "gpu") -> None:
        """Have these incidents open, and nodes of this name."""
        now_s = time.time()
        for one in incidents:
            told = replace(one, detected_unix_s=now_s - 60, onset_unix_s=now_s - 61)
            (self.path / "incidents" / f"{one.number:04d}.json").write_bytes(incident_to_json(told))
        self._incidents, self._name = incidents, name

    def close(self) -> None:
        """Write no more."""
        self._over.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._over.wait(0.2):
            self._write()

    def _write(self) -> None:
        nodes = [
            {
                "node_rank": node, "node": f"{self._name}-{node}", "agent": "ok", "launcher": "ok",
                "heard_s_ago": 0.1, "agent_starts": 1, "dropped": 0, "notices": [],
                "ranks": [RankBeat(rank, 512, 2, 9, 0.6, 0.3) for rank in range(4 * node, 4 * node + 4)],
            }
            for node in range(2)
        ]  # fmt: skip
        status = {
            "schema": 1, "unix_s": time.time(), "state": "running", "world_size": 8, "newest_step": 512,
            "open_incidents": [one.number for one in self._incidents], "nodes": nodes,
            "rank_columns": list(RankBeat.__struct_fields__), "counters": {},
        }  # fmt: skip
        (self.path / "draft").write_bytes(msgspec.json.encode(status))
        (self.path / "draft").replace(self.path / "status.json")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that lives until the test is over."""
    made = Run(tmp_path / "live")
    yield made
    made.close()


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Screen]:
    """Opens terminals, and closes them."""
    opened: list[Terminal] = []

    def show(words: list[str], width: int = 80, height: int = 24, **env: str) -> Terminal:
        place = tmp_path / str(len(opened))
        place.mkdir()
        opened.append(Terminal(place, words, width, height, env))
        return opened[-1]

    yield show
    for one in opened:
        one.close()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_the_run_fills_the_screen(width: int, height: int, run: Run, shown: Screen) -> None:
    run.has(SLOW)
    terminal = shown([*TOP, str(run.path)], width, height)
    terminal.wait_for("q quits")
    lines = terminal.lines()
    assert len(lines) == height
    assert lines[0].startswith(" keepstep  live   running")
    assert lines[1] == "the job is slow: rank 3 gpu-1, compute, confidence high"
    assert lines[-1].startswith(" q quits")
    assert any(line.split()[:3] == ["7", "gpu-1", "ok"] for line in lines)
    terminal.keys("q")
    terminal.wait_for("rc=0")
    terminal.keys("typed", "Enter")
    terminal.wait_for(lambda text: text.count("typed") == 2)  # echoed, and by cat


def test_another_size_and_scrolling(run: Run, shown: Screen) -> None:
    run.has(SLOW)
    terminal = shown([*TOP, str(run.path)], 80, 24)
    terminal.wait_for("q quits")
    terminal.resize(200, 60)
    terminal.wait_for(
        lambda text: len(text.splitlines()) == 60 and text.splitlines()[59].startswith(" q quits")
    )
    terminal.resize(60, 10)
    terminal.wait_for(lambda text: "1-8 of" in text.splitlines()[-1])
    terminal.keys("j", "Down")
    terminal.wait_for("3-10 of")
    terminal.keys("k")
    terminal.wait_for("2-9 of")
    terminal.keys("G")
    terminal.wait_for(lambda text: text.splitlines()[-2].split()[:2] == ["7", "gpu-1"])
    terminal.resize(20, 5)
    terminal.wait_for("at least 40 x 8")
    terminal.resize(80, 24)
    terminal.wait_for("keepstep  live")


@pytest.mark.parametrize(("how", "code"), [("C-c", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_restored_however_it_ends(how: str | int, code: int, run: Run, shown: Screen) -> None:
    terminal = shown([*TOP, str(run.path)])
    terminal.wait_for("q quits")
    if isinstance(how, str):
        terminal.keys(how)
    else:
        for pid in terminal.pids():
            os.kill(pid, how)
    terminal.wait_for(f"rc={code}")
    terminal.keys("typed", "Enter")
    terminal.wait_for(lambda text: text.count("typed") == 2)


def test_news_come_and_the_end_is_told(run: Run, shown: Screen) -> None:
    terminal = shown([*TOP, str(run.path)])
    terminal.wait_for("healthy")
    run.has(SLOW)
    terminal.wait_for("the job is slow")
    end = {"exit_code": 137, "category": "training", "reason": "rank 2 died", "ended_unix_s": time.time()}
    (run.path / "end.json").write_text(json.dumps(end))
    terminal.wait_for("ended with exit code 137 (rank 2 died)")
    terminal.keys("q")
    terminal.wait_for("rc=0")


def test_no_name_moves_the_cursor(run: Run, shown: Screen) -> None:
    evil = "\x1b[2J\x1b[Hx\n\u202e节点"
    culprit = Culprit(3, None, evil, evil, 2.0, "high", evil, evil)
    run.has(replace(SLOW, culprits=(culprit,), next_action=evil), name=evil)
    terminal = shown([*TOP, str(run.path)], 200, 60)
    terminal.wait_for("q quits")
    lines = terminal.lines()
    assert lines[0].startswith(" keepstep  live")
    assert "\\x1b[2J\\x1b[Hx\\n\\u202e节点" in lines[1]


def test_without_colours_and_in_ascii(run: Run, shown: Screen) -> None:
    run.has(SLOW)
    coloured = shown([*TOP, str(run.path)])
    coloured.wait_for("q quits")
    assert "\x1b[31m" in coloured.text(with_colours=True)
    plain = shown([*TOP, str(run.path)], NO_COLOR="1", LC_ALL="C")
    plain.wait_for("q quits")
    text = plain.text(with_colours=True)
    assert "\x1b[31m" not in text
    assert text.replace("\x1b", "").isascii()
    assert "compute x2.0" in text


@pytest.mark.parametrize("term", ["no-such-terminal", "dumb"])
def test_a_terminal_that_cannot_do_it(term: str, run: Run, shown: Screen) -> None:
    terminal = shown([*TOP, str(run.path)], 200, 24, TERM=term)
    text = terminal.wait_for(lambda text: "rc=2" in text or "q quits" in text)
    if "rc=2" in text:
        assert f"keepstep: the terminal (TERM='{term}') cannot show this" in text
        assert "keepstep status" in text


def test_no_terminal_is_one_line(run: Run) -> None:
    told = subprocess.run(
        [*TOP, str(run.path)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert told.returncode == 2
    assert told.stderr == (
        f"keepstep: top needs a terminal, and this is none; `keepstep status {run.path}` prints the state once\n"
    )
