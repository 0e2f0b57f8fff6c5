from __future__ import annotations

import os
import subprocess
import sys

from keepstep.core.process_mark import is_alive, process_mark


def test_a_process_is_known_until_it_ends() -> None:
    mark = process_mark(os.getpid())
    assert is_alive(mark)
    assert not is_alive({**mark, "start_ticks": mark["start_ticks"] - 1}), "an earlier one with its number"
    assert not is_alive({**mark, "pid_namespace": 1}), "one of another container"
    assert is_alive({name: mark[name] for name in ("pid", "start_ticks")}), "as an earlier version left it"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        theirs = process_mark(process.pid)
        assert is_alive(theirs)
        process.kill()
        process.wait()
        assert not is_alive(theirs)


def test_what_is_no_mark_is_nobodys() -> None:
    for mark in (None, {}, {"pid": "x"}, {"pid": -1}, {"pid": os.getpid()}, [], "7"):
        assert not is_alive(mark)
