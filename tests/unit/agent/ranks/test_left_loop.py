from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.agent.ranks.left_loop import left_loop

SCRIPT = """\
import torch


def train():
    for epoch in range(3):
        for batch in range(9):
            loss = batch
            loss.backward()
        log(epoch)
    return 1


def log(epoch):
    all_reduce(epoch)


for i in range(9):
    step(i)
    if i == 5:
        break
wait()
Trainer(
    1,
).train()
wait()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def stack(*frames: str) -> str:
    """As py-spy prints it, the innermost frame first."""
    lines = ["Process 12: python train.py", "", 'Thread 13 (idle): "helper"', "    <module> (train.py:18)"]
    lines += ['Thread 12 (idle): "MainThread"', *(f"    {frame}" for frame in frames)]
    return "\n".join(lines)


def site(script: str, line: int, function: str, library: str = "") -> str:
    return f"{script}:{line} {function}" + (f" (called through {library})" if library else "")


def test_a_line_after_the_loop_is_out_of_it(script: str) -> None:
    loop = left_loop(stack("sleep (time.py:9)", "<module> (train.py:21)"), site(script, 18, "<module>"))
    assert loop == f"{script}:17-20"
    assert left_loop(stack("<module> (train.py:19)"), site(script, 18, "<module>")) == ""
    assert left_loop(stack("step (model.py:3)", "<module> (train.py:18)"), site(script, 18, "<module>")) == ""


def test_the_outermost_loop_of_the_function_counts(script: str) -> None:
    here = site(script, 8, "train")
    assert left_loop(stack("train (train.py:10)", "<module> (train.py:21)"), here) == f"{script}:5-9"
    assert left_loop(stack("log (train.py:14)", "train (train.py:9)", "<module> (train.py:21)"), here) == ""


def test_a_function_that_holds_the_loop_and_is_not_there_any_more_has_left_it(script: str) -> None:
    assert (
        left_loop(stack("wait (time.py:9)", "<module> (train.py:25)"), site(script, 8, "train"))
        == f"{script}:5-9"
    )


def test_a_function_that_a_loop_calls_tells_nothing_when_it_is_gone(script: str) -> None:
    assert left_loop(stack("train (train.py:7)", "<module> (train.py:25)"), site(script, 14, "log")) == ""


def test_a_call_of_a_library_that_has_the_loop_is_left_when_it_has_returned(script: str) -> None:
    here = site(script, 22, "<module>", "transformers")
    assert left_loop(stack("<module> (train.py:25)"), here) == f"{script}:22-24"
    assert left_loop(stack("train (trainer.py:99)", "<module> (train.py:24)"), here) == ""
    assert left_loop(stack("<module> (train.py:25)"), site(script, 22, "<module>")) == ""


@pytest.mark.parametrize("shown", ["train.py", "a/train.py", "{script}"])
def test_a_file_is_known_by_the_end_of_its_path(script: str, shown: str) -> None:
    folder = Path(script).parent.name
    shown = shown.replace("a/", f"{folder}/").format(script=script)
    assert left_loop(stack(f"<module> ({shown}:21)"), site(script, 18, "<module>")) == f"{script}:17-20"


def test_what_cannot_be_known_is_not_said(script: str, tmp_path: Path) -> None:
    here = site(script, 18, "<module>")
    assert left_loop("", here) == ""
    assert left_loop(stack(), here) == ""
    assert left_loop(stack("wait (time.py:9)"), here) == ""  # a stack that was cut
    assert left_loop(stack("<module> (other.py:21)"), here) == ""
    assert left_loop(stack("<module> (train.py:21)"), "") == ""
    assert left_loop(stack("<module> (gone.py:21)"), site(str(tmp_path / "gone.py"), 18, "<module>")) == ""
    broken = tmp_path / "broken.py"
    broken.write_text("for")
    assert left_loop(stack("<module> (broken.py:21)"), site(str(broken), 18, "<module>")) == ""
