"""Processes of the tests that run a script with torch, forked off one that has imported torch already.

The real jobs of the tests start hundreds of processes that import torch for 1.5 s and, with an optimizer's first
step, its compiler for as long. Here a process of each pytest worker does so once (``zygote.py``). A launcher that a
test starts is forked off it, and forks its workers and standbys off itself; one that is started in a namespace
imports torch once for all its workers (``sitecustomize.py``). A script is run by the code of the product's standbys,
so only the start of the interpreter is skipped. Tests of that start use the fixture ``cold``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
ROOM = "KEEPSTEP_TEST_WARM"
"""Its value is room in the process's first environment for that of what it becomes; empty: start processes cold."""
LAUNCHER = ["-m", "keepstep.cli", "run"]
_MOST_THREADS = "OMP_NUM_THREADS"


def hide(environment) -> None:
    """Take what leads here out of an environment: no process of the job is to see it."""
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != HERE]
    environment.pop("PYTHONPATH", None)
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.pop(ROOM, None)


def script_of(words) -> str:
    """The text of the script that a command runs; "": not found."""
    for word in words:
        if word.endswith(".py") and os.path.isfile(word):
            with open(word) as file:
                return file.read()
    return ""


def warm_up(optimizer: bool) -> None:
    """Import torch, and what it imports at an optimizer's first step."""
    had = os.environ.get(_MOST_THREADS)
    os.environ[_MOST_THREADS] = "1"  # libgomp reads it once; pools of more threads would not survive a fork
    import torch  # noqa: F401

    if optimizer:
        from keepstep.launch.workers import standby

        standby._step()
    if had is None:
        del os.environ[_MOST_THREADS]
    else:
        os.environ[_MOST_THREADS] = had


def fork_workers() -> None:
    """Patch `subprocess.Popen` of a launcher for commands that run a script by this interpreter."""
    import gc

    patched: Any = subprocess.Popen  # Any: of a private method
    execute = patched._execute_child

    def execute_child(popen, args, executable, preexec_fn, close_fds, pass_fds, *others) -> None:
        words = [os.fsdecode(word) for word in args]
        plan, environment, pipes = _plan(words), others[1], others[5:11]
        if plan is None:
            return execute(popen, args, executable, preexec_fn, close_fds, pass_fds, *others)
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()

        def prepare() -> None:
            os.setsid()
            preexec_fn()

        popen.pid = os.fork()
        if popen.pid == 0:
            become(words, plan, environment, (pipes[0], pipes[3], pipes[5]), set(pass_fds), prepare)
        popen._child_created = True
        popen._close_pipe_fds(*pipes)
        return None

    patched._execute_child = execute_child


def _plan(words):
    """The script and its arguments, where the command is ``python -u [-m] SCRIPT ...``."""
    if words[:1] != [sys.executable] or words[1:2] != ["-u"] or len(words) < 3:
        return None
    return words[2:] if words[2] == "-m" or not words[2].startswith("-") else None


def become(words, plan, environment, streams, keep=(), prepare=None) -> NoReturn:
    """Be, in a forked child, the process that the command would have started; never returns."""
    import asyncio
    import atexit
    import contextlib
    import fcntl
    import gc
    import io
    import signal
    import threading

    try:
        atexit._clear()
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(None)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as the interpreter does when it starts
            signal.signal(number, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sources = [fcntl.fcntl(source, fcntl.F_DUPFD, 100) if source >= 0 else -1 for source in streams]
        for target, source in enumerate(sources):
            if source >= 0:
                os.dup2(source, target)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in keep:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        if prepare is not None:
            prepare()
        _rewrite(words, environment)
        if words[1:4] == LAUNCHER:
            fork_workers()
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
        for number, name in ((1, "stdout"), (2, "stderr")):
            raw, own = io.FileIO(number, "w", closefd=False), getattr(sys, f"__{name}__")
            if words[1] == "-u":
                stream = io.TextIOWrapper(raw, own.encoding, own.errors, write_through=True)
            else:  # a line of stderr is one write, so that lines of several processes stay whole
                lines, buffered = name == "stderr" or raw.isatty(), io.BufferedWriter(raw)
                stream = io.TextIOWrapper(buffered, own.encoding, own.errors, line_buffering=lines)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        gc.unfreeze()
        code = _run(words, plan)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - private
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    os._exit(code)


def _run(words, plan) -> int:
    """Run the script as the product's standby does; its exit code."""
    import importlib

    import torch

    from keepstep.launch.workers import standby

    sys.orig_argv = list(words)
    is_standby = plan[0] == standby.__file__
    as_module = plan[0] == "-m"
    as_text = plan[0] == "-c"
    script = plan[as_module]
    sys.argv = [plan[0], *plan[2:]] if as_module or as_text else list(plan)
    for name in [name for name in sys.modules if name.partition(".")[0] == "keepstep"]:
        if not name.endswith("._native"):  # compiled parts cannot be loaded twice
            del sys.modules[name]
    # As the interpreter would: PYTHONPATH of this process, without the folder of what it was forked off.
    if not getattr(sys.flags, "safe_path", False) and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in given if path not in sys.path]
    importlib.invalidate_caches()
    torch.set_num_threads(int(os.environ.get(_MOST_THREADS) or os.cpu_count() or 1))
    if not is_standby:
        standby._become_main(None if as_module or as_text else standby._absolute(script))
    if not is_standby and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        from keepstep import _autoload

        _autoload.activate()
    try:
        if as_text:
            exec(compile(plan[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        elif is_standby:
            standby.main()
        else:
            standby._run(script, as_module)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        origin = error.__traceback__
        while origin is not None and origin.tb_frame.f_code.co_filename in (__file__, standby.__file__):
            origin = origin.tb_next
        error.__traceback__ = origin
        sys.excepthook(type(error), error, origin)
        return 1
    return 0


def _rewrite(words, environment) -> None:
    """Make ``/proc/self/environ`` and ``cmdline`` what they would be: the agent and the guard read them."""
    import ctypes

    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        os.environ[name] = value  # the C library copies it: nothing points into the old block any more
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    for first, strings in ((45, words), (47, [f"{name}={value}" for name, value in environment.items()])):
        start, end = int(fields[first]), int(fields[first + 1])
        block = b"".join(os.fsencode(one) + b"\0" for one in strings)
        if len(block) > end - start and first == 47:
            raise RuntimeError("KEEPSTEP_TEST_WARM is too short for the worker's environment")
        ctypes.memmove(start, block[: end - start].ljust(end - start, b"\0"), end - start)
