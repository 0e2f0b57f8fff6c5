"""Hands what torch's flight recorder holds to this node's agent, which asks for it when this rank stands still.

On a group of a device a call ends for the host when it is enqueued; only torch knows which calls the device has not
finished. A native thread waits for the agent's question and answers it, also while C code holds the interpreter's lock
for good. Where this torch does not let it, a thread of Python does: its silence then says that the lock is held.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from keepstep.capture._answers import answer, tell  # pyright: ignore[reportMissingModuleSource]
from keepstep.capture.aborts import Aborts
from keepstep.capture.internals import native_dumps, recorded_calls, time_calls
from keepstep.core.device_questions import CALLS, MOST_BYTES, TIMES, address_of
from keepstep.core.local_socket import accept, listen

logger = logging.getLogger("keepstep.capture")


def answer_agent(aborts: Aborts) -> None:
    """Answer this node's agent from now on, in threads of its own. Raises OSError where its addresses are taken.

    ``aborts``: once one has left calls open the agent is told nothing more.
    """
    run_dir, process = os.environ["KEEPSTEP_RUN_DIR"], os.getpid()
    calls, times = (listen(address_of(question, run_dir, process)) for question in (CALLS, TIMES))
    _in_thread(times, lambda _: time_calls())
    if answer(calls.fileno(), native_dumps(), MOST_BYTES):
        calls.detach()
    else:
        logger.debug("torch's recorder is read by Python: this torch does not name its functions in C++")
        _in_thread(calls, lambda connection: _tell(connection, aborts))


def _in_thread(listener: socket.socket, answer_on: Callable[[socket.socket], None]) -> None:
    arguments = listener, os.getpid(), answer_on
    threading.Thread(target=_answer, args=arguments, name="keepstep-recorder", daemon=True).start()


def _answer(listener: socket.socket, process: int, answer_on: Callable[[socket.socket], None]) -> None:
    with suppress(OSError):
        while os.getpid() == process:
            accepted = accept(listener)
            if accepted is not None:
                with accepted[0] as connection, suppress(Exception):  # the agent sees that there is no answer
                    answer_on(connection)


def _tell(connection: socket.socket, aborts: Aborts) -> None:
    if not aborts.happened:
        begun_s = time.thread_time()
        calls = recorded_calls()
        took_us = int((time.thread_time() - begun_s) * 1e6)
        tell(connection.fileno(), calls, MOST_BYTES, took_us)
