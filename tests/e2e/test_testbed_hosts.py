from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.e2e import testbed as beds
from tests.e2e.testbed import HOURS, Testbed

from keepstep.faults import SlowLink, parse

pytestmark = [pytest.mark.e2e, pytest.mark.root]

# A child of a test that is killed: builds a testbed, says so, and waits for its end.
ABANDON = """
from tests.e2e.testbed import four_hosts
with four_hosts((0, 0)) as bed:
    print(bed.prefix, flush=True)
    input()
"""

RECEIVE = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    while True:
        with server.accept()[0] as connection:
            while connection.recv(1 << 20): pass
            connection.sendall(b"x")
"""
SEND = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 7000), timeout=60) as connection:
    connection.sendall(bytes(1_000_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - began)
"""
CLOCKS = "import socket, time; print(socket.gethostname(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))"


@pytest.fixture
def bed() -> Iterator[Testbed]:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    with beds.four_hosts() as made:
        yield made


def leftovers(prefix: str) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    folders = (Path("/sys/class/net"), Path("/etc/netns"))
    names += [path.name for folder in folders for path in folder.glob(f"{prefix}*")]
    return [name for name in names if name.startswith(prefix)]


def transfer_s(bed: Testbed, source: str, destination: str) -> float:
    sender = bed.hosts[source].start([sys.executable, "-c", SEND, destination])
    result = beds.collect({source: sender}, 60)[source]
    assert result.returncode == 0, result.stderr
    return float(result.stdout)


def test_hosts_have_their_own_names_clocks_and_processes(bed: Testbed) -> None:
    results = bed.run(lambda host: [sys.executable, "-c", CLOCKS])
    assert {result.returncode for result in results.values()} == {0}
    assert [result.stdout.split()[0] for result in results.values()] == list(bed.hosts)
    clocks = [[float(word) for word in result.stdout.split()[1:]] for result in results.values()]
    for clock in range(2):
        ahead_h = [round((times[clock] - clocks[0][clock]) / HOURS, 1) for times in clocks]
        assert ahead_h == [0, 5, 11, 30]
    assert all(not host.processes() for host in bed.hosts.values())


def test_one_pair_is_throttled_and_no_other(bed: Testbed) -> None:
    for name in ("node-b", "node-c"):
        receiver = bed.hosts[name].start([sys.executable, "-c", RECEIVE])
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
    healthy_s = transfer_s(bed, "node-a", "node-b")
    (fault,) = parse("slow link from node-a to node-b to 10mbit")
    assert isinstance(fault, SlowLink)
    with bed.links.inject(fault):
        throttled_s = transfer_s(bed, "node-a", "node-b")
        other_s = transfer_s(bed, "node-a", "node-c")
    healed_s = transfer_s(bed, "node-a", "node-b")
    assert throttled_s > 3 * max(healthy_s, other_s, healed_s)


def test_nothing_is_left_after_a_failure_or_a_command_that_never_ends() -> None:
    if beds.missing():
        pytest.skip(beds.missing())
    with suppress(ZeroDivisionError), beds.four_hosts((0, 60)) as bed:
        results = bed.run(lambda host: ["sleep", "1000"], timeout_s=0.2)
        assert [result.returncode for result in results.values()] == [-9, -9]
        bed.hosts["node-a"].start(["sleep", "1000"])
        raise ZeroDivisionError
    assert leftovers(f"ksb-{os.getpid()}") == []


def test_what_a_killed_test_left_behind_is_removed() -> None:
    if beds.missing():
        pytest.skip(beds.missing())
    here = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", ABANDON], cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        prefix = child.stdout.readline().strip()
        child.kill()
    assert leftovers(prefix)
    assert prefix in beds.remove_stale()
    assert leftovers(prefix) == []
