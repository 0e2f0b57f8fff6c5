"""One row a node, the unfit first, and nothing in it that moves a terminal's cursor."""

from __future__ import annotations

from keepstep.core.node_row import Burnt, Nic, NodeRow, PathSpeed
from keepstep.core.validation import DeviceFigure
from keepstep.report.node_table import table

GPUS = tuple(
    Burnt(f"GPU {number}", "H100", figures=(DeviceFigure(number, "bf16", 700.0 - number),))
    for number in range(2)
)
FIT = NodeRow(
    "gpu-1",
    memory=(1 << 40, 2 << 40),
    shared=1 << 39,
    versions=(("driver", "570.86.15"), ("torch", "2.13.0"), ("keepstep", "0.1.0")),
    gpus=("H100", "H100"),
    nics=tuple(Nic(f"mlx5_{number}/1", "infiniband", number != 3, 400_000) for number in range(4)),
    paths=(PathSpeed("/data", 8e8, 0.0, "nfs4", cached=True, note="read-only"),),
    burnt=GPUS,
    links=("gpu-2:1180", "gpu-3:none"),
)


def test_a_row_says_all_that_is_known() -> None:
    head, row = table([FIT]).splitlines()
    assert head.split() == [
        "NODE",
        "STATE",
        "GPUS",
        "DRIVER",
        "TORCH",
        "MEMORY",
        "SHM",
        "NICS",
        "/data",
        "BF16",
        "LINKS",
    ]
    for cell in ("2 H100", "570.86.15", "1 TiB of 2 TiB", "512 GiB", "3 infiniband 400 Gb/s, mlx5_3/1 down"):
        assert cell in row
    assert "read 800 MB/s nfs4 (memory) (read-only)" in row
    assert "699 TFLOP/s" in row  # the slowest
    assert row.endswith("gpu-2:1180 gpu-3:none")


def test_the_unfit_come_first_and_lines_follow() -> None:
    unfit = NodeRow("gpu-9", unfit=("node gpu-9: full",))
    warned = NodeRow("gpu-5", warnings=("node gpu-5: little memory",))
    lines = table([FIT, warned, unfit], ["link a - b: no data"], ["link c - d: slow"]).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["gpu-9", "unfit"],
        ["gpu-5", "warned"],
        ["gpu-1", "fit"],
    ]
    assert lines[4:] == [
        "unfit: node gpu-9: full",
        "unfit: link a - b: no data",
        "warning: node gpu-5: little memory",
        "warning: link c - d: slow",
    ]


def test_text_of_others_stays_in_its_line_and_is_bounded() -> None:
    rows = [NodeRow(f"n{number}\x1b[2J\n", unfit=("x\ny",) * 3) for number in range(400)]
    lines = table(rows).splitlines()
    assert len(lines) < 600
    assert all(line.isprintable() for line in lines)
    assert "and 144 more nodes; all of them with --json" in lines
