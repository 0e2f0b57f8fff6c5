"""Where checkpoints are kept: a folder (local or NFS), or anything that fsspec reaches (S3 and the like).

A storage holds folders, one for each step, and in them files, but no deeper folders. Once ``write`` has returned, its
file is whole and durable. Before that, a file system shows no file under its name, but an object store may show a file
that is cut short, which is why no file counts before a manifest lists it. All faults are raised as OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, Protocol, cast

from keepstep.core.errors import CheckpointError, UsageError

MOST_FILES = 1 << 22
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
Bytes = bytes | bytearray | memoryview


class Readable(Protocol):
    """A file that is open for reading."""

    def readinto(self, target: memoryview) -> int:
        """Read into ``target``. Returns the number of bytes read, 0 at the end of the file."""
        ...

    def seek(self, offset: int) -> object:
        """Continue reading ``offset`` bytes from the beginning."""
        ...

    def close(self) -> None: ...


class StorageReader(Protocol):
    """A storage to read from. Names are those that ``safe_name`` accepts; sizes are in bytes."""

    where: str
    """The path or URL that the user gave, for messages."""

    def folders(self) -> list[str]:
        """Names of the folders; empty when the storage does not exist yet."""
        ...

    def files(self, folder: str) -> dict[str, int]:
        """Sizes of a folder's files by name, without hidden files; empty when the folder does not exist."""
        ...

    def open(self, folder: str, name: str) -> Readable:
        """Open a file for reading."""
        ...


class Storage(StorageReader, Protocol):
    """A storage to read from and write to."""

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        """Make or replace a file, which is durable on return. Returns its size."""
        ...

    def remove(self, folder: str, names: Iterable[str]) -> None:
        """Remove files in the order given; files that do not exist are no error."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder without files, and with it the hidden drafts of writers that died."""
        ...


def safe_name(name: str) -> str:
    """The name, if it has no separator, is not hidden and at most 100 characters; else CheckpointError."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{name[:100]!r}: is no name of a checkpoint's file")
    return name


def open_storage(where: str) -> Storage:
    """The storage at a path or a URL (``s3://bucket/run``).

    Raises UsageError when fsspec, or its plugin for this kind of URL, is not installed.
    """
    scheme, separator, rest = where.partition("://")
    if not separator:
        return LocalStorage(Path(where))
    return LocalStorage(Path(rest)) if scheme == "file" else FsspecStorage(where)


class LocalStorage:
    """A folder of a file system, NFS included. A file is written as a draft, synced, and renamed atomically."""

    def __init__(self, root: Path) -> None:
        self._root, self.where = root, str(root)

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
        # O_NONBLOCK: opening a pipe in a file's place must not block. O_NOFOLLOW: a link may lead out of the folder.
        path = self._root / safe_name(folder) / safe_name(name)
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 0)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return cast("Readable", file)

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        path = self._root / safe_name(folder)
        _make(path)
        # The draft's name is fixed, so that drafts of writers that died do not pile up. If two processes write at once,
        # the damage is found when the file is read back.
        draft = path / f".{safe_name(name)}.draft"
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(descriptor, "wb") as file:  # NFS may report a failed write only on close
                size = sum(map(file.write, chunks))
                file.flush()
                os.fsync(descriptor)
                # Drop the pages, so that reading back reads the device, and training keeps the page cache.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
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
        with contextlib.suppress(OSError):  # on NFS a removed file that is still open stays as a hidden file
            path.rmdir()
            _sync_folder(self._root)


class FsspecStorage:
    """An object store that fsspec reaches, which has no rename and no fsync; sizes are checked after each upload."""

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
        self.where = url

    def folders(self) -> list[str]:
        return sorted(name for name, entry in self._listed(self._root) if entry["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        return {
            name: -1 if entry["type"] == "directory" else int(entry["size"] or 0)
            for name, entry in self._listed(f"{self._root}/{safe_name(folder)}")
            if not name.startswith(".")
        }

    def _listed(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        entries: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError), _as_os_error(path):
            self._fs.invalidate_cache()
            entries = self._fs.ls(path, detail=True)
        named = ((str(entry["name"]).rstrip("/").rpartition("/")[2], entry) for entry in entries[:MOST_FILES])
        return [(name, entry) for name, entry in named if name]

    def _path(self, folder: str, name: str) -> str:
        return f"{self._root}/{safe_name(folder)}/{safe_name(name)}"

    def open(self, folder: str, name: str) -> Readable:
        path = self._path(folder, name)
        with _as_os_error(path):
            return _Wrapped(self._fs.open(path, "rb"), path)

    def write(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        path = self._path(folder, name)
        size = 0
        with _as_os_error(path):
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
            if stored != size:
                raise OSError(errno.EIO, f"the store holds {stored} of {size} bytes", path)
        return size

    def remove(self, folder: str, names: Iterable[str]) -> None:
        for path in (self._path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError), _as_os_error(path):
                self._fs.rm_file(path)

    def remove_folder(self, folder: str) -> None:
        with contextlib.suppress(Exception):  # most object stores have no folders to remove
            self._fs.rmdir(f"{self._root}/{safe_name(folder)}")


class _Wrapped:
    """A file of fsspec whose faults are raised as OSError."""

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def readinto(self, target: memoryview) -> int:
        with _as_os_error(self._path):
            found: bytes = self._file.read(len(target))
        target[: len(found)] = found
        return len(found)

    def seek(self, offset: int) -> object:
        with _as_os_error(self._path):
            return self._file.seek(offset)

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _as_os_error(path: str) -> Generator[None]:
    """Raise an error of any other kind, as fsspec's plugins have them, as an OSError about ``path``."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise OSError(errno.EIO, f"{type(error).__name__} {lines[0][:200]}".strip(), path) from error


def _make(path: Path) -> None:
    """Make a folder and sync its parent, so that it survives a power cut."""
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
