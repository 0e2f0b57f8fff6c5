"""The default group that a script made before its training: how it was made, and how it is made again.

Places that hold it outside of the training are emptied when the training is left, and hold the next one as soon as it
is there.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import sys
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from keepstep.session.holders import Place, places_in_functions, places_in_modules

_BY_ENVIRONMENT = "env://"
_PREFIXING = "init_process_group.<locals>._distributed_excepthook"


class DefaultGroup:
    """How the default group of this process was made, and who holds it."""

    def __init__(self, group: Any) -> None:
        self._backend = str(dist.get_backend())
        self._timeout = _timeout(group)
        self._device: Any = getattr(group, "bound_device_id", None)
        self._group = weakref.ref(group)
        self._places: list[Place] = places_in_functions(group)
        self._knows_modules = False  # whether the places in modules are among them

    def look_through_modules(self) -> None:
        """Find out which modules hold the group, unless that is known: 10 ms, and 40 ms in a process that is new."""
        group = self._group()
        if not self._knows_modules and group is not None:
            self._places += places_in_modules(group)
            self._knows_modules = True

    def vacate(self) -> None:
        """Let go of the group everywhere but in torch's own registry, from which it is about to be destroyed."""
        self.look_through_modules()
        for put in self._places:
            put(None)

    def look_again(self) -> None:
        """Let go of it in places that have come since, such as modules that the training has imported."""
        group = self._group()
        if group is not None:
            later = places_in_modules(group) + places_in_functions(group)
            self._places += later
            for put in later:
                put(None)

    def make_again(self) -> None:
        """Make the group of another incarnation by the environment, as the script would in a fresh process."""
        dist.init_process_group(self._backend, timeout=self._timeout, device_id=self._device)
        group: Any = dist.group.WORLD
        self._group = weakref.ref(group)
        for put in self._places:
            put(group)


def found() -> DefaultGroup | None:
    """The default group of this process; None: it has none."""
    return DefaultGroup(dist.group.WORLD) if dist.is_initialized() else None


def refusal() -> str:
    """Why the default group of this process cannot be made again as it was; "": it can, or there is none."""
    if not dist.is_initialized():
        return ""
    if getattr(distributed_c10d, "_default_pg_init_method", _BY_ENVIRONMENT) != _BY_ENVIRONMENT:
        return "its default group was made with a store or an address of its own"
    numbers = str(dist.get_rank()), str(dist.get_world_size())
    if numbers != (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")):
        return "its default group numbers ranks otherwise than the launcher does"
    return ""


def take_off_prefix() -> None:
    """Have uncaught errors printed without torch's ``[rank3]:``, which each ``init_process_group`` puts before them."""
    hook: Any = sys.excepthook
    while getattr(hook, "__qualname__", "") == _PREFIXING:
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
        hook = cells["old_hook"].cell_contents
    sys.excepthook = hook


def _timeout(group: Any) -> timedelta | None:
    """How long its operations may take; None where torch does not tell, and its usual time is taken."""
    with suppress(AttributeError, RuntimeError):
        told = [group._get_backend(device).options._timeout for device in group._device_types]
        return cast("timedelta", told[0]) if told else None
    return None
