"""Creates the parts of the probe and installs them into torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed import distributed_c10d

from keepstep.capture import death
from keepstep.capture.aborts import Aborts
from keepstep.capture.captured_groups import Groups
from keepstep.capture.operations import Operations
from keepstep.capture.patches import Patches
from keepstep.capture.phases import Phases
from keepstep.capture.recorder import Recorder, harmless
from keepstep.capture.reducer import ReducerWaits
from keepstep.capture.set_up import SetUp
from keepstep.capture.sites import finder
from keepstep.capture.teardown import Teardown
from keepstep.capture.twins import Twins
from keepstep.worker import milestones as _milestones

_current: Probe | None = None


class Probe:
    """All parts of the probe in this process: installed once, then switched on and off (by benchmarks)."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._patches = Patches()
        self._lasting = Patches()  # stay in while the probe is switched off, because C++ may hold twins
        self._aborts = Aborts()
        self._groups = Groups(self.recorder, self._aborts)
        here = finder(self.recorder, os.path.dirname(torch.__file__))
        reducer = ReducerWaits(self.recorder, here)
        self._operations = Operations(self.recorder, self._groups, here, reducer)
        self._phases = Phases(self.recorder, self._patches, reducer.buckets)
        self._twins = Twins(self.recorder, self._operations)
        self._teardown = Teardown(self.recorder)
        self._set_up = SetUp(self.recorder, here, self._teardown.over)

    def install(self) -> None:
        """Hook torch. What this version of torch lacks is noted in the ring's sites table."""
        self._part("operations", lambda: self._operations.install(self._patches))
        self._part("phases", self._phases.install)
        self._part("calls from C++", lambda: self._twins.install(self._lasting))
        self._part("set-up", lambda: self._set_up.install(self._patches))
        self._part("teardown", lambda: self._teardown.install(self._patches))
        self._part("aborts", lambda: self._aborts.install(self._lasting))
        self._lasting.replace(distributed_c10d, "_new_process_group_helper", self._capturing)
        self.recorder.notes = [f"keepstep: not watched: {name}" for name in self.missing]
        self.recorder.on_give_up = self._patches.restore
        os.register_at_fork(after_in_child=self.recorder.stop)

    def _part(self, name: str, install: Callable[[], None]) -> None:
        """Install one part; if that fails in this version of torch, the other parts must still be installed."""
        try:
            install()
        except Exception as error:
            self._patches.missing.append(f"{name}: {type(error).__name__}: {error}")

    @property
    def missing(self) -> tuple[str, ...]:
        """Functions that the probe wanted to replace and that this version of torch does not have."""
        return (*self._patches.missing, *self._lasting.missing)

    def switch(self, on: bool) -> None:
        """Record from now on, or put torch's own functions back until switched on again. Groups stay known."""
        self.recorder.pause(not on)
        if on:
            self._patches.put_in()
        else:
            self._patches.take_out()

    def renew(self) -> None:
        """Forget the groups and operations of the last incarnation, and record the next one into another ring."""
        self.recorder.renew()
        self._groups.forget()
        self._phases.renew()
        self._teardown.forget()

    def end_step(self) -> None:
        """Record that a Session's step is over, unless an optimizer of torch's has been recorded."""
        self._phases.end_step()

    def remove(self) -> None:
        """Remove the probe from torch and close the ring (for tests)."""
        writer = self.recorder.writer
        self.recorder.stop()
        self._patches.take_out()
        self._lasting.take_out()
        if writer is not None:
            writer.close()

    def _capturing(self, original: Any) -> Any:
        @wraps(original)
        def new_process_group(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if self.recorder.claim():
                self._capture(made, args, kwargs)
            return made

        return new_process_group

    @harmless
    def _capture(self, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = made[0]
        ranks = args[2] if len(args) > 2 else kwargs.get("global_ranks_in_group")
        if isinstance(group, torch.distributed.ProcessGroup) and ranks is not None:
            self._groups.capture(group, list(ranks))
            _milestones.reached("groups")


def install() -> None:
    """Install the probe into this process; a second call does nothing."""
    global _current
    if _current is None:
        _current = Probe()
        _current.install()
        death.install()


def current() -> Probe | None:
    """The probe that :func:`install` installed, if it was called."""
    return _current
