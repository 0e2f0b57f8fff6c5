"""Four hosts on one machine: network namespaces on a bridge, each with its own name, clocks and processes.

A host has an interface ``eth0`` behind a veth pair, an ``/etc/hosts`` with all hosts, its own host name, its own
monotonic and boot clocks, and its own process numbers. Leaving the context ends whatever still runs there and removes
everything; what a killed test left behind is removed when the next testbed is made. Needs root, iproute2, util-linux.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from keepstep.faults import Interface, LinkInjector

_PREFIX = "ksb-"
_NUMBERS = itertools.count()  # of this process's testbeds
_HOSTS_FOLDERS = Path("/etc/netns")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_NOWHERE = "02:00:00:00:00:99"  # a hardware address of nobody
HOURS = 3600


@dataclass(frozen=True)
class Result:
    """How a command ended on a host."""

    returncode: int
    stdout: str
    stderr: str


def missing() -> str:
    """Why no testbed can be had here; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if tools:
        return f"not installed: {', '.join(tools)} (packages iproute2 and util-linux)"
    trial = f"{_PREFIX}{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    try:
        clocks = ["unshare", "--time", "--monotonic", "60", "--fork", "true"]
        tried = subprocess.run(clocks, capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["ip", "netns", "delete", trial], check=False, capture_output=True)
    return f"time namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Host:
    """One host of a testbed."""

    def __init__(self, name: str, namespace: str, address: str, clock_offset_s: int) -> None:
        self.name, self.namespace, self.address = name, namespace, address
        self.clock_offset_s = clock_offset_s
        self.interface = Interface("eth0", address, namespace)
        self._holder: subprocess.Popen[bytes] | None = None
        self.init_pid = 0  # of the first process here
        self._started: list[subprocess.Popen[str]] = []

    def boot(self) -> None:
        """Start the process that holds the host's namespaces; everything on the host dies with it."""
        offset = str(self.clock_offset_s)
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--time", "--monotonic", offset,
                   "--boottime", offset, "--pid", "--fork", "--kill-child", "--mount-proc",
                   "sh", "-c", 'hostname "$1" && exec sleep infinity', "sh", self.name]  # fmt: skip
        self._holder = subprocess.Popen(command, preexec_fn=_die_with_parent, stderr=subprocess.DEVNULL)
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        for _ in range(500):
            pids = children.read_text().split()
            if pids and self._is_up(int(pids[0])):
                self.init_pid = int(pids[0])
                return
            time.sleep(0.01)
        raise RuntimeError(f"host {self.name} did not come up; its holder returned {self._holder.poll()}")

    @staticmethod
    def _is_up(pid: int) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
        return False

    def command(self, command: Sequence[str]) -> list[str]:
        """``command`` as it has to be called from outside to run on this host."""
        return ["nsenter", "--target", str(self.init_pid), "--net", "--uts", "--time", "--pid", "--mount",
                f"--wd={os.getcwd()}", *command]  # fmt: skip

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start ``command`` here; its output is piped, as text. Ends with the host at the latest."""
        process = subprocess.Popen(
            self.command(command),
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._started.append(process)
        return process

    def processes(self) -> dict[int, str]:
        """What runs here besides the holder: (outside) process number to command line."""
        return {
            pid: line
            for pid, line in _processes_in(self.namespace).items()
            if self._holder is None or pid not in (self._holder.pid, self.init_pid)
        }

    def shut_down(self) -> None:
        if self._holder is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.init_pid or self._holder.pid, signal.SIGKILL)
        try:
            self._holder.wait(5)  # it reaps the first, then ends by itself
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        self._holder = None
        for process in self._started:
            process.kill()  # nsenter alone: what it started has ended with the host
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._started.clear()


def _processes_in(namespace: str) -> dict[int, str]:
    with suppress(OSError):
        wanted = (Path("/run/netns") / namespace).stat().st_ino
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with suppress(OSError):
                if (folder / "ns/net").stat().st_ino == wanted:
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found
    return {}


class Testbed:
    """The hosts, by name, and the links between them."""

    __test__ = False

    def __init__(
        self, clock_offsets_s: Sequence[int], rate: str | None = None, nameserver: str | None = None
    ) -> None:
        self.rate, self.nameserver = rate, nameserver
        self.prefix = f"{_PREFIX}{os.getpid()}x{next(_NUMBERS) % 100}"  # an interface's name is 15 characters
        self.hosts = {
            f"node-{letter}": Host(f"node-{letter}", f"{self.prefix}-{letter}", f"10.77.0.{number}", offset)
            for number, (letter, offset) in enumerate(zip("abcdefgh", clock_offsets_s, strict=False), 1)
        }
        self.links = LinkInjector({name: host.interface for name, host in self.hosts.items()})

    def build(self) -> None:
        _do("ip", "link", "add", self.prefix, "type", "bridge")
        _do("ip", "link", "set", self.prefix, "up")
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts.values())]
        for host in self.hosts.values():
            folder = _HOSTS_FOLDERS / host.namespace
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            if self.nameserver:
                (folder / "nsswitch.conf").write_text("hosts: files dns\n")
                (folder / "resolv.conf").write_text(f"nameserver {self.nameserver}\n")
            else:
                (folder / "nsswitch.conf").write_text("hosts: files\n")  # a resolver would only be waited for
            self._wire(host)
            host.boot()

    def _wire(self, host: Host) -> None:
        outside = f"{self.prefix}{host.name[-1]}"
        inside = ("ip", "-netns", host.namespace)
        _do("ip", "netns", "add", host.namespace)
        _do("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _do("ip", "link", "set", outside, "master", self.prefix, "up")
        if self.rate:  # towards the host, on the bridge's side: eth0 itself stays free for faults
            _do("tc", "qdisc", "add", "dev", outside, "root", "tbf", "rate", self.rate, "burst", "64kb",
                "latency", "400ms")  # fmt: skip
        _do(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        _do(*inside, "link", "set", "eth0", "up")
        _do(*inside, "link", "set", "lo", "up")

    @contextmanager
    def cut(self, one: str, other: str) -> Iterator[None]:
        """Nothing sent from one host to the other, either way, arrives, without an error to anybody."""
        ways = [(self.hosts[one], self.hosts[other]), (self.hosts[other], self.hosts[one])]
        for here, there in ways:
            _do("ip", "-netns", here.namespace, "neigh", "replace", there.address, "lladdr", _NOWHERE,
                "dev", "eth0", "nud", "permanent")  # fmt: skip
        yield
        for here, there in ways:
            with suppress(subprocess.CalledProcessError):  # it went with its interface
                _do("ip", "-netns", here.namespace, "neigh", "del", there.address, "dev", "eth0")

    def run(
        self,
        command: Callable[[Host], Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 240,
    ) -> dict[str, Result]:
        """Run a command on every host at once and wait for all; after ``timeout_s`` what still runs is killed."""
        running = {name: host.start(command(host), env) for name, host in self.hosts.items()}
        return collect(running, timeout_s)

    def tear_down(self) -> None:
        for host in self.hosts.values():
            host.shut_down()
        _remove(self.prefix)


def collect(running: Mapping[str, subprocess.Popen[str]], timeout_s: float) -> dict[str, Result]:
    """Wait for commands started on hosts; those that take longer than ``timeout_s`` are killed (returncode -9)."""
    results: dict[str, Result] = {}
    end = time.monotonic() + timeout_s
    for name, process in running.items():
        try:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                for child in _children(process.pid):
                    os.kill(child, signal.SIGKILL)
                process.kill()
            out, err = process.communicate()
        results[name] = Result(process.returncode, out, err)
    return results


def _children(pid: int) -> list[int]:
    """The process that nsenter started, and all that came from it."""
    with suppress(OSError):
        direct = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [found for child in direct for found in (child, *_children(child))]
    return []


def _remove(prefix: str) -> None:
    """Remove the processes, namespaces, interfaces and folders whose names begin with ``prefix``."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for namespace in re.findall(rf"^{re.escape(prefix)}-\S+", listed, re.MULTILINE):
        for pid in _processes_in(namespace):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
    interfaces = Path("/sys/class/net")
    for interface in interfaces.glob(f"{prefix}*"):
        if interface.name == prefix or not interface.name[len(prefix) :][:1].isdigit():
            subprocess.run(["ip", "link", "delete", interface.name], capture_output=True, check=False)
    for folder in _HOSTS_FOLDERS.glob(f"{prefix}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> list[str]:
    """Remove the testbeds of processes that are gone; their prefixes."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = [*listed.split(), *(path.name for path in Path("/sys/class/net").glob(f"{_PREFIX}*"))]
    names += [path.name for path in _HOSTS_FOLDERS.glob(f"{_PREFIX}*")]
    found = {match for name in names if (match := re.match(rf"{_PREFIX}(\d+)x\d+", name))}
    stale = sorted({match[0] for match in found if not Path(f"/proc/{match[1]}").exists()})
    for prefix in stale:
        _remove(prefix)
    return stale


@contextmanager
def four_hosts(
    clock_offsets_s: Sequence[int] = (0, 5 * HOURS, 11 * HOURS, 30 * HOURS),
    *,
    rate: str | None = None,
    nameserver: str | None = None,
) -> Iterator[Testbed]:
    """Hosts ``node-a`` to ``node-d``, each with clocks that many seconds ahead of this machine's (up to 8 hosts).

    ``rate``: what each host can receive, as tc writes it (``200mbit``); unlimited without. ``nameserver``: the address
    that is asked for what ``/etc/hosts`` does not have; nobody without.
    """
    remove_stale()
    bed = Testbed(clock_offsets_s, rate, nameserver)
    try:
        bed.build()
        with bed.links:
            yield bed
    finally:
        bed.tear_down()
