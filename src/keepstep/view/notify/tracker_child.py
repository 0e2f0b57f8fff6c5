"""The process in which a tracker runs: it takes orders from its input and answers each with a line.

    python -m keepstep.view.notify.tracker_child

The first line is how the tracker is set up, each other one an order. An answer is ``ok``, or ``error`` and why.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import import_module

import msgspec

from keepstep.view.notify.notice import plain
from keepstep.view.notify.tracker import Tracker, TrackerOptions, TrackerOrder

_PR_SET_PDEATHSIG = 1
_TRACKERS = {
    "wandb": ("to_wandb", "WandbTracker"),
    "tensorboard": ("to_tensorboard", "TensorBoardTracker"),
    "mlflow": ("to_mlflow", "MlflowTracker"),
    "otel": ("to_otel", "OtelTracker"),
}


def tracker_of(options: TrackerOptions) -> Tracker:
    """The tracker of this kind. Raises whatever its library raises."""
    module, name = _TRACKERS[options.kind]
    return getattr(import_module(f"keepstep.view.notify.{module}"), name)(options)


def main() -> None:
    """Serve until the input ends."""
    # A tracker that hangs does not see that its server has gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.nice(10)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints is no answer
    first = sys.stdin.buffer.readline()
    if not first:
        return
    try:
        tracker = tracker_of(msgspec.json.decode(first, type=TrackerOptions))
    except Exception as error:
        print(f"error {_why(error)}", file=answers)
        sys.exit(3)
    print("ok", file=answers)
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=TrackerOrder)
        try:
            if order.point is not None:
                tracker.pace(order.point)
            if order.notice is not None:
                tracker.notice(order.notice)
        except Exception as error:
            print(f"error {_why(error)}", file=answers)
        else:
            print("ok", file=answers)
    tracker.close()


def _why(error: Exception) -> str:
    return plain(f"{type(error).__name__}: {error}", 300)


if __name__ == "__main__":
    main()
