"""Follows a run until told to stop, and writes what it has seen last.

    python -m tests.e2e.follow_viewer RUN FOLDER

``FOLDER/seen.json`` has what was seen last, ``FOLDER/stop`` ends this.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from keepstep.core.errors import RunError
from keepstep.traces import Run
from keepstep.view.follower import Follower


def main(run: Path, folder: Path) -> None:
    follower, incidents = Follower(Run(run)), list[int]()
    while not (folder / "stop").exists():
        try:
            seen = follower.ask()
        except RunError as error:  # the controller has gone for a moment
            print(error, file=sys.stderr)
            time.sleep(0.1)
            continue
        incidents += [one.number for one in seen.incidents]
        told = {
            "status": seen.status,
            "ranks": seen.ranks.rank.tolist(),
            "steps": seen.ranks.step.tolist(),
            "nodes": seen.ranks.node.tolist(),
            "incidents": incidents,
        }
        (folder / "draft").write_text(json.dumps(told))
        (folder / "draft").rename(folder / "seen.json")
        time.sleep(0.2)
    follower.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
