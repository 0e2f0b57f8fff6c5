"""Why a worker's ring stays unclaimed: the process has torch, and torch has not loaded keepstep's part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from keepstep.agent.sensors.processes import PROC, ProcessId, alive
from keepstep.core.ranges import fold_ranks

FULL = "no room in its ring for more process groups, lines of code or peers: verdicts do not name newer ones"
"""What is told of a rank whose ring has full tables."""
_LOOK_S = 1.0
_SWITCHED_OFF_S = 3.0  # what the environment says is sure
_UNTOLD_S = 60.0  # torch loads our part at the end of its import, which may take this long
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_RUN_DIR = b"KEEPSTEP_RUN_DIR="
_TORCH = "/torch/lib/libtorch_python.so"
_OURS = "/keepstep/ring/_native."
_MOST_LINES, _MOST_TEXT = 8, 500
_MOST_PROCESSES = 16  # Processes below one worker: a shell or a wrapper may have started the training.


def noticed_of(node: str, reasons: Mapping[int, str]) -> list[str]:
    """Lines for the operator about ranks of a node; ``reasons``: what is to be told of each rank."""
    lines: list[str] = []
    for why in dict.fromkeys(reasons.values()):
        ranks = [rank for rank, other in reasons.items() if other == why]
        line = f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks(ranks)} on {node}: {why}"
        lines.append(line[:_MOST_TEXT])
    return lines[:_MOST_LINES]


class UnwatchedSensor:
    """Looks at the workers that have not claimed their ring, about once a second."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}  # when torch was first seen without our part, by rank
        self._next_s = 0.0
        self.reasons: dict[int, str] = {}  # why a rank is not watched and will not be, by rank

    def look(self, now_s: float, workers: Mapping[int, ProcessId]) -> None:
        """``workers``: the processes, by rank, whose rings nobody has claimed."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + _LOOK_S
        for rank in [*self._since_s.keys() - workers.keys()]:
            del self._since_s[rank]
            self.reasons.pop(rank, None)
        for rank, worker in workers.items():
            reason, patience_s = why_unwatched(worker) if rank not in self.reasons else ("", 0.0)
            if reason and now_s - self._since_s.setdefault(rank, now_s) >= patience_s:
                self.reasons[rank] = reason


def why_unwatched(worker: ProcessId) -> tuple[str, float]:
    """Why torch in this process, or in one below it, writes no ring, and how long that must hold to be believed.

    "": torch is not there, has loaded our part, or cannot be looked at.
    """
    reason, patience_s = "", 0.0
    for pid in _with_children(worker.pid) if alive(worker) else ():
        torch, ours = _libraries(pid)
        if ours:
            return "", 0.0
        if torch and not reason:
            reason, patience_s = _reason(pid, torch)
            # A helper of a worker that has not loaded torch yet may be without our part.
            patience_s = patience_s if pid == worker.pid else _UNTOLD_S
    return reason, patience_s


def _reason(pid: int, torch: str) -> tuple[str, float]:
    try:
        environment = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        program = os.readlink(PROC / str(pid) / "exe")
    except OSError:
        return "", 0.0
    given = next((one for one in environment if one.startswith(f"{_AUTOLOAD}=".encode())), b"")
    if given and given.partition(b"=")[2] != b"1":
        text = f"not watched: {given.decode(errors='replace')} keeps torch from loading keepstep's part: unset it"
        return text, _SWITCHED_OFF_S
    if not any(one.startswith(_RUN_DIR) for one in environment):
        why = "the script was started without keepstep's variables (KEEPSTEP_...)"
        return f"not watched: {why}: keep them in what starts it, as sudo and env -i do not", _SWITCHED_OFF_S
    where = (
        f"install keepstep for the Python of the script ({program}, torch in {torch.removesuffix(_TORCH)})"
    )
    return f"not watched: torch has not loaded keepstep's part: {where}", _UNTOLD_S


def _with_children(pid: int) -> Iterator[int]:
    pending = [pid]
    for _ in range(_MOST_PROCESSES):
        if not pending:
            return
        yield (one := pending.pop(0))
        try:
            pending += map(int, (PROC / str(one) / "task" / str(one) / "children").read_text().split())
        except (OSError, ValueError):
            continue


def _libraries(pid: int) -> tuple[str, bool]:
    """Path of torch's library in a process, "" without one; and whether our part is there."""
    torch, ours = "", False
    try:
        with open(PROC / str(pid) / "maps", errors="replace") as file:
            for line in file:
                if _TORCH in line:
                    torch = line.split(maxsplit=5)[-1].strip()
                ours = ours or _OURS in line
    except OSError:
        return "", False
    return torch, ours
