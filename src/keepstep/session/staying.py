"""A worker that outlives its incarnation: it leaves its training when told to, drops all of it, and begins again.

    launcher ── leave ─────────────────────▶   the training is blocked, or will be
    launcher ◀── lost, error ───────────────   the training has ended by the loss of others; comes first, if at all
    launcher ◀── left  (or: refused, why) ──   no group, no model, no snapshot of the old incarnation is held any more
    launcher ── environment, streams ──────▶   the same as for a standby

One thread hears the launcher. It has a signal handler raise an exception in the training, again and again, and shuts
the connections for which the training may wait. A worker that has not left in time is ended by the launcher, and a
standby begins in its place: so nothing here has to succeed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from keepstep.checkpoint import api as door
from keepstep.checkpoint.unseen_aborts import why_unseen
from keepstep.core.log_lines import one_line
from keepstep.core.lost_connection import tells_of_another
from keepstep.core.staying import ADDRESS, LEAVE, LEFT, LOST, MOST_BYTES, REFUSED, STAYS
from keepstep.session import default_group, groups
from keepstep.session.device_gate import DeviceGate
from keepstep.session.device_memory import DeviceMemory
from keepstep.worker import group_connections as _group_sockets
from keepstep.worker import group_setup as _group_setup
from keepstep.worker import milestones as _milestones

T = TypeVar("T")

SIGNAL = signal.SIGRTMAX - 3
_FIRST_AGAIN_S, _LONGEST_AGAIN_S = 0.005, 0.1
_UNWINDING_S = 0.5  # seconds in which code that handles a `Left` gets no other one
_ABORT_S = 0.3  # longest time for which the gate stays closed
_CALM_S = 5.0
"""Seconds after which the training has begun, so that what may be needed later may be looked for."""
_ORDER_PATIENCE_S = 30.0
"""Seconds that a worker which lost a peer waits to be told to leave, because the peer may die slowly."""
_DEATHS_TOLD_S = 10.0
"""Seconds after which nobody seems to have died, so that the worker itself says that it has lost others.

