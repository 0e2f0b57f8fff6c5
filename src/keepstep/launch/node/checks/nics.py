"""Are the node's network interfaces up, and as fast as others of their kind? Read from sysfs, nothing is sent.

A port without a cable is no fault. One is told of only if it has sent data since the kernel began to count and is down
now, or if it runs slower than most others of its model.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import Literal

from keepstep.core.node_row import Nic
from keepstep.core.own_address import ANYWHERE, address_towards
from keepstep.launch.node.checks import Found, Subject

SYSFS = Path("/sys/class")
_MOST = 64  # most devices, and ports of a device, that are looked at
_MOST_BYTES = 256  # read of a file
_MOST_MBITS = 10_000_000
_ETHERNET = 1  # ARPHRD_ETHER
_ENABLED = 1  # IFF_UP
_SIOCGIFADDR = 0x8915
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec")
_SOCKET_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def network(
    subject: Subject, sysfs: Path = SYSFS, environ: Mapping[str, str] = os.environ
) -> Iterator[Found]:
    """Find interfaces that the job is to use and that are missing or down, and ports that are worse than their like."""
    for variable in _SOCKET_NAMES:
        if (text := environ.get(variable)) and (trouble := _named(text, sysfs)):
            yield Found(
                f"node {subject.node}: {variable}={text[:80]}: {trouble}; correct it or bring the interface up"
            )
    yield from (Found(f"node {subject.node}: {text}") for text in unlike(nics(sysfs)))


def nics(sysfs: Path = SYSFS, address: str | None = None) -> tuple[Nic, ...]:
    """The node's network interfaces that are or should be in use, by name; ports of InfiniBand and RoCE last.

    ``address``: one of this node's (default: that by which it reaches other hosts). Its interface is among them also
    where it is virtual; other virtual interfaces are left out.
    """
    mine = _interface_of(address if address is not None else address_towards(ANYWHERE))
    found: list[Nic] = []
    for folder in _entries(sysfs / "net"):
        physical = (folder / "device").exists() or (folder / "bonding").exists()
        ethernet = _number(folder / "type") == _ETHERNET
        wireless = (folder / "wireless").exists() or (folder / "phy80211").exists()
        wired = physical and ethernet and not wireless
        if folder.name != mine and not (wired and _flags(folder) & _ENABLED):
            continue
        found.append(
            Nic(
                folder.name,
                "ethernet",
                _is_up(folder),
                min(max(_number(folder / "speed"), 0), _MOST_MBITS),
                _model(folder / "device"),
                _number(folder / "statistics" / "tx_bytes") > 0,
            )
        )
    for device in _entries(sysfs / "infiniband"):
        found += [_port(device, port) for port in _entries(device / "ports")]
    return tuple(found[:_MOST])


def unlike(found: tuple[Nic, ...]) -> Iterator[str]:
    """A line for each interface that was in use and is down, and each that is slower than most of its model."""
    for nic in found:
        if not nic.is_up and nic.was_used:
            yield f"{nic.name} ({nic.kind}) is down, and has sent data before; look at its cable and at the switch"
    for model in dict.fromkeys(nic.model for nic in found if nic.model):
        alike = [nic for nic in found if nic.model == model and nic.is_up and nic.mbits]
        rates = Counter(nic.mbits for nic in alike)
        usual, count = max(rates.items(), key=lambda item: (item[1], item[0]), default=(0, 0))
        if 2 * count <= len(alike):
            continue
        for nic in alike:
            if nic.mbits < usual:
                yield (
                    f"{nic.name} ({nic.kind}) runs at {speed(nic.mbits)}, {count} others of its model at "
                    f"{speed(usual)}; look at its cable and at the switch"
                )


def speed(mbits: int) -> str:
    """``400 Gb/s``, ``100 Mb/s``, or "" where it is unknown."""
    if not mbits:
        return ""
    return f"{mbits / 1000:g} Gb/s" if mbits >= 1000 else f"{mbits} Mb/s"


def _port(device: Path, port: Path) -> Nic:
    """A port of an adapter, whose state reads ``4: ACTIVE`` and rate ``400 Gb/sec (4X NDR)``."""
    layer, rate = _text(port / "link_layer"), _RATE.match(_text(port / "rate"))
    kind: Literal["infiniband", "roce"] = "roce" if layer.lower() == "ethernet" else "infiniband"
    mbits = min(round(float(rate[1]) * 1000), _MOST_MBITS) if rate else 0
    was_used = _number(port / "counters" / "port_xmit_data") > 0
    up = _text(port / "state").startswith("4:")
    return Nic(f"{device.name}/{port.name}", kind, up, mbits, _text(device / "board_id")[:64], was_used)


def _named(text: str, sysfs: Path) -> str:
    """What is wrong with the interfaces that a variable names, as Gloo and NCCL read it; "": nothing."""
    if text.startswith("^"):
        return ""  # all but these
    exact = text.startswith("=")
    names = [name for name in text.removeprefix("=").split(",") if name]
    folders = _entries(sysfs / "net")
    fitting = [
        one
        for one in folders
        for name in names
        if one.name == name or (not exact and one.name.startswith(name))
    ]
    if not fitting:
        return (
            f"there is no such interface, but {', '.join(one.name for one in folders[:8]) or 'none at all'}"
        )
    if not any(_is_up(one) for one in fitting):
        return f"{', '.join(one.name for one in fitting[:8])} is down"
    return ""


def _is_up(folder: Path) -> bool:
    state = _text(folder / "operstate")
    # Loopback and some virtual interfaces do not tell their state.
    return state == "up" or (state in ("unknown", "") and _number(folder / "carrier") == 1)


def _interface_of(address: str) -> str:
    """The interface with an IPv4 address; "" where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address and name != "lo":
                    return name
    return ""


def _model(device: Path) -> str:
    parts = [_text(device / name)[:16] for name in ("vendor", "device")]
    return ":".join(parts) if all(parts) else ""


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir())[:_MOST]
    return []


def _flags(folder: Path) -> int:
    text = _text(folder / "flags")
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else 0


def _number(file: Path) -> int:
    """The number in a file; -1 where there is none."""
    text = _text(file)
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else -1


def _text(file: Path) -> str:
    """The printable part of a file's first line; "" where it cannot be read, as of an interface that is down."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        return ""
    line = data.partition(b"\n")[0].decode("ascii", "replace").strip()
    return "".join(c for c in line if c.isprintable())
