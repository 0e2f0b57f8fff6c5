"""Where viewers get a run from: its folder, or its controller over the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from keepstep.view.samples import SampleStore
from keepstep.view.snapshot import RunSnapshot


class RunSource(Protocol):
    """A run that is looked at again and again. Not for several threads at once."""

    samples: SampleStore

    def refresh(self) -> RunSnapshot:
        """Look again. What cannot be read is told in ``troubles`` of the snapshot, and the rest is shown."""
        ...

    def close(self) -> None:
        """Close connections and files."""
        ...


def open_source(run: str | Path) -> RunSource:
    """The run of this name under ``./runs``, or in this folder: live over the wire, else as its files tell.

    Raises RunError where there is no such run.
    """
    raise NotImplementedError
