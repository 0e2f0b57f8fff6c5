"""The run's folder as the controller writes it: every file appears whole, by renaming."""

from __future__ import annotations

from pathlib import Path

import msgspec

from keepstep.core.errors import RunError
from keepstep.core.incident import Incident
from keepstep.core.own_folders import make_folder, write_whole
from keepstep.report.incidents import incident_to_json, read_incidents
from keepstep.report.verdict import render
from keepstep.wire.messages import Council, Placement, Stop

Placements = tuple[tuple[str, int, Placement], ...]

_placements = msgspec.json.Decoder(Placements)
_stop = msgspec.json.Decoder(Stop)
_council = msgspec.json.Decoder(Council)


class RunFiles:
    """Reads and writes the controller's part of a run's folder. Raises OSError when it cannot write."""

    def __init__(self, folder: Path, council: Path | None = None) -> None:
        self.folder = folder
        self._council = council
        self._stop = council.with_suffix(".stop.json") if council is not None else folder / "stop.json"
        self._incidents = folder / "incidents"

    def incidents(self) -> list[Incident]:
        """What an earlier controller of this run wrote. Raises RunError for files that are none of ours."""
        return read_incidents(self._incidents)

    def numbers(self) -> int:
        """The highest incident number there is, readable or not: numbers are never used twice."""
        taken = [int(path.stem) for path in self._incidents.glob("[0-9]*.json") if path.stem.isdigit()]
        return max(taken, default=0)

    def placements(self) -> Placements:
        """The rank table that an earlier controller of this run gave out; empty when there is none."""
        path = self.folder / "placement.json"
        try:
            return _placements.decode(path.read_bytes())
        except FileNotFoundError:
            return ()
        except msgspec.MsgspecError as error:
            raise RunError(f"{path}: is no rank table of keepstep: {error}") from error

    def stop(self) -> Stop | None:
        """What an earlier controller of this run was ending the job with."""
        path = self._stop
        try:
            return _stop.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise RunError(f"{path}: says nothing of how the job ends: {error}") from error

    def write_stop(self, stop: Stop) -> None:
        """``stop.json``; that of a controller that can move is of its term alone."""
        write_whole(self._stop, msgspec.json.encode(stop))

    def council(self) -> Council | None:
        """Who elected this host, or what an earlier controller on it proposed last. Raises RunError when broken."""
        try:
            return _council.decode(self._council.read_bytes()) if self._council is not None else None
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise RunError(f"{self._council}: is no council of keepstep: {error}") from error

    def write_council(self, council: Council) -> None:
        """The newest, before anybody is told."""
        if self._council is not None:
            write_whole(self._council, msgspec.json.encode(council))

    def write_incident(self, incident: Incident) -> None:
        """``incidents/NNNN.json`` and ``NNNN.txt``."""
        make_folder(self._incidents)
        name = f"{incident.number:04d}"
        text = render(incident, run=spoken(self.folder), timeline=True) + "\n"
        write_whole(self._incidents / f"{name}.txt", text.encode())
        write_whole(self._incidents / f"{name}.json", incident_to_json(incident))

    def write_placements(self, placements: Placements) -> None:
        """``placement.json``."""
        write_whole(self.folder / "placement.json", msgspec.json.encode(placements))

    def write_status(self, status: msgspec.Struct) -> None:
        """``status.json``."""
        write_whole(self.folder / "status.json", msgspec.json.encode(status))


def spoken(folder: Path) -> str:
    """How an operator names the run: short for one under ./runs, where the verbs look; its path elsewhere."""
    return folder.name if folder.parent == Path("runs").resolve() else str(folder)
