"""Where viewers get a run from: its folder, or its controller over the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from keepstep.core.errors import RunError
from keepstep.traces import Run, open_run
from keepstep.view.folder import FolderSource
from keepstep.view.live import LiveSource
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.samples import SampleStore


class RunSource(Protocol):
    """A run that is looked at again and again. Not for several threads at once."""

    @property
    def samples(self) -> SampleStore:
        """Own times by rank and step."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all that is in the folder was looked at once: until then samples and incidents are still read."""
        ...

    def refresh(self) -> RunSnapshot:
        """Look again. What cannot be read is told in ``troubles`` of the snapshot, and the rest is shown."""
        ...

    def read_all(self) -> RunSnapshot:
        """Look until all that is there was read once, as for a page that is written once."""
        ...

    def close(self) -> None:
        """Close connections and files."""
        ...


def open_source(run: str | Path, *, from_folder: bool = False) -> RunSource:
    """The run of this name under ``./runs``, or in this folder: live over the wire, else as its files tell.

    ``from_folder``: do not ask its controller. Raises RunError where there is no such run.
    """
    opened = open_run(run)
    return FolderSource(opened) if from_folder or not _may_be_asked(opened) else LiveSource(opened)


def _may_be_asked(run: Run) -> bool:
    """Whether the folder says that the run lives and where its controller is."""
    try:
        return run.end() is None and bool(run.describe().get("controller"))
    except RunError:
        return False
