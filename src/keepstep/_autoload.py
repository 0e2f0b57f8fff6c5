"""Entry point of the ``torch.backends`` group: runs inside every ``import torch``.

Outside of ``keepstep run`` it looks up three environment variables and returns. Active, whatever goes wrong is
said once on stderr, and the script goes on unwatched.
"""

import atexit
import os
import time

_DROPPED_WITHIN_S = 0.02


def activate() -> None:
    """Install what ``keepstep run`` asked for in this process's environment; otherwise do nothing. Never raises."""
    watched, awaited = "KEEPSTEP_RUN_DIR" in os.environ, "KEEPSTEP_MILESTONES" in os.environ
    if "KEEPSTEP_JOB" in os.environ:
        atexit.register(_let_go)
    if not (watched or awaited):
        return
    try:
        from keepstep.worker import group_setup as _group_setup

        _group_setup.install()
        if awaited:
            from keepstep.worker import group_connections as _group_sockets
            from keepstep.worker import milestones as _milestones

            _milestones.install()
            _group_sockets.install()
        if watched:
            from keepstep.capture import install

            install()
    except Exception as error:  # the user's script must run, whatever happened to ours
        import sys

        print(f"keepstep: this process trains unwatched: {type(error).__name__}: {error}", file=sys.stderr)


def _let_go() -> None:
    """Let torch's own threads have the GIL once more before the interpreter ends.

    Gloo's drop the works that they have done, and Python objects with them. One that still waits for the GIL then is
    ended inside a destructor, and aborts the process: a job that has trained to its end fails.
    """
    time.sleep(_DROPPED_WITHIN_S)
