"""A worker's reports to its launcher on the way to its first step, and the list of modules that a standby imports.

This module does not import torch, because processes without torch use it. Nothing in it raises or blocks.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

PIPE = "KEEPSTEP_MILESTONES"  # path of a pipe that the launcher reads
# Path of the file to list imported modules in; unset if the launcher has the list.
IMPORTS = "KEEPSTEP_IMPORTS"
_MOST_FRAMES = 16  # from an optimizer's hook to who steps it

_reached: set[str] = set()
_preset: dict[str, str] = {}  # environment variables that the script set before it imported torch


def install() -> None:
    """Have the first optimizer step and the end reported. Called at the end of ``import torch``."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if IMPORTS in os.environ:
        before = _started_with()
        _preset.update({name: value for name, value in os.environ.items() if before.get(name) != value})

    def stepped(*_: Any) -> None:
        if "step" not in _reached and not is_made_up():
            reached("step")

    register_optimizer_step_post_hook(stepped)
    process = os.getpid()
    # The end takes long, and connections are closed early in it: others may fail by that before the process has gone.
    atexit.register(lambda: os.getpid() == process and reached("leaves"))


def is_made_up() -> bool:
    """Whether the optimizer step in progress is no step of the training, to be asked by the optimizer's hooks.

    Torch has an optimizer without a state step, with gradients of zero, when its state is to be saved or loaded
    (``get_optimizer_state_dict``).
    """
    frame, depth = sys._getframe(1), 0  # pyright: ignore[reportPrivateUsage]
    while frame is not None and depth < _MOST_FRAMES:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame, depth = frame.f_back, depth + 1
    return False


def renew() -> None:
    """Report all milestones again, because this process goes on in another incarnation."""
    _reached.clear()


def reached(name: str, step: int = 0) -> None:
    """Report a milestone to the launcher once: ``groups``, ``state``, ``step``, ``raised`` or ``leaves``.

    ``step``: for ``state``, how many steps the loaded state has behind it.
    """
    path = os.environ.get(PIPE)
    if path is None or name in _reached:
        return
    _reached.add(name)
    try:
        _tell(path, name, step)
        if name in ("groups", "step") and IMPORTS in os.environ:
            from keepstep.core.own_folders import write_whole

            content = {"modules": installed_modules(sys.modules), "environment": _preset}
            write_whole(Path(os.environ[IMPORTS]), json.dumps(content).encode())
            _tell(path, "imports")
    except Exception:
        return  # the script must go on, and the launcher can do without these reports


def _tell(path: str, name: str, step: int = 0) -> None:
    rank, incarnation = os.environ.get("RANK", "0"), os.environ.get("KEEPSTEP_INCARNATION", "0")
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(pipe, f"{name} {rank} {incarnation} {time.monotonic_ns()} {step}\n".encode())
    finally:
        os.close(pipe)


def installed_modules(modules: Mapping[str, ModuleType | None]) -> list[str]:
    """The names in ``modules`` that a standby may import before it runs the script, in order of import.

    Modules of the script itself are left out: all in its folder or in the working directory that are not installed.
    """
    main = getattr(modules.get("__main__"), "__file__", None)
    own = {os.path.realpath(os.getcwd()), os.path.dirname(os.path.realpath(main)) if main else ""} - {""}
    return [name for name, module in list(modules.items()) if _may_be_ahead(name, module, own)]


def _may_be_ahead(name: str, module: ModuleType | None, own: set[str]) -> bool:
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if name == "__main__" or not isinstance(origin, str) or getattr(spec, "name", "") != name:
        return False
    if name.partition(".")[0] == "keepstep" or "/site-packages/" in origin or "/dist-packages/" in origin:
        return True
    path = os.path.realpath(origin)
    return os.path.isabs(origin) and not any(path.startswith(f"{folder}/") for folder in own)


def _started_with() -> dict[str, str]:
    with open("/proc/self/environ", "rb") as file:
        pairs = file.read().split(b"\0")
    split = (os.fsdecode(pair).partition("=") for pair in pairs if b"=" in pair)
    return {name: value for name, _, value in split}
