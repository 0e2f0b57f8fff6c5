"""Network interfaces as sysfs shows them, here in a folder of the same form."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.node_row import Nic
from keepstep.launch.node.checks import Subject, nics

SUBJECT = Subject("gpu-1", 8)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def ethernet(
    sysfs: Path, name: str, *, state: str = "up", speed: str = "25000", sent: int = 9, **more: str
) -> None:
    files = {
        "operstate": state,
        "type": "1",
        "flags": "0x1003",
        "speed": speed,
        "carrier": str(int(state == "up")),
    }
    files |= {"statistics__tx_bytes": str(sent), "device__vendor": "0x15b3", "device__device": "0x1017"}
    write(sysfs / "net" / name, **{key: f"{text}\n" for key, text in (files | more).items()})


def port(
    sysfs: Path, device: str, *, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", **more: str
) -> None:
    folder = sysfs / "infiniband" / device
    write(folder, board_id="MT_0000000838\n")
    files = {"state": state, "rate": rate, "link_layer": "InfiniBand", "counters__port_xmit_data": "7"}
    write(folder / "ports" / "1", **{key: f"{text}\n" for key, text in (files | more).items()})


def found(sysfs: Path, **environ: str) -> list[str]:
    return [one.text for one in nics.network(SUBJECT, sysfs, environ)]


def test_interfaces_and_ports_with_state_and_speed(tmp_path: Path) -> None:
    ethernet(tmp_path, "eth0")
    ethernet(tmp_path, "eth1", flags="0x1002")  # switched off by an administrator
    write(tmp_path / "net" / "docker0", operstate="up\n", type="1\n", flags="0x1003\n")
    ethernet(tmp_path, "wlan0", state="down", wireless__status="0x0")
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", state="1: DOWN", rate="10 Gb/sec (4X SDR)", link_layer="Ethernet")
    model = "MT_0000000838"
    assert nics.nics(tmp_path, "203.0.113.7") == (
        Nic("eth0", "ethernet", True, 25_000, "0x15b3:0x1017", True),
        Nic("mlx5_0/1", "infiniband", True, 400_000, model, True),
        Nic("mlx5_1/1", "roce", False, 10_000, model, True),
    )


def test_one_that_was_used_and_is_down_is_told_and_an_empty_port_is_not(tmp_path: Path) -> None:
    ethernet(tmp_path, "eth0")
    ethernet(tmp_path, "eth1", state="down", speed="-1", sent=0)
    port(tmp_path, "mlx5_0", state="1: DOWN", counters__port_xmit_data="0")
    assert found(tmp_path) == []
    port(tmp_path, "mlx5_0", state="1: DOWN")
    assert found(tmp_path) == [
        "node gpu-1: mlx5_0/1 (infiniband) is down, and has sent data before; look at its cable and at the switch"
    ]


def test_one_slower_than_most_of_its_model_is_told(tmp_path: Path) -> None:
    for number in range(4):
        port(tmp_path, f"mlx5_{number}")
    assert found(tmp_path) == []
    port(tmp_path, "mlx5_2", rate="100 Gb/sec (4X EDR)")
    assert found(tmp_path) == [
        "node gpu-1: mlx5_2/1 (infiniband) runs at 100 Gb/s, 3 others of its model at 400 Gb/s; "
        "look at its cable and at the switch"
    ]
    port(tmp_path, "mlx5_3", rate="100 Gb/sec (4X EDR)")  # no majority: nobody knows which is right
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ""),
        ("NCCL_SOCKET_IFNAME", "eth", ""),  # a prefix
        ("NCCL_SOCKET_IFNAME", "^docker,lo", ""),  # all but these
        ("NCCL_SOCKET_IFNAME", "=eth", "there is no such interface, but eth0, eth1"),
        ("NCCL_SOCKET_IFNAME", "ib", "there is no such interface, but eth0, eth1"),
        ("NCCL_SOCKET_IFNAME", "eth1", "eth1 is down"),
    ],
)
def test_interfaces_that_variables_name(tmp_path: Path, variable: str, value: str, told: str) -> None:
    ethernet(tmp_path, "eth0")
    ethernet(tmp_path, "eth1", state="down", sent=0)
    advice = "correct it or bring the interface up"
    text = f"node gpu-1: {variable}={value}: {told}; {advice}"
    assert found(tmp_path, **{variable: value}) == ([text] if told else [])


def test_a_host_without_any(tmp_path: Path) -> None:
    assert (nics.nics(tmp_path, ""), found(tmp_path)) == ((), [])


@given(st.lists(st.binary(max_size=300), min_size=7, max_size=7))
def test_no_content_of_a_file_is_too_odd(contents: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        sysfs = Path(name)
        ethernet(sysfs, "eth0")
        port(sysfs, "mlx5_0")
        files = [*(sysfs / "net" / "eth0" / one for one in ("operstate", "speed", "flags"))]
        files += [
            *(
                sysfs / "infiniband" / "mlx5_0" / "ports" / "1" / one
                for one in ("state", "rate", "link_layer")
            )
        ]
        files += [sysfs / "infiniband" / "mlx5_0" / "board_id"]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        for nic in nics.nics(sysfs, ""):
            assert 0 <= nic.mbits <= 10_000_000
            assert (nic.name + nic.model).isprintable()
        found(sysfs, NCCL_SOCKET_IFNAME=contents[0].decode("latin-1"))
