"""The route of a verdict through the controller: how often its reader must change from one file to another.

    python -m benchmarks.route

Plays ``tests/scenarios/control_slow.txt`` from the first finding to the verdict and follows every call of a function
of ``keepstep.control``. A *stay* is a run of calls within one file; a *return* is a stay in a file visited before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import keepstep.control

ROOT = Path(__file__).resolve().parent.parent
SCENARIO = ROOT / "tests" / "scenarios" / "control_slow.txt"


class Route:
    """The files that calls led through, in their order; a file that calls itself stays where it is."""

    def __init__(self, root: Path) -> None:
        self._root = str(root) + "/"
        self.stays: list[str] = []

    def follow(self, frame: FrameType, event: str, _: Any) -> None:
        """For ``sys.setprofile``: notes the file that is called into."""
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(self._root):
            name = path.removeprefix(self._root)
            if self.stays[-1:] != [name]:
                self.stays.append(name)

    @property
    def returns(self) -> int:
        """Stays in a file that was visited before."""
        return len(self.stays) - len(set(self.stays))


def route_of_a_verdict() -> Route:
    """From the first finding of the scenario to the verdict that follows from the profiles."""
    from tests.scenarios.test_control_scenarios import Stage, blocks

    stage, route = Stage(), Route(Path(keepstep.control.__file__).parent)
    for head, _ in blocks(SCENARIO.read_text()):
        for line in head:
            if not line or line.startswith("#"):
                continue
            follow = line.startswith(("found", "profiles"))
            sys.setprofile(route.follow if follow else None)
            told = stage.run(line)
            sys.setprofile(None)
            if "say verdict" in told:
                return route
    raise SystemExit(f"{SCENARIO}: comes to no verdict")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts, and how often each file is visited."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.route", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the counts")
    given = parser.parse_args(argv)
    route = route_of_a_verdict()
    visits = Counter(route.stays)
    found = {"stays": len(route.stays), "returns": route.returns, "files": len(visits)}
    print(", ".join(f"{count} {name}" for name, count in found.items()))
    for name, count in visits.most_common():
        print(f"{count:4} {name}")
    if given.json:
        given.json.write_text(json.dumps({**found, "visits": dict(visits)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
