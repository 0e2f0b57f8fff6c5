"""The files of a run that the controller writes: each appears whole, as it is written beside and renamed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from keepstep.core.errors import RunError
from keepstep.core.incident import Incident
from keepstep.core.own_folders import make_folder, write_whole
from keepstep.report.incidents import incident_to_json, read_incidents
from keepstep.report.verdict import render
from keepstep.wire.messages import Council, Placement, Stop

Placements = tuple[tuple[str, int, Placement], ...]

T = TypeVar("T")


class RunFiles:
    """The controller's part of a run's folder. What writes raises OSError when it cannot.

    ``council``: the file of the elected host's council, for a controller that can move to another node.
    """

    def __init__(self, folder: Path, council: Path | None = None) -> None:
        self.folder = folder
        self._council = council
        self._stop = council.with_suffix(".stop.json") if council is not None else folder / "stop.json"
        self._incidents = folder / "incidents"

    def incidents(self) -> list[Incident]:
        """The incidents that earlier controllers of this run wrote. Raises RunError where a file is no incident."""
        return read_incidents(self._incidents)

    def numbers(self) -> int:
        """The highest number of an incident file, readable or not: numbers are never used twice."""
        taken = [int(path.stem) for path in self._incidents.glob("[0-9]*.json") if path.stem.isdigit()]
        return max(taken, default=0)

    def placements(self) -> Placements:
        """The rank table that an earlier controller of this run gave out; empty when there is none."""
        return _read(self.folder / "placement.json", Placements, "is no rank table of keepstep") or ()

    def stop(self) -> Stop | None:
        """What an earlier controller of this run was ending the job with."""
        return _read(self._stop, Stop, "says nothing of how the job ends")

    def write_stop(self, stop: Stop) -> None:
        """Write ``stop.json``; the file of a controller that can move is used in its term alone."""
        write_whole(self._stop, msgspec.json.encode(stop))

    def council(self) -> Council | None:
        """The council that elected this host, or that an earlier controller on it proposed last."""
        return _read(self._council, Council, "is no council of keepstep") if self._council else None

    def write_council(self, council: Council) -> None:
        """Write the newest council. Call it before anybody is told of that."""
        if self._council is not None:
            write_whole(self._council, msgspec.json.encode(council))

    def write_incident(self, incident: Incident) -> None:
        """Write ``incidents/NNNN.json`` and ``NNNN.txt``."""
        make_folder(self._incidents)
        name = f"{incident.number:04d}"
        text = render(incident, run=spoken(self.folder), timeline=True) + "\n"
        write_whole(self._incidents / f"{name}.txt", text.encode())
        write_whole(self._incidents / f"{name}.json", incident_to_json(incident))

    def write_placements(self, placements: Placements) -> None:
        """Write ``placement.json``."""
        write_whole(self.folder / "placement.json", msgspec.json.encode(placements))

    def write_status(self, status: msgspec.Struct) -> None:
        """Write ``status.json``."""
        write_whole(self.folder / "status.json", msgspec.json.encode(status))


def _read(path: Path, kind: type[T], otherwise: str) -> T | None:
    """The content of a file; None without one. Raises RunError with ``otherwise`` for another content."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise RunError(f"{path}: {otherwise}: {error}") from error


def spoken(folder: Path) -> str:
    """How an operator names the run: by its name under ./runs, where the verbs look, by its path elsewhere."""
    return folder.name if folder.parent == Path("runs").resolve() else str(folder)
