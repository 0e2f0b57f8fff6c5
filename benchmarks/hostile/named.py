"""The hostile files that reviewers and fuzzers have found, each given to the command that a user would give it to."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hostile.samples import RANKS, call_log, dump, dumps, incident, run_folder, training_log

REFUSED = (2,)
READ = (0, 1)


@dataclass(frozen=True)
class Case:
    """A hostile file. ``make`` puts it into a folder and gives the words of the command after ``keepstep``.

    ``codes``: the exit codes that are right; ``says``: words that the output has, so that the user finds the file;
    ``silent_on``: words that it has not.
    """

    name: str
    make: Callable[[Path], Sequence[str]]
    codes: Sequence[int] = REFUSED
    says: str = ""
    silent_on: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def _dumps_with(folder: Path, name: str, content: Any) -> list[str]:
    """Four sound dumps and one more."""
    dumps(folder)
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return ["analyze", str(folder)]


def _one_dump(content: Callable[[], Any]) -> Callable[[Path], list[str]]:
    """A folder with one dump. The content is made late: what this process holds counts as memory of the command's."""

    def make(folder: Path) -> list[str]:
        made = content()
        data = made if isinstance(made, bytes) else pickle.dumps(made)
        (folder / "nccl_trace_rank_0").write_bytes(data)
        return ["analyze", str(folder)]

    return make


def _with_ranks(ranks: Callable[[], str]) -> Callable[[Path], list[str]]:
    def content() -> Any:
        made = dump(0)
        made["pg_config"]["0"]["ranks"] = ranks()
        return made

    return _one_dump(content)


def _shared(depth: int) -> Any:
    value: Any = ["x"]
    for _ in range(depth):
        value = [value, value]
    return value


def _file(name: str, content: Callable[[], bytes]) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(content())
        return ["analyze", str(folder / name)]

    return make


def _call_of_rank(folder: Path) -> list[str]:
    lines = (
        call_log(steps=40)
        + b"[save_count 1] [1755590149.366929580] [Rank 99999999] "
        + (b"Fun AllReduce Data 4 stream 0x55919d298060 opCount 3239\n")
    )
    return _file("calls.log", lambda: lines)(folder)


def _sparse_tar(folder: Path) -> list[str]:
    """An archive whose member says that it has 1 PiB, most of it a hole (GNU's old form of sparse members)."""
    info = tarfile.TarInfo("log_rank0")
    info.size, info.type = 512, tarfile.GNUTYPE_SPARSE
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT)[:512])
    head[156:157] = tarfile.GNUTYPE_SPARSE
    size = 1 << 50
    base = bytes([0x80]) + size.to_bytes(11, "big")
    head[386:398], head[398:410] = bytes([0x80]) + (size - 512).to_bytes(11, "big"), b"00000001000\0"
    head[483:495] = base
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    data = call_log(steps=4)[:512].ljust(512, b"\n")
    path = folder / "log.tar"
    path.write_bytes(bytes(head) + data + bytes(1024))
    return ["analyze", str(path)]


