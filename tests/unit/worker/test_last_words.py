"""Processes that are aborted leave their last words in a file, and say on stderr what they would have said."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from keepstep.launch.workers.error_text import of_last_words

SOURCE = Path(__file__).parents[3] / "native" / "last_words.cpp"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
INSTALL = "from keepstep.worker import last_words; last_words.install()\n"
THROW = "import ctypes; ctypes.CDLL('libstdc++.so.6')._ZSt21__throw_runtime_errorPKc(b'no peer {}')\n"
SEGFAULT = "import ctypes\ndef reads():\n    ctypes.string_at(0)\nreads()\n"


def run(folder: Path, program: str, **environ: str) -> tuple[int, str, list[Path]]:
    """Status and stderr of a program, and the files that it leaves beside its error file."""
    path = folder / "job.py"
    path.write_text(program)
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(logs / "error.json"), **environ}
    done = subprocess.run([sys.executable, path], env=environ, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stderr, sorted(logs.iterdir())


def test_what_cpp_says_is_left_and_still_said(tmp_path: Path) -> None:
    status, said, (left,) = run(tmp_path, INSTALL + THROW)
    assert status == -signal.SIGABRT
    text = left.read_text()
    assert of_last_words(text) == "std::runtime_error: no peer {}"
    assert 'job.py", line 2 in <module>' in text
    plain = run(tmp_path, THROW)
    assert (status, said) == plain[:2]
    assert "terminate called after throwing an instance of 'std::runtime_error'" in said


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (set CXX)")
def test_a_module_with_a_cpp_library_of_its_own_hears_that_of_the_process(tmp_path: Path) -> None:
    """As with compilers that have no shared one: its own handlers would never be called."""
    module = tmp_path / f"_last_words{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ["-std=c++17", "-shared", "-fPIC", "-static-libstdc++", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([str(COMPILER), *flags, str(SOURCE), "-o", str(module)], check=True)
    run(tmp_path, f"import _last_words; _last_words.install({str(tmp_path / 'said')!r})\n{THROW}")
    assert of_last_words((tmp_path / "said").read_text()) == "std::runtime_error: no peer {}"


def test_where_python_was_at_a_fatal_signal_is_left(tmp_path: Path) -> None:
    status, said, (left,) = run(tmp_path, INSTALL + SEGFAULT)
    assert (status, said) == (-signal.SIGSEGV, "")
    # The innermost frame is that of ctypes.
    assert of_last_words(left.read_text()).startswith("Fatal Python error: Segmentation fault in string_at (")
    assert 'job.py", line 4 in reads' in left.read_text()


@pytest.mark.parametrize("end", ["pass", "raise ValueError('boom')", "raise SystemExit(3)"])
def test_who_ends_by_itself_leaves_no_file(tmp_path: Path, end: str) -> None:
    assert run(tmp_path, f"{INSTALL}{end}\n")[2] == []


def test_a_child_leaves_nothing_in_the_file_of_the_worker(tmp_path: Path) -> None:
    for dies in (THROW, SEGFAULT):
        program = f"{INSTALL}import os\nif os.fork() == 0:\n    exec({dies!r})\nprint(os.wait()[1] != 0)\nos._exit(0)\n"
        assert [path.stat().st_size for path in run(tmp_path, program)[2]] in ([0], [])
        for path in (tmp_path / "logs").iterdir():
            path.unlink()
    spawned = (
        f"import multiprocessing, os\ndef child():\n    exec({INSTALL + SEGFAULT!r}, {{}})\n"
        "if __name__ == '__main__':\n    one = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    one.start(); one.join(); assert one.exitcode < 0\n"
    )
    assert run(tmp_path, spawned) == (0, "", [])


def test_a_stack_that_somebody_else_prints_stays_theirs(tmp_path: Path) -> None:
    theirs = "import faulthandler; faulthandler.enable()\n"
    for program in (theirs + INSTALL, INSTALL + theirs):
        said, left = run(tmp_path, program + SEGFAULT)[1:]
        assert "Fatal Python error: Segmentation fault" in said
        assert [path.read_text() for path in left] in ([""], [])


def test_handlers_of_libraries_are_left_alone(tmp_path: Path) -> None:
    handler = "import ctypes, signal; ctypes.CDLL(None).signal(signal.SIGSEGV, ctypes.CDLL(None)._exit)\n"
    status, said, left = run(tmp_path, handler + INSTALL + SEGFAULT)
    assert (status, said, left) == (signal.SIGSEGV, "", []), "exit(11) is what the handler does"


def test_without_an_error_file_nothing_is_installed(tmp_path: Path) -> None:
    program = f"{INSTALL}import faulthandler; assert not faulthandler.is_enabled()\n"
    assert run(tmp_path, program, TORCHELASTIC_ERROR_FILE="") == (0, "", [])
