"""The program of a standby against a fresh interpreter: the same script must see, print and return the same.

Without torch, so that each takes a moment; with it in ``tests/e2e/test_standbys.py``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from keepstep.launch.workers.standbys import PROGRAM

PATIENCE_S = 120
Result = tuple[int, str, str]


def fresh(folder: Path, *words: str, **environ: str) -> Result:
    done = subprocess.run(
        [sys.executable, "-u", *words],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout, done.stderr


def by_standby(folder: Path, *words: str, modules: tuple[str, ...] = (), **environ: str) -> Result:
    imports = folder / "imports.json"
    imports.write_text(json.dumps({"modules": modules, "environment": {}}))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        ours.settimeout(PATIENCE_S)
        standby = {"KEEPSTEP_STANDBY": str(theirs.fileno()), "KEEPSTEP_IMPORTS": str(imports)}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", PROGRAM, *words],
                cwd=folder,
                env={**os.environ, "STALE": "1", **standby},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            assert ours.recv(4096) == b"warm"
            imports.unlink()
            message = json.dumps({**os.environ, **environ}).encode()
            socket.send_fds(ours, [message], [out.fileno(), err.fileno()])
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
        for file in (out, err):
            file.seek(0)
        return code, out.read().decode(), err.read().decode()


TELL = """
    '''What a script sees of its process.'''
    import json, os, signal, sys, threading
    handlers = {n: repr(signal.getsignal(n)) for n in signal.valid_signals()}
    print(json.dumps({
        "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "cwd": os.getcwd(), "env": {**os.environ},
        "globals": sorted(set(globals()) - {"TypedDict"}), "doc": __doc__, "spec": getattr(__spec__, "name", None),
        "package": __package__, "loader": type(__loader__).__name__, "file": globals().get("__file__"),
        "cached": globals().get("__cached__"), "main": sys.modules["__main__"].__dict__ is globals(),
        "threads": [one.name for one in threading.enumerate()], "handlers": handlers,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "scheduler": os.sched_getscheduler(0),
        "nice": os.nice(0), "affinity": sorted(os.sched_getaffinity(0)), "limits": open("/proc/self/limits").read(),
        "stdin": os.fstat(0).st_rdev, "descriptors": sorted(os.listdir("/proc/self/fd"))[:-1],
        "streams": [[one.encoding, one.errors, one.line_buffering, one.write_through] for one in
                    (sys.stdin, sys.stdout, sys.stderr)],
        "hook": repr(sys.excepthook), "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(),
    }, default=str))
    print("to stderr", file=sys.stderr)
"""


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


@pytest.mark.parametrize(
    "words",
    [
        ("tell.py", "--lr", "0.1", "a b"),
        ("./tell.py",),
        ("{folder}/linked.py", "-m", "--"),
        ("folder",),
        ("-m", "package.tell", "-m", "x"),
        ("-m", "package"),
    ],
)
def test_a_script_sees_what_a_fresh_process_shows_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    write(tmp_path, "tell.py", TELL)
    write(tmp_path, "folder/__main__.py", TELL)
    write(tmp_path, "package/__init__.py", "print('imported')")
    write(tmp_path, "package/tell.py", TELL)
    write(tmp_path, "package/__main__.py", TELL)
    (tmp_path / "linked.py").symlink_to(tmp_path / "package" / "tell.py")
    words = tuple(word.format(folder=tmp_path) for word in words)
    mine = by_standby(tmp_path, *words, NEW="1")
    theirs = fresh(tmp_path, *words, NEW="1")
    assert mine[0] == theirs[0] == 0
    assert mine[2] == theirs[2]
    *before, told = mine[1].splitlines()
    *before_there, told_there = theirs[1].splitlines()
    assert before == before_there
    assert json.loads(told) == json.loads(told_there)


@pytest.mark.parametrize(
    "text",
    [
        "raise ValueError('boom')",
        "def f():\n    try:\n        1 / 0\n    except Exception as e:\n        raise OSError('chain') from e\nf()",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('said')",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "import os; os._exit(5)",
        "import os; os.abort()",
        "import atexit, sys\natexit.register(print, 'at exit')\nsys.excepthook = lambda *a: print('hook', a[0])\nx",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('later'))).start()\nx",
        "def (:",
        "import faulthandler, sys; print(faulthandler.is_enabled()); 1 / 0",
        "import pickle\nclass A: pass\nprint(pickle.dumps(A()))",
        "import multiprocessing as m\ndef f(): print('child', __name__)\n"
        "if __name__ == '__main__':\n    p = m.get_context('spawn').Process(target=f); p.start(); p.join()\n"
        "    print(p.exitcode)",
    ],
)
def test_a_script_ends_as_in_a_fresh_process(tmp_path: Path, text: str) -> None:
    write(tmp_path, "job.py", text)
    assert by_standby(tmp_path, "job.py") == fresh(tmp_path, "job.py")


def test_a_script_or_module_that_is_gone_is_told_as_ever(tmp_path: Path) -> None:
    for words in (("absent.py",), ("-m", "absent")):
        assert by_standby(tmp_path, *words) == fresh(tmp_path, *words)


def test_what_is_imported_ahead_sees_the_script_and_what_fails_is_left_to_it(tmp_path: Path) -> None:
    write(tmp_path, "lib/ahead.py", "import __main__, sys\nseen = [__main__.__file__, sys.argv, sys.path[0]]")
    write(tmp_path, "lib/fails.py", "raise RuntimeError('not now')")
    write(tmp_path, "lib/leaves.py", "raise SystemExit(3)")
    write(tmp_path, "job.py", "import ahead\nprint(ahead.seen)\nimport fails")
    environ = {"PYTHONPATH": str(tmp_path / "lib")}
    os.environ.update(environ)
    try:
        mine = by_standby(tmp_path, "job.py", "x", modules=("fails", "leaves", "absent", "ahead"))
    finally:
        del os.environ["PYTHONPATH"]
    assert mine == fresh(tmp_path, "job.py", "x", **environ)
