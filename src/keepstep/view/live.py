"""A run that lives, as its controller tells over the wire; what happened before comes from its folder."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from keepstep.core.errors import KeepstepError
from keepstep.traces import Run
from keepstep.view.folder import FolderSource, Times, Told, pause_s
from keepstep.view.follower import Follower
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.samples import SampleStore
from keepstep.view.status_rows import status_from

_PATIENCE_S = 5.0
_AGAIN_S = 5.0  # after the controller could not be asked


class LiveSource:
    """Asks the controller where it can be asked, and reads the folder's status where it cannot."""

    def __init__(self, run: Run, times: Times | None = None) -> None:
        self._times = times or Times()
        self._folder = FolderSource(run, self._times)
        self._follower = Follower(run, _PATIENCE_S)
        self._next_s = 0.0
        self._last: Told | None = None
        self._trouble = ""

    @property
    def samples(self) -> SampleStore:
        """The samples of folder and controller."""
        return self._folder.samples

    @property
    def is_whole(self) -> bool:
        """Whether all that is in the folder has been looked at once."""
        return self._folder.is_whole

    def refresh(self) -> RunSnapshot:
        """Look again. What cannot be read is told in ``troubles`` of the snapshot, and the rest is shown."""
        snapshot = self._folder.refresh(self._asked())
        return replace(snapshot, troubles=(*snapshot.troubles, self._trouble)) if self._trouble else snapshot

    def read_all(self) -> RunSnapshot:
        """Look until all that is there was read once."""
        snapshot = self.refresh()
        while not self.is_whole:
            snapshot = self.refresh()
        return snapshot

    def close(self) -> None:
        """Close the connection to the controller."""
        self._follower.close()

    def _asked(self) -> Told | None:
        now_s = self._times.monotonic()
        if self._folder.has_ended():
            self._last, self._trouble = None, ""
            self._follower.close()
        elif now_s >= self._next_s:
            began_s = time.thread_time()
            try:
                view = self._follower.ask()
                self._last, self._trouble = Told(view, status_from(view.status)), ""
                self._next_s = now_s + pause_s(time.thread_time() - began_s)
            except (KeepstepError, msgspec.MsgspecError) as error:
                self._last, self._next_s = None, now_s + _AGAIN_S
                self._trouble = f"the folder's status is shown: {error}"
        return self._last
