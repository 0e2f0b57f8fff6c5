"""Which nodes stand out of rows: the minority is named, nobody where there is none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from keepstep.core.node_row import Burnt, Nic, NodeRow, PathSpeed
from keepstep.core.validation import DeviceFigure
from keepstep.validate.judge_nodes import compared, unlike


def row(node: str, **versions: str) -> NodeRow:
    return NodeRow(node, versions=tuple(versions.items()))


def rows(*values: str, name: str = "NCCL") -> list[NodeRow]:
    return [row(f"gpu-{number}", **{name: value}) for number, value in enumerate(values, 1)]


def told(found: tuple[NodeRow, ...]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    return {one.node: (one.unfit, one.warnings) for one in found if one.unfit or one.warnings}


def test_rows_that_are_alike_and_a_single_one() -> None:
    assert told(compared(rows("2.27", "2.27", "2.27"))) == {}
    assert told(compared(rows("2.27"))) == {}


def test_the_minority_is_named() -> None:
    found = told(compared(rows("2.27", "2.26", "2.27")))
    line = "node gpu-2: NCCL 2.26, but 2.27 on the 2 others; install the same on all nodes"
    assert found == {"gpu-2": ((line,), ())}


def test_another_driver_is_a_warning() -> None:
    found = told(compared(rows("570", "570", "580", name="driver")))
    assert list(found) == ["gpu-3"]
    assert found["gpu-3"][0] == ()


def test_without_a_majority_all_are_told() -> None:
    found = told(compared(rows("2.27", "2.26")))
    assert list(found) == ["gpu-1", "gpu-2"]
    assert found["gpu-1"][0] == ("node gpu-1: NCCL 2.27, but 2.26 on gpu-2; install the same on all nodes",)


def test_a_node_without_it_has_none_of_it() -> None:
    found = told(compared([row("gpu-1"), row("gpu-2", torch="2.13"), row("gpu-3", torch="2.13")]))
    assert found["gpu-1"][0][0].startswith("node gpu-1: torch none, but 2.13 on the 2 others")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("", ("", ())),
        ("a", ("a", ())),
        ("aa", ("a", ())),
        ("ab", ("", (0, 1))),
        ("aab", ("a", (2,))),
        ("aabb", ("", (0, 1, 2, 3))),
    ],
)
def test_what_a_majority_is(values: str, expected: tuple[str, tuple[int, ...]]) -> None:
    value, odd = unlike({str(number): one for number, one in enumerate(values)})
    assert (value, odd) == (expected[0], tuple(map(str, expected[1])))


def test_a_port_that_is_down_on_one_node_only() -> None:
    up = Nic("mlx5_0/1", "infiniband", True, 400_000)
    nodes = [NodeRow(f"gpu-{number}", nics=(up,)) for number in range(3)]
    assert told(compared(nodes)) == {}
    nodes[1] = replace(nodes[1], nics=(replace(up, is_up=False),))
    found = told(compared(nodes))
    assert (list(found), len(found["gpu-1"][0])) == (["gpu-1"], 1)
    assert told(compared(nodes[:2])) == {}  # of two nodes nobody knows which is as it should be
    slower = [
        replace(nodes[0], nics=(replace(up, mbits=100_000),)),
        nodes[2],
        replace(nodes[2], node="gpu-9"),
    ]
    assert [(node, len(unfit), len(more)) for node, (unfit, more) in told(compared(slower)).items()] == [
        ("gpu-0", 0, 1)
    ]


def test_a_path_that_is_slow_on_one_node() -> None:
    nodes = [
        NodeRow(f"gpu-{number}", paths=(PathSpeed("/data", read=speed * 1e6),))
        for number, speed in enumerate((900, 100, 800))
    ]
    assert list(told(compared(nodes))) == ["gpu-1"]


def burnt(number: int, value: float, model: str = "H100") -> Burnt:
    return Burnt(f"GPU {number}", model, figures=(DeviceFigure(number, "bf16", value),))


def test_a_device_slower_than_its_peers_of_one_model() -> None:
    well = tuple(burnt(number, 700.0) for number in range(4))
    assert told(compared([NodeRow("a", burnt=well)])) == {}
    found = compared([NodeRow("a", burnt=(*well, burnt(4, 500.0), burnt(5, 300.0), burnt(6, 60.0, "T4")))])[0]
    assert [line.split(":")[1].strip() for line in found.unfit] == ["GPU 5 (H100)"]
    assert [line.split(":")[1].strip() for line in found.warnings] == ["GPU 4 (H100)"]


def test_devices_of_several_nodes_are_compared() -> None:
    nodes = [
        NodeRow(name, burnt=(burnt(0, speed),)) for name, speed in (("a", 700.0), ("b", 300.0), ("c", 690.0))
    ]
    assert [one.node for one in compared(nodes) if one.unfit] == ["b"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_figures_that_are_none(value: float) -> None:
    nodes = [
        NodeRow(name, burnt=(burnt(0, value),), paths=(PathSpeed("/data", value, value),)) for name in "abc"
    ]
    assert told(compared(nodes)) == {}