def _gzip_of(pattern: bytes, size: int) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        path = folder / "train.log.gz"
        block = gzip.compress(pattern * ((64 << 20) // len(pattern)), 1)
        with open(path, "wb") as file:
            for _ in range(size // (64 << 20)):  # the members of a gzip file follow each other
                file.write(block)
        return ["analyze", str(path)]

    return make


def _twice(log: bytes) -> bytes:
    return b"".join(line + line for line in log.splitlines(keepends=True))


def _long_lines(start: bytes, middle: bytes) -> bytes:
    line = start + middle * ((65_500 - len(start)) // len(middle)) + b"\n"
    return training_log(200) + line * 200


def _fifo(folder: Path) -> list[str]:
    os.mkfifo(folder / "dump_0")
    return ["analyze", str(folder / "dump_0")]


def _fifo_among(folder: Path) -> list[str]:
    dumps(folder)
    os.mkfifo(folder / "nccl_trace_rank_4")
    return ["analyze", str(folder)]


def _run_with(change: Callable[[Path], object], *verb: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        run_folder(folder)
        change(folder)
        return [verb[0], str(folder), *verb[1:]]

    return make


def _fifo_instead(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def _written(name: str, content: Callable[[], bytes]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content())

    return change


def _sparse(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with open(folder / name, "ab") as file:
            file.truncate(1 << 40)

    return change


def _hole(folder: Path) -> list[str]:
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump(0)))
    _sparse("nccl_trace_rank_0")(folder)
    return ["analyze", str(folder)]


def _many_iterations(folder: Path) -> None:
    (folder / "incidents/0001.json").unlink()
    (folder / "status.json").unlink()
    _sparse("nodes/0/iterations.jsonl")(folder)


def _two_hangs(folder: Path) -> list[str]:
    dumps(folder / "monday")
    dumps(folder / "tuesday", seq=70)
    return ["analyze", str(folder)]


def _folders(folder: Path) -> list[str]:
    for rank in range(RANKS):
        dumps(folder / f"node{rank // 2}", ranks=(rank,))
    return ["analyze", str(folder)]


def _table(folder: Path) -> list[str]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    count = 400_000
    names = arrow.DictionaryArray.from_arrays(arrow.array([0] * count, "int8"), ["x" * (1 << 20)])
    zeros = arrow.array([0] * count)
    columns = dict.fromkeys(("rank", "step", "seq_id", "dp_rank", "stage"), zeros)
    times = arrow.array([0.0] * count)
    table = arrow.table({**columns, "optype": names, "start_ts": times, "duration": times})
    parquet.write_table(table, folder / "t.parquet")
    return ["analyze", str(folder / "t.parquet")]


_P = b"\x80\x02"
_MEMO = _P + b"]r" + (1 << 28).to_bytes(4, "little") + b"."
_ASCII = {"PYTHONIOENCODING": "ascii"}
_NESTED = b"[" * 100_000

CASES: tuple[Case, ...] = (
    Case("a call of rank 99999999", _call_of_rank, (0, 1, 2), "99999999"),
    Case(
        "a stray dump_20251125 among dumps",
        lambda f: _dumps_with(f, "dump_20251125", dump(0)),
        READ,
        "dump_20251125",
    ),
    Case(
        "a stray dump_251125, a date as well",
        lambda f: _dumps_with(f, "dump_251125", dump(0)),
        READ,
        "dump_251125",
    ),
    Case(
        "dump_20251125 alone", _file("dump_20251125", lambda: pickle.dumps(dump(0))), REFUSED, "dump_20251125"
    ),
    Case(
        "a member of rank 16 million", _with_ranks(lambda: "[0, 1, 2, 16000000]"), REFUSED, "impossible ranks"
    ),
    Case("a member of rank 1,048,575", _with_ranks(lambda: "[0, 1, 2, 1048575]"), READ),
    Case("a million members", _with_ranks(lambda: str(list(range(1 << 20)))), READ),
    Case("200,000 dashes as ranks", _with_ranks(lambda: "-" * 200_000), REFUSED, "no list of ranks"),
    Case("200,000 brackets as ranks", _with_ranks(lambda: "[" * 200_000), REFUSED, "no list of ranks"),
    Case("pickle: memo 2^28", _one_dump(lambda: _MEMO)),
    Case("pickle: shared lists as a name", _one_dump(lambda: dump(0) | {"version": _shared(60)})),
    Case("pickle: shared lists as an entry's title", _one_dump(lambda: dump(0, profiling_name=_shared(23)))),
    Case("pickle: a list that holds itself", _one_dump(lambda: _P + b"]q\0h\0a.")),
    Case("pickle: 64 Mi lists", _one_dump(lambda: _P + b"]" * (64 << 20) + b".")),
    Case("pickle: 64 Mi marks", _one_dump(lambda: _P + b"(" * (64 << 20) + b".")),
    Case(
        "pickle: a string of 2^60 bytes",
        _one_dump(lambda: _P + b"\x8d" + (1 << 60).to_bytes(8, "little") + b"x."),
    ),
    Case(
        "pickle: a number of 50 MB",
        _one_dump(lambda: _P + b"\x8b" + (50 << 20).to_bytes(4, "little") + b"\1" * (50 << 20)),
    ),
    Case(
        "pickle: a call of os.system",
        _one_dump(lambda: b"\x80\x02cos\nsystem\nX\2\0\0\0id\x85R."),
        REFUSED,
        "os.system",
    ),
    Case(
        "pickle: one entry, three million times",
        _one_dump(lambda: dump(0) | {"entries": [dump(0)["entries"][0]] * 3_000_000}),
    ),
    Case("JSON: 100,000 brackets", _one_dump(lambda: b'{"version": "2.9", "entries": ' + _NESTED)),
    Case(
        "JSON: 20 million lists",
        _one_dump(lambda: b'{"version": "2.9", "entries": [' + b"[]," * 20_000_000 + b"[]]}"),
    ),
    Case("a dump of 1 TiB, a hole", _hole, REFUSED, "larger than"),
    Case("a sparse tar member of 1 PiB", _sparse_tar, (0, 1, 2)),
    Case("a gzip of 4 GiB of zeros", _gzip_of(bytes(1 << 20), 4 << 30)),
    Case("a gzip of 4 GiB of empty lines", _gzip_of(b"\n" * (1 << 20), 4 << 30)),
    Case(
        "64 KiB lines: iteration", _file("t.log", lambda: _long_lines(b" iteration ", b"1/ 1 | ")), (0, 1, 2)
    ),
    Case("64 KiB lines: digits", _file("t.log", lambda: _long_lines(b" iteration ", b"9")), (0, 1, 2)),
    Case("64 KiB lines: blanks", _file("t.log", lambda: _long_lines(b" iteration", b" ")), (0, 1, 2)),
    Case("64 KiB lines: save_count", _file("t.log", lambda: _long_lines(b"[save_count ", b"1")), (0, 1, 2)),
    Case("every line of a training log twice", _file("t.log", lambda: _twice(training_log(20_000))), READ),
    Case("every line of a call log twice", _file("c.log", lambda: _twice(call_log(steps=400))), READ),
    Case("a FIFO", _fifo, REFUSED, "FIFO"),
    Case("a FIFO among dumps", _fifo_among, READ),
    Case("dumps in folders of nodes", _folders, READ, silent_on="no dump"),
    Case("dumps of two hangs in two folders", _two_hangs, REFUSED, "give one of the folders"),
    Case("a table of one name of 1 MiB, 400,000 times", _table, (0, 1, 2)),
    Case("analyze, ASCII output", lambda f: (dumps(f), ["analyze", str(f)])[1], READ, environment=_ASCII),
    Case("report, ASCII output", _run_with(lambda f: None, "report"), READ, environment=_ASCII),
    Case(
        "report --json, ASCII output", _run_with(lambda f: None, "report", "--json"), READ, environment=_ASCII
    ),
    Case("status, ASCII output", _run_with(lambda f: None, "status"), READ, environment=_ASCII),
    Case(
        "status: status.json is incomplete",
        _run_with(_written("status.json", lambda: b'{"nodes": []}'), "status"),
        REFUSED,
        "incomplete",
    ),
    Case(
        "status: status.json is cut",
        _run_with(_written("status.json", lambda: b'{"nodes": ['), "status"),
        REFUSED,
        "status.json",
    ),
    Case(
        "status: status.json is a list",
        _run_with(_written("status.json", lambda: b"[]"), "status"),
        REFUSED,
        "status.json",
    ),
    Case("status: status.json is a FIFO", _run_with(_fifo_instead("status.json"), "status"), REFUSED, "FIFO"),
    Case("status: status.json of 1 TiB", _run_with(_sparse("status.json"), "status"), REFUSED, "status.json"),
    Case(
        "status: 100,000 brackets",
        _run_with(_written("status.json", lambda: b'{"nodes": ' + _NESTED), "status"),
        REFUSED,
    ),
    Case(
        "report: an incident is a FIFO",
        _run_with(_fifo_instead("incidents/0001.json"), "report"),
        REFUSED,
        "FIFO",
    ),
    Case(
        "report: an incident at the time 10^300",
        _run_with(
            _written("incidents/0001.json", lambda: incident(next_unix_s=1e300, next_action="x")), "report"
        ),
        REFUSED,
    ),
    Case(
        "report: evidence of 10 MB",
        _run_with(
            _written("incidents/0001.json", lambda: incident(evidence=["word " * 2_000_000])), "report"
        ),
        READ,
    ),
    Case("report: iterations of 1 TiB", _run_with(_many_iterations, "report"), (0, 1, 2)),
    Case(
        "analyze: a run without run.json's object",
        _run_with(_written("run.json", lambda: b"[1]"), "analyze"),
        (0, 1, 2),
    ),
    Case(
        "export: rings are no table",
        _run_with(
            _written("run.json", lambda: json.dumps({"rings": 7}).encode()), "export", "-o", "/dev/null"
        ),
        REFUSED,
        "rings",
    ),
    Case(
        "export: a ring is a FIFO",
        _run_with(_fifo_instead("rings/rank-00000.ring"), "export", "-o", "/dev/null"),
        (0, 2),
    ),
)
