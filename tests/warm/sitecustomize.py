"""Makes `keepstep run` fork its workers off itself, torch imported, where it would start an interpreter for each.

The real jobs of the tests start hundreds of processes that import torch for 1.5 s and, with an optimizer's first
step, its compiler for as long. Here the launcher does so once, before anything else, where its script speaks of torch.
The script is run by the code of the product's standbys, so only the start of the interpreter is skipped. Tests of that
start use the fixture ``cold``. ``tests/e2e/conftest.py`` sets ``KEEPSTEP_TEST_WARM`` and puts this folder into
``PYTHONPATH``; both are taken out of the environment here, so that no process sees them.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_MOST_THREADS = "OMP_NUM_THREADS"


def _hide() -> bool:
    """Take what leads here out of the environment; whether this process is a launcher that is to be warm."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _HERE]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not paths:
        del os.environ["PYTHONPATH"]
    sys.path[:] = [path for path in sys.path if path != _HERE]
    wanted = os.environ.pop("KEEPSTEP_TEST_WARM", "")
    return bool(wanted) and sys.orig_argv[1:4] == ["-m", "keepstep.cli", "run"]


def _script() -> str:
    """The text of the script that this launcher is to run; "": not found."""
    for word in sys.orig_argv[4:]:
        if word.endswith(".py") and os.path.isfile(word):
            with open(word) as file:
                return file.read()
    return ""


def _warm(script: str) -> None:
    """Import torch, and patch `subprocess.Popen` for commands that run a script by this interpreter."""
    import gc
    import subprocess

    had = os.environ.get(_MOST_THREADS)
    os.environ[_MOST_THREADS] = "1"  # libgomp reads it once; pools of more threads would not survive a fork

    if "optim" in script:
        from keepstep.launch.workers import standby

        standby._step()
    if had is None:
        del os.environ[_MOST_THREADS]
    else:
        os.environ[_MOST_THREADS] = had
    execute = subprocess.Popen._execute_child

    def execute_child(popen, args, executable, preexec_fn, close_fds, pass_fds, *others) -> None:
        words = [os.fsdecode(word) for word in args]
        environment, plan = others[1], _plan(words)
        if plan is None or executable not in (None, args[0]) or others[0] is not None:
            return execute(popen, args, executable, preexec_fn, close_fds, pass_fds, *others)
        pipes = others[5:11]  # p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        streams = (pipes[0], pipes[3], pipes[5])
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()
        popen.pid = os.fork()
        if popen.pid == 0:
            _become(words, plan, environment, streams, set(pass_fds), preexec_fn)
        popen._child_created = True
        popen._close_pipe_fds(*pipes)
        return None

    subprocess.Popen._execute_child = execute_child


def _plan(words):
    """The script and its arguments, where the command is ``python -u [-m] SCRIPT ...``."""
    if words[:1] != [sys.executable] or words[1:2] != ["-u"] or len(words) < 3:
        return None
    return words[2:] if words[2] == "-m" or not words[2].startswith("-") else None


def _become(words, plan, environment, streams, keep, preexec_fn):
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
        os.setsid()
        if preexec_fn is not None:
            preexec_fn()
        _rewrite(words, environment)
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
        for number, name in ((1, "stdout"), (2, "stderr")):
            raw, own = io.FileIO(number, "w", closefd=False), getattr(sys, f"__{name}__")
            stream = io.TextIOWrapper(raw, own.encoding, own.errors, write_through=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        gc.unfreeze()
        code = _run(words, plan)
        threading._shutdown()
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
    import torch

    from keepstep.launch.workers import standby

    sys.orig_argv = list(words)
    is_standby = plan[0] == standby.__file__
    as_module = plan[0] == "-m"
    script = plan[as_module]
    sys.argv = ["-m", *plan[2:]] if as_module else list(plan)
    for name in [name for name in sys.modules if name.partition(".")[0] == "keepstep"]:
        if not name.endswith("._native"):  # compiled parts cannot be loaded twice
            del sys.modules[name]
    # As the interpreter would: PYTHONPATH of the worker, without the launcher's folder.
    if not getattr(sys.flags, "safe_path", False) and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    torch.set_num_threads(int(os.environ.get(_MOST_THREADS) or os.cpu_count() or 1))
    if not is_standby:
        standby._become_main(None if as_module else standby._absolute(script))
    if not is_standby and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        from keepstep import _autoload

        _autoload.activate()
    try:
        standby.main() if is_standby else standby._run(script, as_module)
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


if _hide() and "torch" in (script := _script()):
    _warm(script)
