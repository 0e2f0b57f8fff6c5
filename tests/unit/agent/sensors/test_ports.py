"""Counters of InfiniBand and RoCE ports in a tree of files that is laid out as sysfs is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from keepstep.agent.node import NodeAgent
from keepstep.agent.sensors.ports import PortSensor
from keepstep.core.port_counters import PortCounts, PortTraffic
from keepstep.wire.messages import ProfileRequest


class Tree:
    """A stand-in for /sys/class/infiniband."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, port: str = "mlx5_0/1", state: str = "4: ACTIVE", **counts: int) -> None:
        """Set counters; those of congestion and loss lie in ``hw_counters``."""
        device, number = port.split("/")
        folder = self.root / device / "ports" / number
        for name in ("counters", "hw_counters"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "state").write_text(state + "\n")
        for name, value in counts.items():
            hardware = name.startswith(("np_", "rp_", "out_", "packet_", "local_ack"))
            (folder / ("hw_counters" if hardware else "counters") / name).write_text(f"{value}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "infiniband")


def test_counts_are_told_before_and_after_a_moment(tree: Tree) -> None:
    sensor = PortSensor(tree.root)
    tree.write(port_xmit_data=1000, port_rcv_data=500, out_of_sequence=7, link_downed=3)
    tree.write(np_cnp_sent=0, rp_cnp_handled=0, packet_seq_err=0, symbol_error=0)
    sensor.look(10.0)
    tree.write(port_xmit_data=3000, port_rcv_data=600)
    sensor.look(11.0)
    tree.write(port_xmit_data=3500, np_cnp_sent=40, rp_cnp_handled=2, packet_seq_err=5, symbol_error=1)
    sensor.look(13.0)
    assert sensor.traffic(11.0, "n0") == (
        PortTraffic(
            "n0",
            "mlx5_0/1",
            PortCounts(1.0, 8000, 400),
            PortCounts(2.0, 2000, 0, 5, 42, damaged=1),
            is_up=True,
        ),
    )


def test_a_link_that_goes_down_is_seen_and_so_is_one_that_stays_up(tree: Tree) -> None:
    sensor = PortSensor(tree.root)
    for port in ("mlx5_0/1", "mlx5_1/1"):
        tree.write(port, port_xmit_data=0)
    sensor.look(1.0)
    for port in ("mlx5_0/1", "mlx5_1/1"):
        tree.write(port, port_xmit_data=10**6)
    sensor.look(2.0)
    tree.write("mlx5_0/1", "1: DOWN", link_downed=1)
    sensor.look(3.0)
    assert [one.went_down for one in sensor.traffic(2.0, "n0")] == [True, False]


def test_a_link_that_goes_down_around_the_moment_counts_as_after_it(tree: Tree) -> None:
    sensor = PortSensor(tree.root)
    for now_s, downs in ((1.0, 4), (2.0, 4), (3.0, 5), (4.0, 5)):
        tree.write(port_xmit_data=round(1e6 * now_s), link_downed=downs)
        sensor.look(now_s)
    (one,) = sensor.traffic(2.4, "n0")
    assert (one.before.downs, one.after.downs, one.after.seconds, one.went_down) == (0, 1, 1.0, True)


def test_a_file_that_cannot_be_read_for_a_while_is_no_growth(tree: Tree) -> None:
    sensor = PortSensor(tree.root)
    for now_s in (1.0, 2.0, 3.0, 4.0):
        tree.write(port_xmit_data=round(now_s), out_of_sequence=90_000, packet_seq_err=10)
        if now_s == 2.0:
            (tree.root / "mlx5_0/ports/1/hw_counters/out_of_sequence").write_text("Invalid argument")
        sensor.look(now_s)
    (one,) = sensor.traffic(1.0, "n0")
    assert one.after.retransmitted == 0


def test_counters_that_are_reset_count_from_there(tree: Tree) -> None:
    sensor = PortSensor(tree.root)
    tree.write(port_xmit_data=10**9, np_cnp_sent=100)
    sensor.look(1.0)
    tree.write(port_xmit_data=5, np_cnp_sent=1)
    sensor.look(2.0)
    tree.write(port_xmit_data=15, np_cnp_sent=3)
    sensor.look(3.0)
    (one,) = sensor.traffic(1.0, "n0")
    assert (one.after.sent_bytes, one.after.marked) == (40, 2)


@pytest.mark.parametrize(
    "content",
    [b"", b"N/A (no PMA)\n", b"\xff\xfe", b"-5", b"9" * 60, b"18446744073709551615", b"\0" * 64, b"1e9"],
)
def test_files_that_hold_no_count_never_raise(tree: Tree, content: bytes) -> None:
    tree.write(port_xmit_data=0, port_rcv_data=1)
    sensor = PortSensor(tree.root)
    sensor.look(1.0)
    folder = tree.root / "mlx5_0/ports/1"
    for file in ("counters/port_xmit_data", "hw_counters/np_cnp_sent", "state"):
        (folder / file).write_bytes(content)
    os.mkfifo(folder / "counters/link_downed")
    (folder / "counters/symbol_error").mkdir()
    (tree.root / "file").write_bytes(content)
    sensor.look(2.0)
    sensor.look(2.0)
    assert len(sensor.traffic(0.0, "n0")) <= 1


def test_a_port_that_is_gone_and_a_tree_that_is_not_there(tree: Tree, tmp_path: Path) -> None:
    sensor = PortSensor(tmp_path / "none")
    sensor.start()
    sensor.look(1.0)
    assert sensor.traffic(0.0, "n0") == ()
    tree.write(port_xmit_data=0)
    sensor = PortSensor(tree.root)
    sensor.look(1.0)
    tree.root.rename(tmp_path / "away")
    sensor.look(2.0)
    assert sensor.traffic(0.0, "n0") == ()


def test_an_agent_answers_with_its_ports(tree: Tree, tmp_path: Path) -> None:
    tree.write(port_xmit_data=0)
    sensor = PortSensor(tree.root, every_s=0.005)
    sensor.start()
    agent = NodeAgent({}, "n0", 0, tmp_path, lambda message: None, ports=sensor)
    try:
        give_up_s = time.monotonic() + 30
        sent = 0
        while not (found := agent.network.ports(0.0)):
            assert time.monotonic() < give_up_s
            sent += 1000
            tree.write(port_xmit_data=sent)
            time.sleep(0.01)
    finally:
        sensor.close()
    assert (found[0].node, found[0].port) == ("n0", "mlx5_0/1")
    assert agent.profile(ProfileRequest(1, 0, 9, onset_step=0)).ports == ()  # the step was not seen here
