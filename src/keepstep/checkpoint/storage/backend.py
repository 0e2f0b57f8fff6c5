"""Where checkpoints are kept: a folder (local or NFS), or anything that fsspec reaches (S3 and the like).

A storage holds folders, one a step, and in them files, never deeper. A file that ``write`` returned from is whole and
durable; one that it did not return from is not seen under its name by a reader of a file system, and may be seen
cut short in an object store, which is why nothing counts before a manifest says so. All faults are OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, cast

from keepstep.core.errors import CheckpointError, UsageError

MOST_FILES = 1 << 22
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
Bytes = bytes | bytearray | memoryview


class Readable(Protocol):
    """An open file."""

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; none at the end."""
        ...

    def readinto(self, target: memoryview) -> int:
        """Fill ``target`` from its beginning; returns how far, 0 at the end."""
        ...

    def seek(self, offset: int) -> object:
        """Go to ``offset`` bytes from the beginning."""
        ...

    def close(self) -> None: ...


class StorageReader(Protocol):
    """Folders of files, to be read. Names are those that ``safe_name`` accepts; sizes are in bytes."""

    @property
    def where(self) -> str:
        """What the user called it; for messages."""
        ...

    def folders(self) -> list[str]:
        """Names of the folders; empty when the storage is not there yet."""
        ...

    def files(self, folder: str) -> dict[str, int]:
        """Files of a folder and their sizes, hidden ones apart; empty when it is not there."""
        ...

    def open(self, folder: str, name: str) -> Readable:
        """A file to be read from its beginning."""
        ...


class Storage(StorageReader, Protocol):
    """Folders of files."""

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        """Make or replace a file; durable on return. Returns its size."""
        ...

    def remove(self, folder: str, names: Iterable[str]) -> None:
        """Remove files in the order given, those that are gone already too."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder in which no files are left, and what writers that died left hidden in it."""
        ...


