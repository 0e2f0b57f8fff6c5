"""The sockets that an agent gives and takes states through: seen from outside, and slowed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.testbed import Host

CONTROLLER_PORT = 29555


class Sockets:
    """The TCP sockets of a host's agent."""

    def __init__(self, host: Host) -> None:
        self._pid = next(
            pid
            for pid, line in host.processes().items()
            if "keepstep.agent" in line and "nsenter" not in line.split(" ")[0]
        )

    def rows(self, state: int) -> Iterator[tuple[int, int]]:
        """Local and remote port of those in a state of the kernel's: 1 established, 10 listening."""
        mine: set[str] = set()
        with suppress(OSError):
            for name in os.listdir(f"/proc/{self._pid}/fd"):
                with suppress(OSError):
                    mine.add(os.readlink(f"/proc/{self._pid}/fd/{name}"))
            for line in Path(f"/proc/{self._pid}/net/tcp").read_text().splitlines()[1:]:
                words = line.split()
                if int(words[3], 16) == state and f"socket:[{words[9]}]" in mine:
                    yield int(words[1].split(":")[1], 16), int(words[2].split(":")[1], 16)

    def listening(self) -> list[int]:
        """Ports."""
        return sorted(local for local, _ in self.rows(10))

    @property
    def in_transfer(self) -> bool:
        """Whether it is connected to another agent."""
        return any(remote != CONTROLLER_PORT for _, remote in self.rows(1))


@contextmanager
def states_slowed(host: Host, rate: str) -> Generator[None]:
    """What the host's agent gives to others goes at ``rate``, nothing of it when that is empty."""

    def tc(*words: str) -> None:
        command = ["tc", "-netns", host.namespace, *words]
        subprocess.run(command, check=True, capture_output=True, text=True)

    device = ("dev", "eth0")
    tc("qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "1")
    tc("class", "add", *device, "parent", "1:", "classid", "1:1", "htb", "rate", "40gbit")
    tc("class", "add", *device, "parent", "1:", "classid", "1:2", "htb", "rate", rate or "8bit")
    for port in Sockets(host).listening():
        match = ("match", "ip", "sport", str(port), "0xffff", "flowid", "1:2")
        tc("filter", "add", *device, "protocol", "ip", "parent", "1:", "prio", "1", "u32", *match)
    try:
        yield
    finally:
        with suppress(subprocess.CalledProcessError):  # the interface went with its host
            tc("qdisc", "del", *device, "root")
