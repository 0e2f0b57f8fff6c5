"""Hostile files by the hundred, drawn by seed: siblings of those that were found, for every reader."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
import random
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.hostile.samples import (
    RANKS,
    call_log,
    dump,
    dumps,
    incident,
    ras_answer,
    ras_text,
    run_folder,
    training_log,
)

Words = list[str]


def size(chance: random.Random, most: int) -> int:
    """A size up to ``most``; small ones are as likely as large ones."""
    return int(most ** chance.random())


def odd(chance: random.Random, json_only: bool = False) -> Any:
    """A value that nobody expects."""
    many = size(chance, 100_000)
    nested: Any = []
    for _ in range(size(chance, 400)):
        nested = [nested]
    kinds: list[Any] = [
        None, True, "", -1, 1 << 31, -(1 << 31), 1 << 53, 1e300, -0.0, 10**25, "x" * many, "9" * many, "\x1b[2J\n", "…",
        "²", [0] * many, {str(one): one for one in range(many)}, nested, [[]], {"": {}}, "-" * many, [None], ["", ""],
    ]  # fmt: skip
    if not json_only:
        kinds += [float("nan"), float("inf"), b"\xff" * many, 1 << 500, (), [shared(chance)], "\ud800"]
    return chance.choice(kinds)


def shared(chance: random.Random) -> Any:
    """Lists that hold each other, so that a few are met without end."""
    value: Any = ["x"]
    for _ in range(size(chance, 200)):
        value = [value] * chance.randint(1, 3)
    return value


def changed(chance: random.Random, value: Any, json_only: bool = False) -> Any:
    """The value with one of its parts, at any depth, taken out, repeated or made odd."""
    if not isinstance(value, (dict, list)) or not value or chance.random() < 0.1:
        return odd(chance, json_only)
    place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    kind = chance.random()
    if kind < 0.1:
        del value[place]
    elif kind < 0.2 and isinstance(value, list):
        value[place:place] = [value[place]] * size(chance, 100_000)
    else:
        value[place] = changed(chance, value[place], json_only)
    return value


def damaged(chance: random.Random, data: bytes) -> bytes:
    """The data with bytes taken out, put in, repeated or overwritten."""
    found = bytearray(data)
    for _ in range(size(chance, 20)):
        at = chance.randrange(len(found) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            del found[at : at + size(chance, 300)]
        elif kind == 1:
            found[at:at] = chance.randbytes(size(chance, 300))
        elif kind == 2:
            found[at : at + 1] = chance.choice([b"\0", b"\xff", b"\n", b"9", b"-", b"[", b"\x80"])
        else:
            found[at:at] = bytes(found[at : at + 300]) * size(chance, 300)
    return bytes(found)


def _instructions(chance: random.Random) -> bytes:
    """A pickle of instructions that none would write."""
    many, places = size(chance, 4_000_000), size(chance, 1 << 31)
    long = places.to_bytes(8, "little")
    return b"\x80\x04" + chance.choice([
        b"]r" + long[:4] + b".", b"]" * many + b".", b"(" * many + b".", b"]q\0(" + b"h\0" * many + b"e.",
        b"](" + b"}" * many + b"e.", b"X" + long[:4] + b"x.", b"\x8d" + long + b"x.", b"\x8b" + long[:4] + b"\1" * many,
        b"\x96" + long + b".", b"K\1" * many + b"t.", b"K\1" + b"\x85" * many + b".", b"}(" + b"NN" * many + b"u.",
        b"}" + b"K\1K\2s" * many + b".", b"\x95" + long + b".", b"N\x94" * many + b".", b"]" + b"Na" * many + b".",
        b"]q\0" + b"h\0a" * many + b".", b"0" * many, b"(" + b"]\x94" * many + b"l.", b"\x8fK\1\x90.", b"P7\n.", b"NQ.",
        b"cbuiltins\neval\n(X\1\0\0\0xtR.", b"\x8c\x02os\x8c\x06system\x93.", chance.randbytes(many // 100),
    ])  # fmt: skip


def _ranks(chance: random.Random) -> str:
    many = size(chance, 1_000_000)
    return chance.choice([
        "-" * many, "[" * many, "(" * many, "9" * many, "," * many, "[" + "0, " * many + "]", f"[{many}]",
        str(list(range(many))), "[" + " " * many + "1", "[1" + " " * many + ",", "[0, 1, 2, 3", f"[0, {many * 32}]",
        "{" * many, "1 + " * many + "1", "[-1]", "[1e9]", "[٣]", "'" * many,
    ])  # fmt: skip


def _strange_dump(chance: random.Random, as_json: bool) -> Any:
    """A dump with something wrong in it."""
    rank = chance.randrange(RANKS)
    content: Any = json.loads(json.dumps(dump(rank))) if as_json else dump(rank)
    kind = chance.randrange(7)
    if kind == 0:
        content["pg_config"]["0"]["ranks"] = _ranks(chance)
    elif kind == 1:
        content["pg_config"] = {str(one): content["pg_config"]["0"] for one in range(size(chance, 50_000))}
    elif kind == 2:
        content["entries"] *= size(chance, 300_000)
    elif kind == 3:
        content["entries"][-1]["frames"] *= size(chance, 1_000_000)
    elif kind == 4:
        content["entries"][-1]["profiling_name"] = (
            f"nccl:send {size(chance, 1 << 40)}->{size(chance, 1 << 40)}"
        )
    else:
        for _ in range(size(chance, 5)):
            content = changed(chance, content, as_json)
    return content


def _name(chance: random.Random) -> str:
    number = size(chance, 10**12)
    return chance.choice([
        f"dump_{number}", f"nccl_trace_rank_{number}", "nccl_trace_rank_2", "nccl_trace_rank_9", f"rank{number}.json",
        f"a_{number}_{number}.pkl", "dump_²", "dump_٣", f"dump_{'9' * 200}", "dump\n_1", "dump",
    ])  # fmt: skip


def _among_dumps(chance: random.Random, folder: Path, data: bytes) -> Words:
    """The data as a dump beside sound ones, or alone; given as a folder, or by itself."""
    if chance.random() < 0.5:
        dumps(folder)
    path = folder / _name(chance)
    path.write_bytes(data)
    return ["analyze", str(path if chance.random() < 0.1 else folder)]


def recorder_pickle(chance: random.Random, folder: Path) -> Words:
    if chance.random() < 0.4:
        return _among_dumps(chance, folder, _instructions(chance))
    content = _strange_dump(chance, False)
    try:
        data = pickle.dumps(content, chance.choice([2, 2, 3, 4, 5]))
    except (RecursionError, UnicodeEncodeError, OverflowError):
        data = b"\x80\x04"
    return _among_dumps(chance, folder, damaged(chance, data) if chance.random() < 0.2 else data)


def recorder_json(chance: random.Random, folder: Path) -> Words:
    many = size(chance, 4_000_000)
    if chance.random() < 0.3:
        start = b'{"version": "2.9", "pg_config": {}, "entries": '
        data = start + chance.choice([
            b"[" * many, b"[" + b"[]," * many + b"[]]}", b"[" + b"{}," * many + b"{}]}", b'{"a":' * many,
            b'"' + b"a" * many + b'"}', b"9" * many, b'[{"":1},' * many, b'["\\ud83d"]}', b"[1e999]}", b" " * many,
        ])  # fmt: skip
        return _among_dumps(chance, folder, data)
    data = json.dumps(_strange_dump(chance, True)).encode()
    return _among_dumps(chance, folder, damaged(chance, data) if chance.random() < 0.2 else data)


_VERBS = (
    ["analyze"],
    ["report"],
    ["report", "--json"],
    ["report", "1"],
    ["status"],
    ["status", "--json"],
    ["export"],
)
_FILES = ("run.json", "status.json", "end.json", "incidents/0001.json", "nodes/0/checkpoints.json")
_ROWS = "nodes/0/iterations.jsonl"
_RING = "rings/rank-00000.ring"


def run(chance: random.Random, folder: Path) -> Words:
    run_folder(folder)
    if chance.random() < 0.3:
        (folder / "status.json").unlink()
        (folder / "incidents/0001.json").unlink()
    for name in chance.sample([*_FILES, _ROWS, _RING], chance.randint(1, 3)):
        path = folder / name
        data = path.read_bytes() if path.is_file() else incident()
        kind = chance.random()
        if kind < 0.15:
            path.unlink(missing_ok=True)
            chance.choice(
                [os.mkfifo, os.mkdir, lambda it: os.symlink(it, it), lambda it: os.symlink("/dev/zero", it)]
            )(path)
            continue
        if kind < 0.7 and name in _FILES:
            told = json.loads(data)
            for _ in range(size(chance, 8)):
                told = changed(chance, told, True)
            path.write_text(json.dumps(told))
        elif kind < 0.8 and name == _ROWS:
            rows = [json.loads(line) for line in data.splitlines()]
            for _ in range(size(chance, 8)):
                rows[chance.randrange(len(rows))] = changed(chance, rows[chance.randrange(len(rows))], True)
            path.write_text("\n".join(map(json.dumps, rows * size(chance, 500))))
        elif kind < 0.9:
            path.write_bytes(damaged(chance, data))
        else:
            with open(path, "ab") as file:
                file.truncate(size(chance, 1 << 43))
    verb = chance.choice(_VERBS)
    more = ["-o", str(folder / "out.json.gz")] if verb == ["export"] else []
    return [verb[0], str(folder), *verb[1:], *more]


def _lines(chance: random.Random, log: bytes) -> bytes:
    """The lines of a log, some of them strange."""
    lines = log.splitlines(keepends=True)
    for _ in range(size(chance, 30)):
        at = chance.randrange(len(lines))
        words = lines[at].split(b" ")
        place = chance.randrange(len(words))
        many = size(chance, 70_000)
        words[place] = chance.choice([
            b"9" * many, b"-1", b"1e308", b"nan", b" " * many, b"1|" * many, b"", words[place] * many, b"\xff" * many,
            b"0", b"1" + b"0" * chance.randint(1, 18), "٣".encode(), b"\x1b[2J", b"[" * many,
            b"iteration " * (many // 10),
        ])  # fmt: skip
        lines[at] = b" ".join(words)
        if chance.random() < 0.2:
            lines[at:at] = [lines[at]] * size(chance, 300)
    if chance.random() < 0.2:
        lines = [line for line in lines for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.1:
        chance.shuffle(lines)
    found = b"".join(lines)
    return damaged(chance, found) if chance.random() < 0.2 else found


def _packed(chance: random.Random, data: bytes) -> bytes:
    kind = chance.random()
    if kind < 0.5:
        return data
    packed = gzip.compress(data * size(chance, 300), 1)
    return damaged(chance, packed) if kind > 0.9 else packed


def training(chance: random.Random, folder: Path) -> Words:
    (folder / "train.log").write_bytes(_packed(chance, _lines(chance, training_log(size(chance, 5000) + 20))))
    return ["analyze", str(folder / "train.log" if chance.random() < 0.7 else folder)]


def calls(chance: random.Random, folder: Path) -> Words:
    (folder / "calls.log").write_bytes(_packed(chance, _lines(chance, call_log(size(chance, 500) + 20))))
    return ["analyze", str(folder / "calls.log" if chance.random() < 0.7 else folder)]


def archive(chance: random.Random, folder: Path) -> Words:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for one in range(size(chance, 300)):
            data = _lines(chance, call_log(size(chance, 40) + 4)) if one < 4 else b""
            info = tarfile.TarInfo(
                chance.choice([f"log_rank{one}", "../out", "/etc/x", "a" * 300, "\x1b[2J"])
            )
            info.size = len(data)
            info.type = chance.choice(
                [tarfile.REGTYPE] * 6 + [tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE]
            )
            tar.addfile(info, io.BytesIO(data))
    data = gzip.compress(packed.getvalue(), 1) if chance.random() < 0.5 else packed.getvalue()
    (folder / "logs.tar").write_bytes(damaged(chance, data) if chance.random() < 0.6 else data)
    return ["analyze", str(folder / "logs.tar")]


def table(chance: random.Random, folder: Path) -> Words:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    count = size(chance, 200_000)
    kinds = [
        "forward-compute",
        "backward-compute",
        "forward-send",
        "forward-recv",
        "backward-send",
        "grads-sync",
        "gc",
    ]
    columns: dict[str, Any] = {
        "rank": [one % 4 for one in range(count)], "step": [one // 40 for one in range(count)],
        "optype": [kinds[one // 4 % chance.randint(1, 7)] for one in range(count)],
        "start_ts": [one * 0.1 for one in range(count)],
        "duration": [0.1 + 0.1 * (one % 4 == 1) for one in range(count)],
        "seq_id": [one % 40 for one in range(count)], "dp_rank": [0] * count,
        "stage": [one % 4 for one in range(count)],
    }  # fmt: skip
    for _ in range(size(chance, 4)):
        name = chance.choice(list(columns))
        value = chance.choice([
            None, -1, 1 << 31, 1 << 60, float("nan"), float("inf"), 1e300, "x" * size(chance, 100_000), [1],
            {"a": 1}, b"x",
            0, 0.5, True,
        ])  # fmt: skip
        share = chance.choice([0.01, 0.5, 1.0])
        columns[name] = [value if chance.random() < share else one for one in columns[name]]

    def array(values: list[Any]) -> Any:
        try:
            return arrow.array(values)
        except (arrow.ArrowException, OverflowError, TypeError):
            return arrow.array([0] * count)

    path = folder / "t.parquet"
    parquet.write_table(
        arrow.table({name: array(values) for name, values in columns.items()}),
        path,
        compression=chance.choice(["none", "snappy", "zstd"]),
    )
    if chance.random() < 0.3:
        path.write_bytes(damaged(chance, path.read_bytes()))
    return ["analyze", str(path)]


def ras(chance: random.Random, folder: Path) -> Words:
    kind = chance.random()
    if kind < 0.5:
        ranks = size(chance, 3000) + 9
        told: Any = ras_answer(ranks)
        told["communicators"] *= size(chance, 30_000 // ranks)
        for _ in range(size(chance, 4)):
            told = changed(chance, told, True)
        pieces = json.JSONEncoder(indent=chance.choice([None, 2])).iterencode(told)
        data = "".join(
            itertools.islice(pieces, 2_000_000)
        ).encode()  # repeated parts within repeated ones are cut
        if chance.random() < 0.3:
            data = data.replace(
                b",\n" + b" " * 10 + b'"status"', b"\n" + b" " * size(chance, 9999) + b'"status"'
            )
    else:
        ranks = size(chance, 1 << 31) + 9
        data = _lines(chance, ras_text(ranks, chance.randrange(ranks)))
        if chance.random() < 0.2:
            head, _, rest = data.partition(b"#0-0 ")
            data = head + b"".join(b"#%d-%d " % (0, one) + rest for one in range(size(chance, 2000)))
    (folder / "ras").write_bytes(damaged(chance, data) if chance.random() < 0.3 else data)
    return ["analyze", str(folder / "ras")] if kind < 0.4 else ["analyze", "--ras", str(folder / "ras")]


READERS: Mapping[str, Callable[[random.Random, Path], Words]] = {
    "recorder-pickle": recorder_pickle,
    "recorder-json": recorder_json,
    "run": run,
    "training": training,
    "calls": calls,
    "archive": archive,
    "table": table,
    "ras": ras,
}
