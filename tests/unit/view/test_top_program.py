"""``keepstep top`` as a program: a look that is held up."""

from __future__ import annotations

import threading
import time

import pytest
from tests.unit.view.web.served_run import MadeRun

from keepstep.view import top_program
from keepstep.view.run_snapshot import RunSnapshot


class Hanging(MadeRun):
    """A run whose file system hangs after the first look, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def refresh(self) -> RunSnapshot:
        if self.looks:
            self.goes_on.wait()
        return super().refresh()


def test_a_look_that_is_held_up_is_no_longer_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_program, "_STUCK_S", 0.1)
    monkeypatch.setattr(top_program, "_LEAST_PAUSE_S", 0.01)
    source = Hanging()
    watcher = top_program._Watcher(source, "made")
    watcher.thread.start()
    while (look := watcher.look()) is None or look is watcher.newest:
        time.sleep(0.01)
    assert look.snapshot.state == "silent"
    assert look.answer.headline.startswith("no news for ")
    assert "its file system hangs" in look.answer.notes[0]
    source.goes_on.set()
    while (look := watcher.look()) is not watcher.newest:
        time.sleep(0.01)
    assert look is not None
    assert look.snapshot.state == "running"
    watcher.end()
