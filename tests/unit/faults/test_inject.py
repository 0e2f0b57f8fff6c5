from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.core.errors import FaultError
from keepstep.faults import InjectedError, Injector, parse, stop_for


class Told:
    """Stands for sleeping and signalling: notes what it was told."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.signals: list[tuple[int, int]] = []

    def injector(self, text: str, rank: int, log: Path | None = None) -> Injector:
        return Injector(
            parse(text),
            rank,
            sleep=self.slept.append,
            send_signal=lambda pid, number: self.signals.append((pid, number)),
            log_path=str(log) if log else None,
        )


def factors(injector: Injector, steps: int) -> list[float]:
    seen: list[float] = []
    for step in range(steps):
        injector.begin_step(step)
        seen.append(injector.compute_factor())
    return seen


def test_slowness_covers_its_steps_and_no_other_rank() -> None:
    text = "slow rank 2 by 2x at step 3 for 2 steps"
    assert factors(Told().injector(text, 2), 7) == [1, 1, 1, 2, 2, 1, 1]
    assert factors(Told().injector(text, 1), 7) == [1] * 7


def test_slowness_without_an_end_and_two_at_once() -> None:
    text = "slow rank 0 by 2x at step 1; slow rank 0 by 3x at step 2 for 1 step"
    assert factors(Told().injector(text, 0), 5) == [1, 2, 6, 2, 2]


def test_a_hang_strikes_once_in_its_phase() -> None:
    told = Told()
    injector = told.injector("hang rank 1 at step 2 in backward for 20 s", 1)
    for step in range(4):
        injector.begin_step(step)
        for phase in ("data", "forward", "backward", "backward", "optimizer"):
            injector.at(phase)
    assert told.slept == [20.0]


def test_a_hang_without_an_end_is_long() -> None:
    told = Told()
    injector = told.injector("hang rank 1 at step 0 in data", 1)
    injector.begin_step(0)
    injector.at("data")
    assert told.slept[0] > 86400 * 365


def test_a_misspelt_phase_is_refused() -> None:
    with pytest.raises(FaultError, match="expected one of forward"):
        Told().injector("kill rank 0 at step 1", 0).at("foward")


def test_the_loader_is_slow_for_every_batch_of_its_steps() -> None:
    told = Told()
    injector = told.injector("slow data loader of rank 0 by 0.5 s at step 1 for 2 steps", 0)
    for step in range(4):
        injector.begin_step(step)
        injector.fetch()
        injector.fetch()
    assert told.slept == [0.5] * 4


def test_one_entry_of_a_phase_is_delayed_in_each_step_meant() -> None:
    told = Told()
    injector = told.injector("delay rank 0 by 0.5 s in forward 2 at step 1 for 2 steps", 0)
    slept: list[int] = []
    for step in range(4):
        injector.begin_step(step)
        for _ in range(4):
            injector.at("forward")
            injector.at("backward")
            slept.append(len(told.slept))
    assert slept == [0] * 4 + [0, 0, 1, 1] + [1, 1, 2, 2] + [2] * 4


def test_kill_and_stop_send_their_signals_at_their_steps() -> None:
    told = Told()
    injector = told.injector("stop rank 0 at step 1; kill rank 0 at step 2", 0)
    sent: list[int] = []
    for step in range(4):
        injector.begin_step(step)
        sent.append(len(told.signals))
    assert sent == [0, 1, 2, 2]
    assert told.signals == [(os.getpid(), signal.SIGSTOP), (os.getpid(), signal.SIGKILL)]


def test_raise_raises_at_its_step() -> None:
    injector = Told().injector("raise in rank 0 at step 1", 0)
    injector.begin_step(0)
    with pytest.raises(InjectedError, match="raise in rank 0 at step 1"):
        injector.begin_step(1)


def test_link_faults_are_refused_inside_a_training_process() -> None:
    with pytest.raises(FaultError, match=r"keepstep\.faults\.link"):
        Told().injector("link down of node-a", 0)


def test_what_was_done_is_logged_only_where_asked(tmp_path: Path) -> None:
    log = tmp_path / "faults.jsonl"
    injector = Told().injector("slow rank 0 by 2x at step 1 for 1 step; stop rank 0 at step 2", 0, log)
    factors(injector, 4)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["step"], line["did"]) for line in lines] == [
        (1, "compute factor 2"),
        (2, "stop rank 0 at step 2"),
        (2, "compute factor 1"),
    ]


def test_a_timed_stop_stops_a_real_process_and_lets_it_go_on() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as target:
        helper = stop_for(target.pid, 0.2)
        _, stopped = os.waitpid(target.pid, os.WUNTRACED)
        _, resumed = os.waitpid(target.pid, os.WCONTINUED)
        assert os.WIFSTOPPED(stopped)
        assert os.WIFCONTINUED(resumed)
        assert helper.wait() == 0
        target.communicate(b"\n")
    assert target.returncode == 0


def test_a_timed_stop_of_a_process_that_died_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as target:
        target.wait()
    helper = stop_for(target.pid, 3600)
    assert helper.wait() == 0
