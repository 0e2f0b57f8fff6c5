"""The table of `keepstep check`: one row a node, then a line for everything that is not as it should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from keepstep.core.log_lines import one_line
from keepstep.core.node_row import Burnt, NodeRow, PathSpeed

_ROWS = 256  # most rows, and lines below them
_VERSIONS = ("driver", "NCCL", "torch")
_WIDEST = 60  # characters of a cell


def table(rows: Sequence[NodeRow], broken: Sequence[str] = (), slow: Sequence[str] = ()) -> str:
    """The whole output: the rows, the unfit nodes' first; columns in which no row has anything are left out.

    ``broken`` and ``slow``: lines about links.
    """
    ordered = sorted(rows, key=lambda row: (("unfit", "warned", "fit").index(row.verdict), row.node))
    cells = [dict(_cells(row)) for row in ordered[:_ROWS]]
    columns = [
        name
        for name in dict.fromkeys(name for row in cells for name in row)
        if any(row.get(name) for row in cells)
    ]
    text = [[name, *(row.get(name) or "-" for row in cells)] for name in columns]
    widths = [max(map(len, column)) for column in text]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        for line in zip(*text, strict=True)
    ]
    said = [f"unfit: {line}" for row in ordered for line in row.unfit]
    said += [f"unfit: {line}" for line in broken]
    said += [f"warning: {line}" for row in ordered for line in row.warnings]
    said += [f"warning: {line}" for line in slow]
    said = [f"burn-in: node {row.node}: {text}" for row in ordered if (text := _burnt(row.burnt))] + said
    lines += [f"and {len(rows) - _ROWS} more nodes; all of them with --json"] if len(rows) > _ROWS else []
    lines += said[:_ROWS]
    lines += [f"and {len(said) - _ROWS} more lines; all of them with --json"] if len(said) > _ROWS else []
    return "\n".join(one_line(line.rstrip()) for line in lines)


def _cells(row: NodeRow) -> Iterator[tuple[str, str]]:
    yield "NODE", row.node[:_WIDEST]
    yield "STATE", row.verdict
    yield "GPUS", _counted(row.gpus)
    yield from ((name.upper(), dict(row.versions).get(name, "")) for name in _VERSIONS)
    yield "MEMORY", f"{_size(row.memory[0])} of {_size(row.memory[1])}" if row.memory[1] > 0 else ""
    yield "SHM", _size(row.shared)
    yield "DISK", _size(row.disk)
    yield "KERNEL", row.kernel
    yield "NICS", _nics(row)
    for one in row.paths:
        yield one.path[-_WIDEST:], _path(one)
    tests = dict.fromkeys(figure.test for one in row.burnt for figure in one.figures)
    for test in tests:
        figures = [figure for one in row.burnt for figure in one.figures if figure.test == test]
        slowest = min(figures, key=lambda figure: figure.value)
        yield test.upper(), f"{_short(slowest.value)} {slowest.unit}"
    yield "LINKS", " ".join(row.links)


def _burnt(burnt: Sequence[Burnt]) -> str:
    """``8 GPUs for 60 s, 51,200 products and 4.2 TiB of memory compared``."""
    done = [one for one in burnt if one.seconds > 0]
    if not done:
        return ""
    which = f"{len(done)} GPUs" if len(done) > 1 else done[0].device
    which = "no NVIDIA GPU here, the CPU" if which == "CPU" else which
    products, size = sum(one.products for one in done), _size(sum(one.checked_bytes for one in done))
    longest = max(one.seconds for one in done)
    return f"{which} for {longest:.0f} s, {products:,} products and {size} of memory compared"


def _nics(row: NodeRow) -> str:
    """``8 infiniband 400 Gb/s, eth0 ethernet 25 Gb/s, mlx5_3/1 down``."""
    up = Counter((nic.kind, nic.mbits) for nic in row.nics if nic.is_up)
    one_of = {(nic.kind, nic.mbits): nic.name for nic in row.nics if nic.is_up}
    told = [
        f"{one_of[key] if count == 1 else count} {key[0]}{_rate(key[1])}" for key, count in up.most_common()
    ]
    return ", ".join([*told, *(f"{nic.name} down" for nic in row.nics if not nic.is_up)])[: 2 * _WIDEST]


def _rate(mbits: int) -> str:
    if mbits <= 0:
        return " up"
    return f" {mbits / 1000:g} Gb/s" if mbits >= 1000 else f" {mbits} Mb/s"


def _path(one: PathSpeed) -> str:
    """``read 812 write 640 MB/s nfs4``; a figure of memory is marked."""
    speeds = [
        f"{way} {value / 1e6:.0f}" for way, value in (("read", one.read), ("write", one.write)) if value > 0
    ]
    told = [f"{' '.join(speeds)} MB/s"] if speeds else ["readable"]
    told += [one.file_system] if one.file_system else []
    told += ["(memory)"] if one.cached and one.read else []
    told += [f"({one.note})"] if one.note else []
    return " ".join(told)


def _counted(models: Sequence[str]) -> str:
    """``8 NVIDIA H100 80GB HBM3``."""
    return ", ".join(f"{count} {model}" for model, count in Counter(models).most_common(3))[:_WIDEST]


def _size(count: int) -> str:
    if count < 0:
        return ""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
