"""What the death of a process tells by itself: its own error or signal, or only that another has gone."""

from __future__ import annotations

import signal
from typing import Literal

from keepstep.core.finding import Finding
from keepstep.core.lost_connection import names_an_error, ranks_named, tells_of_another

# Signals by which a process is ended from outside, or ends itself because of what another did.
_ASKED = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
_ABORTED = 128 + signal.SIGABRT

DIED = "process died"  # the cause of a culprit that died of its own doing

Testimony = Literal["own", "echo", "silent"]


def testimony(death: Finding) -> Testimony:
    """What a death tells by itself, without a look at what the rank was in.

    *own*: its words, or its signal, are about this process; *echo*: its words only tell of others; *silent*: it has no
    words, and its exit code fits either.
    """
    if death.message:
        is_echo = tells_of_another(death.message) or ranks_named(death.message)
        return "echo" if is_echo else "own"
    by_signal = 128 < death.exit_code < 128 + signal.NSIG
    silent = not by_signal or death.exit_code in (*_ASKED, _ABORTED)
    return "silent" if silent else "own"


def is_vague(death: Finding) -> bool:
    """Whether a process that has lost a peer may also end like this: without words of an error, unless by SIGKILL."""
    return not names_an_error(death.message) and death.exit_code != 128 + signal.SIGKILL


def was_asked(death: Finding) -> bool:
    """Whether the process was ended by a signal that asks a process to end, and left no words."""
    return not death.message and death.exit_code in _ASKED


def how_it_died(death: Finding) -> str:
    """``killed by SIGKILL`` or ``exit code 1``."""
    try:
        return f"killed by {signal.Signals(death.exit_code - 128).name}"
    except ValueError:
        return f"exit code {death.exit_code}"
