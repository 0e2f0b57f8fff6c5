"""iterations.jsonl: a line per step, bounded, and gone on with by the next agent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from keepstep.agent.ranks.step_log import StepLog
from keepstep.core.summary import IterationSummary


def iteration(rank: int, step: int) -> IterationSummary:
    return IterationSummary(rank, step, float(step), 0.5, 0.4, 0.1)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_after_the_clock_was_set_back_are_written(tmp_path: Path) -> None:
    path = tmp_path / "i.jsonl"
    first = StepLog(path, (0,))
    first.add(iteration(0, 0), 7200.0)
    first.close()
    again = StepLog(path, (0,))  # of a new agent, which finds the same process
    again.claimed(0, 7100.0, 7300.0)
    again.add(iteration(0, 0), 7200.0)
    again.add(iteration(0, 1), 7201.0)
    again.claimed(0, 10.0, 12.0)  # of another process, after the clock was set back
    again.add(iteration(0, 2), 11.0)
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_step_is_written_when_all_ranks_have_it(tmp_path: Path) -> None:
    path = tmp_path / "nodes" / "0" / "iterations.jsonl"
    log = StepLog(path, (4, 5))
    log.add(iteration(4, 0), 100.0)
    log.add(iteration(4, 1), 101.0)
    log.add(iteration(5, 0), 100.5)
    log.sync()
    assert lines(path) == [
        {
            "step": 0,
            "ranks": {
                "4": {"t": 100.0, "d": 0.5, "self": 0.4, "blocked": 0.1, "eval": 0.0, "ckpt": 0.0},
                "5": {"t": 100.5, "d": 0.5, "self": 0.4, "blocked": 0.1, "eval": 0.0, "ckpt": 0.0},
            },
        }
    ]
    log.close()
    assert [line["step"] for line in lines(path)] == [0, 1]


def test_a_rank_that_falls_behind_does_not_hold_the_log_up_for_ever(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "i.jsonl", (0, 1))
    for step in range(40):
        log.add(iteration(0, step), 100.0 + step)
    log.sync()
    assert len(lines(tmp_path / "i.jsonl")) == 24
    log.close()


def test_the_next_agent_goes_on_after_the_last_line_and_drops_a_cut_one(tmp_path: Path) -> None:
    path = tmp_path / "i.jsonl"
    first = StepLog(path, (0,))
    for step in range(5):
        first.add(iteration(0, step), 100.1234567 + step)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"step": 5, "ran')
    second = StepLog(path, (0,))
    for step in range(8):
        second.add(iteration(0, step), 100.1234567 + step)
    second.close()
    assert [line["step"] for line in lines(path)] == list(range(8))


def test_it_rotates(tmp_path: Path) -> None:
    path = tmp_path / "i.jsonl"
    log = StepLog(path, (0,), limit_bytes=2000)
    for step in range(100):
        log.add(iteration(0, step), 100.0 + step)
    log.close()
    assert path.stat().st_size <= 2000
    kept = lines(tmp_path / "i.1.jsonl") + lines(path)
    assert [line["step"] for line in kept] == list(range(100 - len(kept), 100))


def test_a_restarted_job_writes_its_steps_again(tmp_path: Path) -> None:
    path = tmp_path / "i.jsonl"
    log = StepLog(path, (0, 1))
    for rank in (0, 1):
        log.add(iteration(rank, 0), 100.0)
    log.add(iteration(0, 1), 101.0)
    log.flush()  # what the agent does when a ring has a new writer
    log.claimed(0, 150.0, 160.0, 1)
    for step in (0, 1):
        for rank in (0, 1):
            log.add(iteration(rank, step), 200.0 + step)
    log.close()
    assert [(line["step"], len(line["ranks"])) for line in lines(path)] == [(0, 2), (1, 1), (0, 2), (1, 2)]
    assert [line.get("inc", 0) for line in lines(path)] == [0, 0, 1, 1]


def test_a_line_says_of_how_many_steps_it_has_the_means(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "i.jsonl", (0,))
    log.add(iteration(0, 7), 100.0, 8)
    log.add(iteration(0, 8), 101.0)
    log.close()
    rows = [json.loads(line)["ranks"]["0"] for line in (tmp_path / "i.jsonl").read_text().splitlines()]
    assert [row.get("n", 1) for row in rows] == [8, 1]


def test_steps_that_a_full_disk_does_not_take_are_written_later(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk."""
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from keepstep.agent.ranks.step_log import StepLog\n"
        "from keepstep.core.summary import IterationSummary\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "log = StepLog(Path(sys.argv[1]), (0,))\n"
        "for step in range(100):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (250 if step < 50 else 1_000_000, -1))\n"
        "    log.add(IterationSummary(0, step, float(step), 0.5, 0.4, 0.1), 100.0 + step)\n"
        "    log.sync()\n"
        "    if step in (1, 49, 50): print(step, log.trouble)\n"
        "log.close()\n"
    )
    path = tmp_path / "i.jsonl"
    words = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout == "1 \n49 No space left on device\n50 \n"
    assert [line["step"] for line in lines(path)] == list(range(100))
