"""Records the set-up of process groups, so that a rank that never comes to it is missed by those that wait there."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from keepstep.capture.native import Here
from keepstep.capture.patches import Patches
from keepstep.capture.recorder import Recorder
from keepstep.core.events import SET_UP, WORLD_PEER, Flag, Kind, Op
from keepstep.ring import Operation

_LOCAL = "use_local_synchronization"  # with it only the members call `new_group`


class SetUp:
    """Each call that all ranks make together to set up a group is recorded as a barrier of the group ``SET_UP``."""

    def __init__(self, recorder: Recorder, here: Here, begins: Callable[[], None] = lambda: None) -> None:
        self._recorder, self._here = recorder, here
        self._begins = begins  # is called when a rank sets up its groups
        self._inside = False

    def install(self, patches: Patches) -> None:
        """Record ``init_process_group``, under both of its names, and ``new_group``."""
        for owner in (distributed_c10d, torch.distributed):
            patches.replace(owner, "init_process_group", self._recorded)
        patches.replace(distributed_c10d, "_new_group_with_tag", self._recorded)

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        here, signature = self._here, inspect.signature(original)

        def is_of_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            try:
                return self._is_of_all(signature.bind_partial(*args, **kwargs).arguments)
            except TypeError:  # torch says what is wrong with the arguments
                return False

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            operation = self._begin(here()) if not self._inside and is_of_all(args, kwargs) else None
            if operation is None:
                return original(*args, **kwargs)
            self._begins()
            self._inside = True
            try:
                made = original(*args, **kwargs)
            except BaseException:
                operation.fail()
                raise
            finally:
                self._inside = False
            operation()
            return made

        return call

    def _is_of_all(self, arguments: Mapping[str, Any]) -> bool:
        """Whether all ranks make this call, and this process is watched."""
        started, given = _world(), arguments.get("world_size", -1)
        if isinstance(given, int) and given > started and arguments.get("rank") is not None:
            self._started_elsewhere(given, first=arguments["rank"] == 0)
        alone = arguments.get(_LOCAL)
        some = given not in (-1, started)
        return not some and not alone and self._recorder.claim() and self._recorder.start is not None

    def _started_elsewhere(self, world: int, *, first: bool) -> None:
        """Leave a rank alone that the script has started by itself; its first rank says so."""
        if first:
            self._recorder.give_up(
                f"the script starts ranks itself ({world}, where keepstep run started {_world()}), so that nobody can "
                f"tell them apart: start each with keepstep run --nproc-per-node {world}"
            )
        else:
            self._recorder.stop()

    def _begin(self, site: int) -> Operation | None:
        """Record that this rank is there; None where that fails."""
        writer, start = self._recorder.writer, self._recorder.start
        if writer is None or start is None:
            return None
        try:
            group = writer.group(SET_UP, range(_world()), "", "")
            kind, op, flags = int(Kind.COLLECTIVE), int(Op.BARRIER), int(Flag.SYNC_KNOWN)
            return start(kind, op, group, WORLD_PEER, 0, flags, site)
        except Exception as error:
            self._recorder.stumbled(error)
            return None


def _world() -> int:
    """Number of ranks that the launchers have started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
