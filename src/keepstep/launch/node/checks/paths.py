"""Can the paths of data sets and checkpoints be read and written, how fast, and do they give back what was written?

A bounded file is written and read past the page cache where the file system allows it; where it does not, the file is
dropped from the cache first, and a figure that may be the memory's is marked. Nothing that is there is changed.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue

from keepstep.core.errors import UsageError
from keepstep.core.node_row import PathSpeed
from keepstep.launch.node.checks import Found, Mode, Subject, Wanted

_CHUNK_BYTES = 4 << 20
_LEAST_TIMED_BYTES = 1 << 20
_PART = 10  # the file takes at most a tenth of the free space, or one chunk
_LOOKED_AT = 2000  # entries of a folder, and folders below it, among which files to read are looked for
_FOLDERS = 32
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SAMPLES = 16  # places of a file at which it is tried whether the page cache has them
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_QUICK_BYTES, _QUICK_S = 4 << 20, 0.25  # The limits of a quick look, as before a job's start.


class PathTrouble(Exception):
    """A path cannot be used. The text says what is wrong and what to do.

    ``is_sure``: no job can use it, either; else it may only be no place for files that are read back at once.
    """

    def __init__(self, text: str, *, is_sure: bool = True) -> None:
        super().__init__(text)
        self.is_sure = is_sure


def wanted_path(text: str) -> Wanted:
    """``PATH``, ``PATH:ro`` or ``PATH:rw``. Raises UsageError for a URL or an empty path."""
    path, separator, mode = text.rpartition(":")
    if not separator or mode not in ("ro", "rw"):
        path, mode = text, "any"
    if not path or "://" in path or "\0" in path:
        raise UsageError(
            f"--path {text!r}: give a folder or file of a file system, as PATH, PATH:ro or PATH:rw"
        )
    return Wanted(path, mode)  # pyright: ignore[reportArgumentType]


def configured_paths(checkpoint_dir: str, dataset_paths: str, mode: Mode = "rw") -> tuple[Wanted, ...]:
    """The paths of the settings that are folders or files. ``mode``: for that of checkpoints; data is only read."""
    found = [Wanted(text, "ro") for one in dataset_paths.split(",") if (text := one.strip())]
    folder = checkpoint_dir.removeprefix("file://")
    if folder and "://" not in folder:
        found.append(Wanted(os.path.abspath(folder), mode, is_made=True))
    return tuple(found)


def paths(subject: Subject) -> Iterator[Found]:
    """Find, before the first start, data sets that cannot be read and checkpoints that come back changed."""
    for wanted in subject.paths if subject.fresh else ():
        if (trouble := _trouble(wanted)) is not None:
            yield Found(f"node {subject.node}: {trouble}", unfit=trouble.is_sure)


def _trouble(wanted: Wanted) -> PathTrouble | None:
    try:
        measure(wanted, _QUICK_BYTES, _QUICK_S)
    except PathTrouble as error:
        return error
    return None


def measure_all(
    wanted: Sequence[Wanted], patience_s: float, most_bytes: int, most_s: float
) -> Iterator[PathSpeed | str]:
    """The speed of each path, or a line that says why it cannot be used; in their order.

    Each is measured in a thread of its own, because a file system may hang; what has not answered within ``patience_s``
    is told as such. ``most_bytes`` and ``most_s`` bound writing, and reading, of each.
    """
    answers: SimpleQueue[tuple[int, PathSpeed | str]] = SimpleQueue()

    def look(number: int) -> None:
        try:
            answers.put((number, measure(wanted[number], most_bytes, most_s)))
        except PathTrouble as error:
            answers.put((number, str(error)))
        except Exception as error:
            answers.put((number, f"{wanted[number].path}: its check failed: {type(error).__name__}: {error}"))

    for number in range(len(wanted)):
        threading.Thread(target=look, args=(number,), name="keepstep-path", daemon=True).start()
    advice = "see whether its server answers, and mount it anew"
    found: list[PathSpeed | str] = [
        f"{one.path} has not answered within {patience_s:g} s; {advice}" for one in wanted
    ]
    until_s = time.monotonic() + patience_s
    with suppress(Empty):
        for _ in wanted:
            number, answer = answers.get(timeout=max(until_s - time.monotonic(), 0.001))
            found[number] = answer
    yield from found


def measure(wanted: Wanted, most_bytes: int, most_s: float) -> PathSpeed:
    """Measure one path. Raises PathTrouble where it cannot be used as it is wanted."""
    path = Path(wanted.path)
    if wanted.is_made:
        path = next(one for one in (path, *path.parents) if one.exists())
    try:
        status = path.stat()
        result = PathSpeed(wanted.path, file_system=_file_system(status.st_dev))
    except OSError as error:
        raise PathTrouble(f"{path}: {error.strerror}; mount it there or correct the path") from None
    if stat.S_ISREG(status.st_mode):
        if wanted.mode == "rw":
            raise PathTrouble(f"{path} is a file; give its folder to test writing")
        return _read_there(result, [path], most_bytes, most_s)
    if not stat.S_ISDIR(status.st_mode):
        raise PathTrouble(f"{path} is neither a folder nor a file; correct the path")
    try:
        with os.scandir(path) as entries:
            next(entries, None)
    except OSError as error:
        raise PathTrouble(f"{path} cannot be read: {error.strerror}; give this user the right to") from None
    if wanted.mode != "ro":
        written = _written(path, wanted.mode, most_bytes, most_s)
        if isinstance(written, PathSpeed):
            in_memory = written.cached or result.file_system in _IN_MEMORY
            return replace(written, path=wanted.path, file_system=result.file_system, cached=in_memory)
        result = replace(result, note=written)
    return _read_there(result, _files(path), most_bytes, most_s)


def _written(path: Path, mode: str, most_bytes: int, most_s: float) -> PathSpeed | str:
    """The speed of a file written there and read back; or why it cannot be written, where it need not be."""
    probe = path / f".keepstep-check-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        room = os.statvfs(path)
        free = room.f_bavail * room.f_frsize
        part = max(free // _PART, _CHUNK_BYTES if free > 4 * _CHUNK_BYTES else 0)
        size = min(max(most_bytes, _CHUNK_BYTES), part) // _CHUNK_BYTES * _CHUNK_BYTES
        if not size and room.f_blocks:  # a file system without blocks, as of the kernel, says nothing
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if mode == "rw":
            advice = (
                "free some" if error.errno in _FULL else "mount it writable or give this user the right to"
            )
            raise PathTrouble(f"{path} cannot be written: {error.strerror}; {advice}") from None
        return "full" if error.errno in _FULL else "read-only"
    try:
        chunk = mmap.mmap(-1, _CHUNK_BYTES)  # aligned, as direct I/O wants it
        chunk.write(random.Random(path.name).randbytes(_CHUNK_BYTES))
        done, seconds = _write(probe, chunk, size, most_s)
        back = mmap.mmap(-1, _CHUNK_BYTES)

        def is_alike(offset: int, count: int) -> bool:
            return offset % _CHUNK_BYTES != 0 or back[:count] == chunk[:count]

        got, read_s, cached = _read(probe, back, done, most_s, is_alike)
        return PathSpeed(str(path), _per_s(got, read_s), _per_s(done, seconds), cached=cached)
    except _ChangedError as error:
        raise PathTrouble(
            f"{path} gives back other bytes than were written there, at {error.offset} of {size}; "
            "save nothing there and have the storage looked at"
        ) from None
    except OSError as error:
        raise PathTrouble(
            f"{path}: a file of {size >> 20} MiB could not be written and read back: {error.strerror}; "
            "have the storage looked at",
            is_sure=False,
        ) from None
    finally:
        with suppress(OSError):
            os.unlink(probe)


def _write(file: Path, chunk: mmap.mmap, size: int, most_s: float) -> tuple[int, float]:
    """Bytes that were written, and the seconds until they were on storage."""
    begun_s, done = time.monotonic(), 0
    descriptor = _opened(file, os.O_WRONLY)
    try:
        while done < size and (not done or time.monotonic() - begun_s < most_s):
            count = os.write(descriptor, chunk)
            done += count
            if count < _CHUNK_BYTES:
                break
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return done, time.monotonic() - begun_s


class _ChangedError(Exception):
    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def _read(
    file: Path, into: mmap.mmap, most_bytes: int, most_s: float, is_alike: Callable[[int, int], bool]
) -> tuple[int, float, bool]:
    """Bytes that were read, in how many seconds, and whether the page cache had them. Raises _ChangedError, OSError."""
    descriptor = _opened(file, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        cached = _is_cached(file)
        begun_s, got, spent_s = time.monotonic(), 0, 0.0
        while got < most_bytes and (not got or spent_s < most_s):
            count = os.readv(descriptor, [into])
            spent_s += time.monotonic() - begun_s
            if not count:
                break
            if not is_alike(got, count):
                raise _ChangedError(got)
            got += count
            if count % mmap.PAGESIZE:  # the end of the file; direct I/O refuses to go on from such a place
                break
            begun_s = time.monotonic()
        return got, spent_s, cached
    finally:
        os.close(descriptor)


def _read_there(result: PathSpeed, files: Sequence[Path], most_bytes: int, most_s: float) -> PathSpeed:
    """Add how fast the files that are there are read. Raises PathTrouble where one fails to be read."""
    into = mmap.mmap(-1, _CHUNK_BYTES)
    got, seconds, cached = 0, 0.0, False
    for file in files:
        try:
            more, took_s, was_cached = _read(file, into, most_bytes - got, most_s - seconds, _anything)
        except PermissionError as error:
            if len(files) == 1 and str(file) == result.path:
                raise PathTrouble(f"{file}: {error.strerror}; give this user the right to read it") from None
            continue  # somebody else's file
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError as error:
            raise PathTrouble(
                f"{file} cannot be read: {error.strerror}; have the storage looked at"
            ) from None
        got, seconds, cached = got + more, seconds + took_s, cached or was_cached
        if got >= most_bytes or seconds >= most_s:
            break
    if not got:
        return replace(result, note=", ".join(filter(None, (result.note, "no file to read"))))
    if got < _LEAST_TIMED_BYTES:
        return replace(result, note=", ".join(filter(None, (result.note, "too little to time"))))
    in_memory = cached or result.file_system in _IN_MEMORY
    return replace(result, read=_per_s(got, seconds), cached=in_memory)


def _anything(offset: int, count: int) -> bool:
    return True


def _files(folder: Path) -> list[Path]:
    """Files in a folder and below it, the largest first, of the first few that are found."""
    found: list[tuple[int, Path]] = []
    waiting, looked = [folder], 0
    for _ in range(_FOLDERS):
        if not waiting or looked >= _LOOKED_AT:
            break
        with suppress(OSError), os.scandir(waiting.pop(0)) as entries:
            for entry in entries:
                looked += 1
                if looked > _LOOKED_AT:
                    break
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False) and (size := entry.stat().st_size):
                        found.append((size, Path(entry.path)))
    return [path for _, path in sorted(found, key=lambda one: -one[0])]


def _opened(file: Path, flags: int) -> int:
    """A descriptor past the page cache where the file system allows it."""
    flags |= os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    with suppress(OSError):
        return os.open(file, flags | os.O_DIRECT)
    return os.open(file, flags)


def _is_cached(file: Path) -> bool:
    """Whether some of a file is in the page cache, or lives in memory altogether."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pages = os.fstat(descriptor).st_size // mmap.PAGESIZE
            for place in range(min(_SAMPLES, pages)):
                offset = place * pages // min(_SAMPLES, pages) * mmap.PAGESIZE
                with suppress(BlockingIOError):
                    if os.preadv(descriptor, [page], offset, os.RWF_NOWAIT):
                        return True
        finally:
            os.close(descriptor)
    return False


def _file_system(device: int) -> str:
    """The kind of the file system with this device number, as ``nfs4``; "" where it is not known."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo", errors="replace") as mounts:
        for line in mounts:
            before, separator, after = line.partition(" - ")
            if separator and before.split(" ", 3)[2:3] == [number]:
                return after.split(" ", 1)[0][:20]
    return ""


def _per_s(count: int, seconds: float) -> float:
    return count / max(seconds, 1e-9) if count else 0.0
