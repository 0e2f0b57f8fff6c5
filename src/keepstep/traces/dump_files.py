"""Which files of a folder are flight-recorder dumps, and of which ranks they are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from keepstep.core.errors import TraceError
from keepstep.core.regular_files import open_regular

MOST_RANKS = 1 << 20  # a number from here on is a date or a process id, not a rank
MOST_FILES = 1 << 17  # files read from one folder
_RANK = re.compile(r"(?<!local)(?<!local[_-])rank[_.=-]?(\d{1,9})", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_AT_THE_END = re.compile(r"\d\.?(json|pickle|pkl)?$")
_OF_TORCH = re.compile(r"nccl_trace|^dump_?\d")
_DEEPEST = 3  # folders below the given one in which dumps are looked for
_HEAD_BYTES = 4096
_PICKLE = b"\x80"
_KEYS = (b"entries", b"pg_config", b"pg_status")  # one of them is near the beginning of a dump


def find_dumps(folder: Path) -> list[Path]:
    """The dumps in a folder, or, where there are none, those in folders in it (of nodes or ranks); else spoilt ones.

    Raises:
        TraceError: the folder cannot be listed, or has too many files.
    """
    found = dumps_at_the_top(folder) or dumps_below(folder)
    return found or [path for path in _listed(folder)[0] if _is_spoilt(path)]


def dumps_at_the_top(folder: Path) -> list[Path]:
    """The dumps in a folder itself. Raises TraceError as ``find_dumps``."""
    return _dumps(_listed(folder)[0])


def dumps_below(folder: Path) -> list[Path]:
    """The dumps in the folders of a folder, as deep as the first are, at most ``_DEEPEST`` folders.

    Folders that cannot be listed are skipped. Raises as ``find_dumps``.
    """
    folders = _listed(folder)[1]
    for _ in range(_DEEPEST):
        found: list[Path] = []
        deeper: list[Path] = []
        for below in folders:
            with contextlib.suppress(TraceError):
                files, inside = _listed(below)
                found += _dumps(files) or [path for path in files if _is_of_its_folder(path)]
                deeper += inside
        if found or len(deeper) > MOST_FILES:
            return found
        folders = deeper
    return []


def _is_spoilt(path: Path) -> bool:
    """Whether a file is named as a dump may be and is empty, or a pickle under a name that torch gives to dumps."""
    if not _AT_THE_END.search(path.name) or not path.exists():
        return False
    if path.stat().st_size == 0:
        return True
    with contextlib.suppress(OSError), open_regular(path) as file:
        return bool(_OF_TORCH.search(path.name)) and file.read(1) == _PICKLE
    return False


def is_dump(path: Path) -> bool:
    """Whether a file begins as a dump does: as a pickle or JSON with a dump's keys."""
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    if head[:1] == b"{":
        return any(b'"%b"' % key in head for key in _KEYS)
    return head[:1] == _PICKLE and any(key in head for key in _KEYS)


def ranks_of(paths: Iterable[Path]) -> dict[Path, int | None]:
    """The rank of each dump by its name; None for a name that does not tell it.

    It is the number after the word "rank". In names without this word it is the number that differs most among the
    names which are otherwise alike, the last one of several such numbers. Where a name has no number, the one of the
    file's folder counts, too.
    """
    found: dict[Path, int | None] = {}
    alike: dict[str, list[Path]] = {}
    for path in paths:
        word = _RANK.search(_name(path))
        found[path] = int(word[1]) if word and int(word[1]) < MOST_RANKS else None
        if word is None:
            alike.setdefault(_shape(path), []).append(path)
    for some in alike.values():
        found.update(zip(some, _numbered(some), strict=True))
    return found


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files and the folders in a folder, sorted by name."""
    files: list[Path] = []
    folders: list[Path] = []
    try:
        for number, entry in enumerate(folder.iterdir()):
            if number == MOST_FILES:
                raise TraceError(
                    f"{folder}: has more than {MOST_FILES} files; give a folder with the dumps only"
                )
            (folders if entry.is_dir() else files).append(entry)
    except OSError as error:
        raise TraceError(f"{folder}: cannot be listed: {error.strerror}") from error
    return sorted(files), sorted(folders)


def _dumps(files: Sequence[Path]) -> list[Path]:
    """The dumps among files. A file that is empty or damaged is one if it is named like one that is not."""
    numbered = [path for path in files if _NUMBER.search(path.name) and path.is_file()]
    sound = {path for path in numbered if is_dump(path)}
    shapes = {_shape(path) for path in sound}
    return [path for path in numbered if path in sound or _shape(path) in shapes]


def _is_of_its_folder(path: Path) -> bool:
    """Whether a file without a number in its name is a dump in a folder with one."""
    return bool(_NUMBER.search(_name(path))) and path.is_file() and is_dump(path)


def _name(path: Path) -> str:
    """The name of a file, with that of its folder where it has no number itself, as in ``rank4/nccl_trace``."""
    return path.name if _NUMBER.search(path.name) else f"{path.parent.name}/{path.name}"


def _shape(path: Path) -> str:
    return _NUMBER.sub("#", _name(path))


def _numbered(paths: Sequence[Path]) -> list[int | None]:
    """The ranks of files whose names differ in numbers only."""
    columns: list[tuple[tuple[int, bool, int], list[int | None]]] = []
    rows = [
        [int(word) if len(word) < 10 else MOST_RANKS for word in _NUMBER.findall(_name(p))] for p in paths
    ]
    for place, column in enumerate(zip(*rows, strict=True)):
        ranks = [number if number < MOST_RANKS else None for number in column]
        distinct = {rank for rank in ranks if rank is not None}
        # Ranks lie close together, process ids do not.
        dense = max(distinct, default=0) < 16 * len(paths) + 1024
        columns.append(((len(distinct), dense, place), ranks))
    return max(columns)[1] if columns else [None] * len(paths)


def two_of_one_rank(rank: int, one: Path, other: Path) -> str:
    """What to do about two different dumps of a rank."""
    if one.parent == other.parent:
        return f"{other}: rank {rank} has another dump, {one.name}; keep those of one hang"
    folders = f"{one.parent.name}/{one.name} and {other.parent.name}/{other.name}"
    return (
        f"{one.parent.parent}: {folders} are different dumps of rank {rank}; give one of the folders, or, if each is "
        "of a node of one job, rename the files by the job's ranks"
    )
