"""Trackers on bad days, spoken to as `keepstep.view.notify.tracker_child` is.

    python odd_tracker.py FILE HOW

Orders are written to FILE. HOW: ``good``; ``hang``: never answers; ``hang-once``: only its first process;
``crash-once``, ``crash``: ends at the first order, once or always; ``error``: answers that it failed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main() -> None:
    path, how = Path(sys.argv[1]), sys.argv[2]
    begun = path.with_suffix(".begun")
    is_first = not begun.exists()
    begun.touch()
    sys.stdin.buffer.readline()
    print("ok", flush=True)
    for line in sys.stdin.buffer:
        if how == "hang" or (how == "hang-once" and is_first):
            time.sleep(60)
        if how == "crash" or (how == "crash-once" and is_first):
            print("Traceback\nRuntimeError: it broke \x1b[31m", file=sys.stderr, flush=True)
            sys.exit(7)
        with path.open("ab") as file:
            file.write(line)
        print("error RuntimeError: quota" if how == "error" else "ok", flush=True)


if __name__ == "__main__":
    main()