def safe_name(name: str) -> str:
    """The name, if it is one of a file or folder of ours: no separator, not hidden, at most 100 characters.

    Raises:
        CheckpointError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{name[:100]!r}: is no name of a checkpoint's file")
    return name


def open_storage(where: str) -> Storage:
    """The storage at a path or a URL (``s3://bucket/run``).

    Raises:
        UsageError: a URL that fsspec or its plugin is not installed for.
    """
    scheme, separator, rest = where.partition("://")
    if not separator:
        return LocalStorage(Path(where))
    return LocalStorage(Path(rest)) if scheme == "file" else FsspecStorage(where)


class LocalStorage:
    """A folder of a file system, NFS included: drafts, fsync of file and folder, atomic rename."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def where(self) -> str:
        return str(self._root)

    def folders(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> dict[str, int]:
        try:
            with os.scandir(self._root / safe_name(folder)) as entries:
                return {
                    one.name: one.stat(follow_symlinks=False).st_size
                    for one, _ in zip(entries, range(MOST_FILES), strict=False)
                    if not one.name.startswith(".")
                }
        except FileNotFoundError:
            return {}

    def open(self, folder: str, name: str) -> Readable:
        # Not blocking, so that a pipe in a file's place cannot hold us up; no links, which may lead out of the folder.
        path = self._root / safe_name(folder) / safe_name(name)
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 0)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return cast("Readable", file)

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        path = self._root / safe_name(folder)
        _make(path)
        # One name, so that drafts of writers that died do not pile up. Should two write at once, what is renamed is
        # read back before it counts.
        draft = path / f".{safe_name(name)}.draft"
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                size = sum(_write_all(descriptor, chunk) for chunk in chunks)
                os.fsync(descriptor)
                # What is read back later comes from the device, and the cache is left to training.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)  # NFS may tell of a failed write only here
            os.replace(draft, path / name)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        _sync_folder(path)
        return size

    def remove(self, folder: str, names: Iterable[str]) -> None:
        path = self._root / safe_name(folder)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (path / safe_name(name)).unlink()
                _sync_folder(path)

    def remove_folder(self, folder: str) -> None:
        path = self._root / safe_name(folder)
        for draft in path.glob(".*"):
            draft.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # NFS keeps a removed file that somebody has open, hidden
            path.rmdir()
            _sync_folder(self._root)


class FsspecStorage:
    """A store that fsspec reaches. There is no rename and no fsync: an object counts once it is uploaded whole."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # pyright: ignore[reportMissingTypeStubs]
        except ImportError:
            raise UsageError(
                f"{url}: is reached through fsspec, which is not installed: pip install 'keepstep[storage]'"
            ) from None
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(url)  # pyright: ignore
        except (ImportError, ValueError) as error:
            raise UsageError(f"{url}: fsspec cannot reach it: {error}") from None
        self._fs, self._root = found[0], found[1].rstrip("/")
        self._url = url

    @property
    def where(self) -> str:
        return self._url

    def folders(self) -> list[str]:
        return sorted(name for name, entry in self._listed(self._root) if entry["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        return {
            name: -1 if entry["type"] == "directory" else int(entry["size"] or 0)
            for name, entry in self._listed(f"{self._root}/{safe_name(folder)}")
            if not name.startswith(".")
        }

    def _listed(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        try:
            self._fs.invalidate_cache()
            entries: list[dict[str, Any]] = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _as_os_error(error, path) from error
        named = ((str(entry["name"]).rstrip("/").rpartition("/")[2], entry) for entry in entries[:MOST_FILES])
        return [(name, entry) for name, entry in named if name]

    def open(self, folder: str, name: str) -> Readable:
        path = f"{self._root}/{safe_name(folder)}/{safe_name(name)}"
        try:
            return _Wrapped(self._fs.open(path, "rb"), path)
        except Exception as error:
            raise _as_os_error(error, path) from error

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        path = f"{self._root}/{safe_name(folder)}/{safe_name(name)}"
        size = 0
        try:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            file = self._fs.open(path, "wb")
            try:
                for chunk in chunks:
                    view = memoryview(chunk)
                    if file.write(view) != len(view):
                        raise OSError(errno.EIO, "short write", path)
                    size += len(view)
            except BaseException:
                if hasattr(file, "discard"):
                    file.discard()
                raise
            file.close()
            self._fs.invalidate_cache()
            stored = int(self._fs.info(path)["size"])
        except Exception as error:
            raise _as_os_error(error, path) from error
        if stored != size:
            raise OSError(errno.EIO, f"the store holds {stored} of {size} bytes", path)
        return size

    def remove(self, folder: str, names: Iterable[str]) -> None:
        for name in names:
            path = f"{self._root}/{safe_name(folder)}/{safe_name(name)}"
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                continue
            except Exception as error:
                raise _as_os_error(error, path) from error

    def remove_folder(self, folder: str) -> None:
        with contextlib.suppress(Exception):  # object stores have no folders
            self._fs.rmdir(f"{self._root}/{safe_name(folder)}")


class _Wrapped:
    """A file of fsspec whose faults, of many kinds, are OSError."""

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except Exception as error:
            raise _as_os_error(error, self._path) from error

    def readinto(self, target: memoryview) -> int:
        found = self.read(len(target))
        target[: len(found)] = found
        return len(found)

    def seek(self, offset: int) -> object:
        try:
            return self._file.seek(offset)
        except Exception as error:
            raise _as_os_error(error, self._path) from error

    def close(self) -> None:
        self._file.close()


def _as_os_error(error: Exception, path: str) -> OSError:
    if isinstance(error, OSError):
        return error
    lines = str(error).splitlines() or [""]
    return OSError(errno.EIO, f"{type(error).__name__} {lines[0][:200]}".strip(), path)


def _write_all(descriptor: int, chunk: Bytes) -> int:
    view = memoryview(chunk).cast("B")
    done = 0
    while done < len(view):
        wrote = os.write(descriptor, view[done:])
        if wrote <= 0:
            raise OSError(errno.EIO, "nothing could be written")
        done += wrote
    return done


def _make(path: Path) -> None:
    """Make a folder so that it is still there after a power cut."""
    if path.is_dir():
        return
    _make(path.parent)
    path.mkdir(exist_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