Longer than it takes until a node counts as lost (`control.settings`).
"""


class Left(BaseException):
    """Raised in the training of an incarnation that is over; no ``Exception``, so that scripts do not handle it."""


class Staying:
    """Runs the training of this process in one incarnation after another. Made by the thread that trains."""

    def __init__(self, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._thread = threading.get_ident()
        self._inside = False  # the training runs
        self._over = threading.Event()  # the incarnation of the training is over
        self._raised_s = 0.0  # when `Left` was raised last
        self._ended = False  # the training has ended by itself, so that it cannot be left any more
        self._aborted = threading.Event()  # nothing of the training waits on a GPU any more
        self._out = threading.Event()  # the training was left, and all of it was dropped
        self._following: SimpleQueue[tuple[dict[str, str], list[int]]] = SimpleQueue()
        self._random = door.RandomState().state_dict()
        self._gate, self._memory = DeviceGate(), DeviceMemory()
        self._default = default_group.found()  # looks through objects, hence before these are frozen
        signal.signal(SIGNAL, self._signalled)
        gc.freeze()  # objects that are there already need not be searched when a training is left
        threading.Thread(target=self._listen, name="keepstep-staying", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether this incarnation is over, so that no state of it may be saved any more."""
        return self._over.is_set()

    def run(self, train: Callable[[], T]) -> T:
        """Run ``train`` in this incarnation and each that follows; returns or raises what the last call does."""
        while True:
            try:
                self._memory.begin()
                self._inside = True
                if self._over.is_set():
                    raise Left
                if self._default is not None and not dist.is_initialized():
                    self._default.make_again()
                result = train()
                self._inside, self._ended = False, True
                return result
            except BaseException as error:
                self._inside = False
                self._or_raise(error)
            self._begin_again()

    def _or_raise(self, error: BaseException) -> None:
        """Drop the training's frames if it was left because its incarnation is over; else raise its error."""
        if not self._over.is_set():
            lost = _lost(error)
            if not (lost and self._is_told_to_leave(lost)):
                self._ended = True
                self._gate.open()  # else a process that torch's watchdog aborts would end a second later
                groups.until_quiet()  # the frames are dropped next, and groups with them
                raise error
        # Torch ends a group that was not aborted by waiting for its operations, and aborts none meanwhile.
        self._aborted.wait()
        # Asked while the frames still hold the model.
        refusal = groups.refusal(gated=self._gate.stands) or why_unseen()
        if refusal:
            self._refuse(refusal)
        door.keep_memory()
        for one in _chain(error):  # the errors hold frames of the training, and these hold its model
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
            one.__context__ = one.__cause__ = None

    def _is_told_to_leave(self, lost: str) -> bool:
        """Wait for the order. Where nobody dies, as when links fail, it comes once we say what was ``lost``."""
        if self._over.wait(_DEATHS_TOLD_S):
            return True
        with suppress(OSError):
            self._say(f"{LOST} {one_line(lost)}")
        return self._over.wait(_ORDER_PATIENCE_S - _DEATHS_TOLD_S)

    def _begin_again(self) -> None:
        door.forget()
        held = groups.let_go(self._default)
        default_group.take_off_prefix()
        if held := held or [one for one in [self._memory.lacking()] if one]:
            self._refuse(f"something outside the training still holds {' and '.join(held)}")
        for written in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a script may have closed or replaced it
                written.flush()  # what was said in this incarnation is of it
        self._out.set()
        self._say(LEFT)
        environment, streams = self._following.get()
        _group_sockets.OURS.let_go()  # all ranks have left
        for descriptor, target in zip(streams, (1, 2), strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        for name in os.environ.keys() - environment.keys():
            if name.startswith("KEEPSTEP_"):
                del os.environ[name]
        os.environ.update(environment)
        _group_setup.set_names(int(environment["KEEPSTEP_INCARNATION"]))
        _milestones.renew()
        self._gate.renew()
        capture: Any = sys.modules.get("keepstep.capture")
        if capture is not None and capture.current() is not None:
            capture.current().renew()
        door.RandomState().load_state_dict(self._random)
        torch.set_grad_enabled(True)

    def _refuse(self, why: str) -> None:
        """Tell the launcher that a fresh process is needed, and wait to be killed."""
        self._say(f"{REFUSED} {why}")
        while True:
            time.sleep(_ORDER_PATIENCE_S)

    def _say(self, text: str) -> None:
        self._launcher.send(text.encode())

    # What follows runs in the thread that hears the launcher.

    def _listen(self) -> None:
        if self._default is not None and not select.select([self._launcher], [], [], _CALM_S)[0]:
            self._default.look_through_modules()
        while True:
            message, descriptors, _, _ = socket.recv_fds(
                self._launcher, MOST_BYTES, 2, socket.MSG_CMSG_CLOEXEC
            )
            if not message:
                self._launcher.close()
                return
            if message == LEAVE.encode():
                self._leave()
            else:
                self._over.clear()  # before the next message is read, which may set it again
                self._out.clear()
                self._following.put((json.loads(message), descriptors))

    def _leave(self) -> None:
        self._aborted.clear()
        self._over.set()
        again_s = _FIRST_AGAIN_S
        # An abort may wait for what is enqueued behind the gate; NCCL knows of it by then, so that all is spoilt.
        is_closed, until_s = self._abort(), time.monotonic() + _ABORT_S
        while not (self._out.is_set() or self._ended):
            _group_sockets.OURS.shut()
            if is_closed and time.monotonic() > until_s:
                self._gate.open()
                is_closed = False
            if self._inside:
                signal.pthread_kill(self._thread, SIGNAL)
            self._out.wait(again_s)
            again_s = min(again_s * 1.5, _LONGEST_AGAIN_S)
        if self._ended:
            self._say(f"{REFUSED} its training has ended")

    def _abort(self) -> bool:
        """Begin to abort what goes on on a GPU behind a closed gate; whether anything does.

        An abort that does not return keeps the training from being left, and the launcher ends the process.
        """
        on_device = groups.on_device() if self._gate.stands else []
        if not on_device:
            self._aborted.set()
            return False

        def abort() -> None:
            try:
                self._end_operations(on_device)
            finally:
                self._gate.open()
                self._aborted.set()

        self._gate.close()
        threading.Thread(target=abort, name="keepstep-abort", daemon=True).start()
        return True

    def _end_operations(self, on_device: list[Any]) -> None:
        try:
            groups.abort(on_device)
        except Exception as error:
            self._say(f"{REFUSED} its operations on the GPU cannot be ended: {one_line(str(error).strip())}")

    def _signalled(self, _: int, frame: FrameType | None) -> None:
        """Raise `Left` in the training; in code that handles a `Left` already, only when that takes long."""
        if not (self._inside and self._over.is_set()) or (frame and frame.f_code is Staying.run.__code__):
            return
        now_s = time.monotonic()
        if isinstance(sys.exc_info()[1], Left) and now_s - self._raised_s < _UNWINDING_S:
            return
        self._raised_s = now_s
        raise Left


def staying() -> Staying | None:
    """Tell the launcher whether this process can outlive its incarnation; None: it cannot, or is not asked to."""
    address = os.environ.get(ADDRESS)
    if not address or not dist.is_available():
        return None
    why = ""
    if threading.current_thread() is not threading.main_thread():
        why = "its training does not run in the main thread"
    elif len(groups.made()) > 1:
        why = "it made process groups besides the default one before the training began"
    elif not (why := default_group.refusal()):
        importlib.import_module(
            "torch._dynamo"
        )  # a DDP whose call is the first to do so would be held for ever
    launcher = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(OSError):
        launcher.connect(f"\0{address}")
        launcher.send((f"{REFUSED} {why}" if why else STAYS).encode())
        if not why:
            return Staying(launcher)
    launcher.close()
    return None


def _lost(error: BaseException) -> str:
    """What tells of a lost peer, as ``type: message``; "": nothing does."""
    if not isinstance(error, Exception):
        return ""
    chain = _chain(error)
    told = next((f"{type(one).__name__}: {one}" for one in chain if tells_of_another(str(one))), "")
    # NCCL may call it an error of the caller's when a communicator is used that the watchdog has just aborted.
    if not told and any(isinstance(one, dist.DistBackendError) for one in chain):
        return groups.lost_on_device()
    return told


def _chain(error: BaseException) -> list[BaseException]:
    """The error, its causes and contexts."""
    found: dict[int, BaseException] = {}
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            pending += [one.__context__, one.__cause__]
    return list(found.values())
