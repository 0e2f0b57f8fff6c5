"""Hands what torch's flight recorder holds to this node's agent, which asks for it when this rank stands still.

On a group of a device a call ends for the host when it is enqueued; only torch knows which calls the device has not
finished. A thread waits for the agent's question and answers it while the training thread hangs; until then it does
nothing. While something holds the interpreter's lock there is no answer, which tells the agent just that.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from contextlib import suppress

from keepstep.capture.aborts import Aborts
from keepstep.capture.internals import recorded_calls, time_calls
from keepstep.core.device_questions import TIME_CALLS, address_of
from keepstep.core.local_socket import accept, listen

_PATIENCE_S = 2.0  # for an agent that has connected and says nothing, or does not take its answer


def answer_agent(aborts: Aborts) -> None:
    """Answer this node's agent from now on, in a thread of its own. Raises OSError where its address is taken.

    ``aborts``: once one has left calls open the agent is told nothing more.
    """
    listener = listen(address_of(os.environ["KEEPSTEP_RUN_DIR"], os.getpid()))
    arguments = listener, os.getpid(), aborts
    threading.Thread(target=_answer, args=arguments, name="keepstep-recorder", daemon=True).start()


def _answer(listener: socket.socket, process: int, aborts: Aborts) -> None:
    with suppress(OSError):
        while os.getpid() == process:
            accepted = accept(listener)
            if accepted is not None:
                with accepted[0] as connection, suppress(Exception):  # the agent sees that there is no answer
                    connection.settimeout(_PATIENCE_S)
                    if connection.recv(1) == TIME_CALLS:
                        time_calls()
                    elif not aborts.happened:
                        begun_s = time.thread_time()
                        calls = recorded_calls()
                        _hand_over(connection, calls, time.thread_time() - begun_s)


def _hand_over(connection: socket.socket, calls: bytes, took_s: float) -> None:
    """Send the calls in a file in memory, since they may be larger than a message can be, and what they have cost.

    It is mapped, not written: bytes that a process writes are a sign that it does not hang.
    """
    descriptor = os.memfd_create("keepstep-calls", os.MFD_CLOEXEC)
    try:
        if calls:
            os.ftruncate(descriptor, len(calls))
            with mmap.mmap(descriptor, len(calls)) as memory:
                memory[:] = calls
        socket.send_fds(connection, [b"calls %d" % (took_s * 1e6)], [descriptor])
    finally:
        os.close(descriptor)
