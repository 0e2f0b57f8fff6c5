"""Results of trials that a bench was ended in: it goes on where it stopped, at the same commit of the code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from benchmarks._report import code_commit


class Trials:
    """The result of each trial: kept in a file, where one is given, and not measured again.

    ``shown``: what is printed of a result that has been measured; by default all of it.
    """

    def __init__(self, path: Path | None, shown: Collection[str] | None = None) -> None:
        self._path, self._shown = path, shown
        self._commit = code_commit()
        text = path.read_text() if path is not None and path.exists() else ""
        # Not `splitlines`: a console may hold other characters that end a line.
        known: list[dict[str, Any]] = [json.loads(line) for line in text.split("\n") if line]
        self._known = {(one["name"], one["seed"]): one for one in known if one["commit"] == self._commit}

    def result(self, name: str, seed: int, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``measure`` gives, with "failed" where it did not end well."""
        found = self._known.get((name, seed))
        if found is None:
            try:
                told = measure()
            except (TimeoutError, RuntimeError, subprocess.TimeoutExpired) as error:
                told = {"failed": str(error)}
            found = {"commit": self._commit, "name": name, "seed": seed, "failed": "", **told}
            told = {key: found[key] for key in found if self._shown is None or key in self._shown}
            print(json.dumps(told, ensure_ascii=False), file=sys.stderr, flush=True)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps(found, ensure_ascii=False) + "\n")
        return found
