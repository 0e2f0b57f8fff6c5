"""The program of a warm standby: an interpreter that has imported what a worker imports, and waits to become one.

    python -u standby.py [-m] SCRIPT [ARGUMENTS]

It is run by its path, so that nothing but the standard library is loaded before what the worker itself would import.
``KEEPSTEP_STANDBY`` is the descriptor of a socket: ``warm`` (or why not) goes out, one message with the worker's
environment, stdout and stderr comes in. Then this process is the worker. The launcher sees to its priority.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder, whose modules the script must not see

import builtins
import gc
import importlib
import importlib.machinery
import json
import os
import pkgutil
import runpy
import socket
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

_STANDBY, _IMPORTS = "KEEPSTEP_STANDBY", "KEEPSTEP_IMPORTS"
_CHECK_WITHOUT_CONTEXT = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable that, set to 1, has torch look for a GPU without using the driver."""
_NOT_FIT = 3
_MOST_BYTES = 1 << 20


def main() -> None:
    """Warm up, wait, take over, run the script; ends as the script does."""
    arguments = sys.argv[1:]
    as_module = arguments[0] == "-m"
    script = arguments[as_module]
    sys.orig_argv = [sys.orig_argv[0], "-u", *arguments]
    sys.argv = ["-m", *arguments[2:]] if as_module else arguments
    _become_main(None if as_module else _absolute(script))
    launcher = socket.socket(fileno=int(os.environ.pop(_STANDBY)))
    launcher.set_inheritable(False)
    ahead, unfit = _warm_up(os.environ.pop(_IMPORTS))
    gc.freeze()  # what was imported need not be searched again once others wait for this process
    launcher.send(f"not fit: {unfit}".encode() if unfit else b"warm")
    if unfit:
        sys.exit(_NOT_FIT)
    _take_over(launcher, ahead)
    try:
        _run(script, as_module)
    except SystemExit:
        raise
    except BaseException as error:
        _die(error)


def _absolute(script: str) -> str:
    """A script's path as the interpreter makes it for ``__file__``."""
    return script if os.path.isabs(script) else f"{os.getcwd()}/{script}"


def _become_main(path: str | None) -> None:
    """Make ``__main__`` and ``sys.path`` what a fresh interpreter has; ``path`` None: as with ``python -m``."""
    ours = vars(sys.modules["__main__"])
    main = types.ModuleType("__main__")
    vars(main).update({name: None for name in ("__cached__", "__file__") if name in ours and path})
    vars(main).update({"__builtins__": builtins, "__loader__": importlib.machinery.BuiltinImporter})
    if "__annotations__" in ours:
        main.__annotations__ = {}
    if path:
        main.__file__ = path
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)) if path else os.getcwd())


class _NotedReads(type(os.environ)):
    """The environment while modules are imported that a spare imports: who asks for its rank is noted."""

    unknown: frozenset[str] = frozenset()
    read: str = ""

    def __getitem__(self, key: str) -> str:
        if key in self.unknown:
            _NotedReads.read = key
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        if self.unknown:
            _NotedReads.read = "the whole environment"
        return super().__iter__()


def _warm_up(path: str) -> tuple[dict[str, str], str]:
    """Import what the worker had imported, step an optimizer once.

    Returns the variables that this has set, and why the standby is unfit, or an empty string.
    """
    with open(path) as file:
        told: dict[str, Any] = json.load(file)
    had_check = os.environ.get(_CHECK_WITHOUT_CONTEXT)
    os.environ.update({_CHECK_WITHOUT_CONTEXT: "1", **told["environment"]})
    before = dict(os.environ)
    usual, _NotedReads.unknown = type(os.environ), frozenset(told.get("unknown", ()))
    os.environ.__class__ = _NotedReads
    for name in told["modules"]:
        with suppress(BaseException):  # a script that still imports this meets the error itself
            importlib.import_module(name)
    if "torch" in sys.modules:
        with suppress(Exception):
            _step()
        _know_backends()
    os.environ.__class__ = usual
    ahead = {name: value for name, value in os.environ.items() if before.get(name) != value}
    if had_check is None:
        del os.environ[_CHECK_WITHOUT_CONTEXT]
    if _NotedReads.read:
        return ahead, f"an import reads {_NotedReads.read}, and a spare does not know its rank yet"
    return ahead, _unfit()


def _step() -> None:
    """Step an optimizer, because torch imports its compiler at the first step, which takes seconds.

    Adam's would make a CUDA context on a host with GPUs (torch 2.14): it asks for the device that is current.
    """
    torch = sys.modules["torch"]
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def _know_backends() -> None:
    """Have torch (2.14) register its backends, as it looks through all installed packages for each."""
    backend: Any = getattr(getattr(sys.modules["torch"], "distributed", None), "Backend", None)
    for name in ("gloo", "nccl"):
        with suppress(Exception):  # this torch may look for none
            backend._ensure_backend_registered(name)


def _unfit() -> str:
    """What imports have made that a fresh process would not have; "": nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    if torch.cuda.is_initialized():
        return "an import made a CUDA context"
    distributed = getattr(torch, "distributed", None)
    if distributed and distributed.is_available() and distributed.is_initialized():
        return "an import made a process group"
    return ""


def _take_over(launcher: socket.socket, ahead: dict[str, str]) -> None:
    """Wait for the launcher's message and become the worker that it describes; ends with the launcher."""
    message, descriptors, _, _ = socket.recv_fds(launcher, _MOST_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
    if not message:
        os._exit(0)
    launcher.close()
    for descriptor, target in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    environment: dict[str, str] = json.loads(message)
    for name in os.environ.keys() - environment.keys() - ahead.keys():
        del os.environ[name]
    os.environ.update({**ahead, **environment})
    if "torch" in sys.modules and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        with suppress(ImportError):
            from keepstep import _autoload

            _autoload.activate()


def _run(script: str, as_module: bool) -> None:
    run_module: Any = vars(runpy)["_run_module_as_main"]
    if as_module:
        run_module(script)
    elif pkgutil.get_importer(script) is not None:  # the script is a folder or archive with a __main__.py
        sys.path[0] = _absolute(script)
        run_module("__main__", False)
    else:
        main = vars(sys.modules["__main__"])
        exec(_code(main["__file__"]), main)


def _code(path: str) -> types.CodeType:
    try:
        with open(path, "rb") as file:
            compiled = pkgutil.read_code(file)  # type: ignore[attr-defined]
            if compiled is not None:
                return compiled
            file.seek(0)
            return compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        sys.exit(2)


def _die(error: BaseException) -> NoReturn:
    """End as a script does that raises the error: the traceback shows no frame of this file."""
    origin = error.__traceback__
    while origin is not None and origin.tb_frame.f_code.co_filename == __file__:
        origin = origin.tb_next
    error.__traceback__ = origin
    sys.excepthook(type(error), error, origin)
    sys.excepthook = _print_nothing
    raise error


def _print_nothing(*_: object) -> None:
    """Stand in for the hook that has printed the exception already."""


if __name__ == "__main__":
    main()
