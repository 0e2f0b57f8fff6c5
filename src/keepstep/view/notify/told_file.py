"""Where it is kept what was told, and who tells: of several servers of one run only the one that holds the lock."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

from keepstep.core.errors import RunError
from keepstep.core.home import home_folder
from keepstep.core.own_folders import make_folder, open_file, write_whole
from keepstep.core.regular_files import read_regular
from keepstep.view.notify.told_state import Told, told_from_json, told_to_json

_MOST_BYTES = 64 << 20
_PATIENCE_S = 5.0  # for a file to be written


def folders_for(run: Path, environ: Mapping[str, str]) -> list[Path]:
    """Where what was told of the run in this folder may be kept, the best first: there, else in the user's own state.

    A run's folder may be another user's, or read-only.
    """
    real = run.resolve()
    named, home = environ.get("XDG_STATE_HOME"), home_folder(environ)
    state = Path(named) if named and os.path.isabs(named) else home / ".local" / "state" if home else None
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    own = [state.resolve() / "keepstep" / "notified" / digest] if state else []
    return [real / "notified", *own] if real.is_dir() else own


class ToldFile:
    """The file for one receiver. While another server holds its lock, that one tells."""

    def __init__(self, folders: list[Path], receiver: str) -> None:
        """``receiver``: what makes two receivers the same, as its address; only a hash of it is written."""
        self._name = hashlib.sha256(receiver.encode()).hexdigest()[:12]
        self._folders = folders
        self._path: Path | None = None
        self._lock = -1
        self._kept: bytes = b""
        self._writing = Thread()  # the last one
        self.trouble = ""  # why what was told is not kept, or told again

    def take_over(self) -> Told | None:
        """What was told so far, if it is ours to tell from now on; None while another server tells.

        Where nothing can be written it is ours: better told twice than never.
        """
        why = "there is no folder for it"
        for folder in self._folders:
            try:
                make_folder(folder)
                lock = open_file(folder / f"{self._name}.lock", os.O_WRONLY | os.O_CREAT)
            except OSError as error:
                why = f"{folder}: {error.strerror}"
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return None
            except OSError as error:  # a file system without locks: two servers would both tell
                self.trouble = f"{folder}: {error.strerror}: another server of this run would tell, too"
            self._lock, self._path = lock, folder / f"{self._name}.json"
            return self._read(self._path)
        self.trouble = f"what was told cannot be kept ({why}): after a restart it is told again"
        return Told()

    def _read(self, path: Path) -> Told:
        try:
            return told_from_json(read_regular(path, _MOST_BYTES), str(path))
        except FileNotFoundError:
            return Told()
        except OSError as error:
            self.trouble = f"{path}: {error.strerror}: all that is open is told again"
        except RunError as error:
            self.trouble = str(error)
        return Told()

    def keep(self, told: Told) -> None:
        """Write what was told. Where that fails, as on a full disk, ``trouble`` says so and telling goes on."""
        content = told_to_json(told)
        if self._path is None or content == self._kept:
            return
        if not self._writing.is_alive():
            # In a thread, as a file system that hangs must not keep from telling that it does.
            self._writing = Thread(target=self._write, args=(self._path, content), daemon=True)
            self._writing.start()
            self._writing.join(_PATIENCE_S)
        if self._writing.is_alive():
            self.trouble = f"{self._path}: its file system hangs: after a restart it is told again"

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_whole(path, content)
            self._kept, self.trouble = content, ""
        except OSError as error:
            self.trouble = f"{path}: {error.strerror}: after a restart it is told again"

    def close(self) -> None:
        """Let another server tell."""
        if self._lock >= 0:
            with suppress(OSError):
                os.close(self._lock)
            self._lock = -1
