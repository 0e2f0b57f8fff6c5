from __future__ import annotations

import socket
from pathlib import Path

import pytest

from keepstep.launch.command import addresses


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("32768\t60999", range(61_000, 65_536)),
        ("32768 65000", range(10_000, 32_768)),  # few above them
        ("1024 65535", range(1024, 65_536)),  # there are no others
        ("nonsense", range(1024, 65_536)),
    ],
)
def test_a_free_port_is_none_that_a_connection_may_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, expected: range
) -> None:
    ports = tmp_path / "ip_local_port_range"
    ports.write_text(given)
    monkeypatch.setattr(addresses, "_GIVEN_PORTS", ports)
    for _ in range(20):
        port = addresses.free_port("127.0.0.1")
        assert port in expected
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken, socket.socket() as other:
        for one in (taken, other):
            one.bind(("127.0.0.1", 0))
            one.listen()
        port, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        monkeypatch.setattr(addresses, "_lasting_ports", lambda: [port, free])
        assert addresses.free_port("127.0.0.1") == free
        assert addresses.free_port("192.0.2.1") > 0  # not an address of this machine
