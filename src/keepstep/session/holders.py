"""Who holds a process group outside of a training: places that can be emptied, and names for all others.

Such places are the variables of modules and the defaults of arguments. torch has the latter: functions of
``torch.distributed.nn``, which ``torch._dynamo`` imports, take the default group that is there when they are imported.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import compress, repeat
from operator import is_
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, cast

Place = Callable[[Any], None]
"""Puts another value where the group is held."""

_CONTAINERS = frozenset({dict, list, tuple, set, CellType})
_NAMED = (ModuleType, FunctionType, type)
_OWN = ("keepstep", "builtins", "torch._C")


# There may be a million objects, and others wait for the process meanwhile: hence no line of Python for each.


def places_in_modules(group: Any) -> list[Place]:
    """The variables of modules that hold ``group``."""
    found: list[Place] = []
    known: list[Any] = list(sys.modules.values())
    for module in known:
        # What calls itself a module may be none (cffi's libraries); asked like this, a lazy module is not loaded.
        if issubclass(type(module), ModuleType):
            names: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
            items = names.copy()  # other threads may import meanwhile
            held = compress(items, map(is_, items.values(), repeat(group)))
            found += [partial(names.__setitem__, name) for name in held]
    return found


def places_in_functions(group: Any) -> list[Place]:
    """The defaults of arguments that hold ``group``, of all functions that the garbage collector knows."""
    found: list[Place] = []
    objects = gc.get_objects()
    for one in compress(objects, map(is_, map(type, objects), repeat(FunctionType))):
        if one.__defaults__ or one.__kwdefaults__:
            found += _defaults(one, group)
    return found


def _defaults(function: FunctionType, group: Any) -> list[Place]:
    by_place, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    found: list[Place] = [
        partial(_put_default, function, place) for place, value in enumerate(by_place) if value is group
    ]
    return found + [partial(by_name.__setitem__, name) for name, value in by_name.items() if value is group]


def _put_default(function: FunctionType, place: int, value: Any) -> None:
    known = function.__defaults__ or ()
    function.__defaults__ = (*known[:place], value, *known[place + 1 :])


def holder(group: Any) -> str:
    """The name of something that holds ``group``: a class, for an object of it, a module or a function; "": unknown."""
    frame = inspect.currentframe()
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith("keepstep."):
            for name, value in frame.f_locals.items():
                if value is group:
                    return f"{name} in {frame.f_code.co_name}"
        frame = frame.f_back
    return next((name for owner in _owners(group) if (name := _name(owner))), "")


def _owners(group: Any) -> Iterator[Any]:
    for near in gc.get_referrers(group):
        if type(near) in _CONTAINERS:
            yield from gc.get_referrers(near)
        else:
            yield near


def _name(owner: Any) -> str:
    kind = cast("type[Any]", type(owner))
    if isinstance(owner, _NAMED):
        return str(owner.__name__)
    is_ours = kind is FrameType or kind in _CONTAINERS or kind.__module__.startswith(_OWN)
    return "" if is_ours else f"a {kind.__name__}"
