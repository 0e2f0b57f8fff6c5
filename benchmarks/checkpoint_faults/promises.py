"""What a job promises while it runs: the steps that the controller and the agents say are backed up."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_faults.plans import NODES

_STOOD = re.compile(r"step (\d+) \(incarnation (\d+)\) of rank (\d+) stands on another node")


@dataclass
class Promises:
    """What the product told to be backed up, as read while the job ran; ``told``: and how often workers had begun."""

    folder: Path
    world: int
    begun: int = 0
    told: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """How often workers had begun, incarnation, step."""
    status: dict[str, Any] = field(default_factory=dict[str, Any])
    _read: list[int] = field(default_factory=lambda: [0] * NODES)  # bytes of each agent's log
    _stood: dict[tuple[int, int], set[int]] = field(default_factory=dict[tuple[int, int], set[int]])

    def look(self) -> None:
        """Read what is told now."""
        with suppress(OSError, ValueError):
            self.status = json.loads((self.folder / "run" / "status.json").read_bytes())
        backups = self.status.get("backups") or {"incarnation": 0, "step": -1}
        keys = {(backups["incarnation"], backups["step"])}
        for node in range(NODES):
            for line in self._new_lines(node):
                if found := _STOOD.search(line):
                    step, incarnation, rank = map(int, found.groups())
                    ranks = self._stood.setdefault((incarnation, step), set())
                    ranks.add(rank)
                    keys |= {(incarnation, step)} if len(ranks) == self.world else set()
        for key in sorted(keys):
            if key[1] >= 0 and (self.begun, *key) not in self.told:
                self.told.append((self.begun, *key))

    def lost(self) -> None:
        """Nodes are: what each rank's agent told before does not add up to what others tell later."""
        self._stood.clear()
        for node in range(NODES):
            self._new_lines(node)

    def newest(self, before: int) -> int:
        """The newest step told before workers began for the time ``before``, from 0; -1 without."""
        return max((step for begun, _, step in self.told if begun <= before), default=-1)

    def _new_lines(self, node: int) -> list[str]:
        try:
            with (self.folder / "run" / "nodes" / str(node) / "agent.log").open("rb") as log:
                log.seek(self._read[node])
                data = log.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read[node] += len(whole)
        return whole.decode(errors="replace").splitlines()
