"""What a heartbeat tells besides, for those who look at the job: what was sent where, and which steps are kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from keepstep.agent.sensors.network import NetworkSensors
from keepstep.core.own_folders import write_whole
from keepstep.wire.messages import Heartbeat, KeptSteps, PathRate

logger = logging.getLogger("keepstep.agent")

PATHS_FILE = "links.json"  # in the node's folder of the run: what was sent where last


class ForViewers:
    """Adds to heartbeats what is rarely new. ``kept``: gives the steps that are kept; ``folder``: the node's."""

    def __init__(self, network: NetworkSensors, kept: Callable[[], KeptSteps], folder: Path) -> None:
        self._network, self._kept, self._folder = network, kept, folder
        self._told: KeptSteps | None = None  # by this connection
        self._is_written = True

    def again(self) -> None:
        """Tell a new controller what the last one was told."""
        self._told = None

    def added(self, beat: Heartbeat) -> Heartbeat:
        """The heartbeat with what is new."""
        paths, kept = self._network.lately(beat.sent_s), self._kept()
        if paths:
            self._write(paths)
        if not paths and kept == self._told:
            return beat
        self._told = kept
        return msgspec.structs.replace(beat, paths=paths, kept=kept)

    def _write(self, paths: Sequence[PathRate]) -> None:
        """Write the file for viewers of a run that has ended."""
        content = {"unix_s": time.time(), "columns": PathRate.__struct_fields__, "paths": paths}
        path = self._folder / PATHS_FILE
        try:
            write_whole(path, msgspec.json.encode(content) + b"\n")
            self._is_written = True
        except OSError as error:  # such as a full disk
            if self._is_written:
                logger.warning("%s: cannot be written: %s", path, error.strerror)
            self._is_written = False
