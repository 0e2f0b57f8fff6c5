"""A stand-in for the container of a pod: a process of this machine with its own network, mounts, name and numbers.

It sees this machine's files, but an ``/etc``, ``/run`` and ``/dev`` of its own, in which what the pod mounts lies at
its place. Its first process is the container's command, as it is in a container: a signal from here has no sender
there. The image is not looked at.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PREFIX = "kb"
_SERIAL = itertools.count()  # of the interfaces of this process
_OWN = ("etc", "run", "dev")
_CLONE = Path(__file__).parents[2]
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_HARDWARE_ADDRESS = "02:00:00:00:00:01"


def do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Network:
    """A bridge with the address .1, on which this machine and the pods of a bed reach each other."""

    def __init__(self) -> None:
        remove_stale()
        self.bridge = f"{_PREFIX}{os.getpid()}x{next(_SERIAL)}"
        routes = subprocess.run(["ip", "route"], check=True, capture_output=True, text=True).stdout
        self._base = next(
            base for number in range(256) if (base := f"198.18.{number}.") not in routes
        )  # a range that is kept for tests
        self.address = f"{self._base}1"
        self._taken: set[str] = set()
        # Each in its turn: what others know of a pod's address is wrong for the next one that has it.
        self._numbers = itertools.cycle(range(10, 255))
        # A bridge has the lowest address of its ports unless it has one of its own: with each pod that came or went it
        # could be another, and who knew the old one got no answer for half a minute.
        do("ip", "link", "add", self.bridge, "address", _HARDWARE_ADDRESS, "type", "bridge")
        do("ip", "address", "add", f"{self.address}/24", "dev", self.bridge)
        do("ip", "link", "set", self.bridge, "up")

    def join(self) -> tuple[str, str]:
        """A new namespace on the bridge: its name, which is that of its interface here, and its address."""
        address = next(one for number in self._numbers if (one := f"{self._base}{number}") not in self._taken)
        self._taken.add(address)
        name = f"{_PREFIX}{os.getpid()}x{next(_SERIAL)}"
        inside = ("ip", "-netns", name)
        do("ip", "netns", "add", name)
        do("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        do("ip", "link", "set", name, "master", self.bridge, "up")
        do(*inside, "address", "add", f"{address}/24", "dev", "eth0")
        do(*inside, "link", "set", "eth0", "up")
        do(*inside, "link", "set", "lo", "up")
        return name, address

    def leave(self, name: str, address: str) -> None:
        _remove(name)
        self._taken.discard(address)

    def remove(self) -> None:
        _remove(self.bridge)


def _remove(name: str) -> None:
    for kind in ("netns", "link"):
        subprocess.run(["ip", kind, "delete", name], capture_output=True, check=False)


def remove_stale() -> None:
    """Remove the interfaces and namespaces of processes that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = {*listed.split(), *(path.name for path in Path("/sys/class/net").glob(f"{_PREFIX}*"))}
    for name in names:
        if (match := re.fullmatch(rf"{_PREFIX}(\d+)x\d+", name)) and not Path(f"/proc/{match[1]}").exists():
            _remove(name)


class Container:
    """The process of a pod, and the folders that are mounted in it.

    ``folder``: for what is only here. ``mounts``: folders or files by the path at which they are seen inside.
    ``domain``: of its host name, empty for none.
    """

    def __init__(self, folder: Path, network: Network, hostname: str, domain: str) -> None:
        self.folder, self.network, self.hostname, self.domain = folder, network, hostname, domain
        self.mounts: dict[str, Path] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._was_killed = False
        for name in _OWN:
            (folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        shutil.copytree("/etc", folder / "etc", symlinks=True, dirs_exist_ok=True)
        (folder / "etc/nsswitch.conf").write_text("hosts: files\n")  # a resolver would only be waited for
        self.namespace, self.address = network.join()

    def name_hosts(self, lines: Sequence[str]) -> None:
        """What ``/etc/hosts`` says inside from now on, besides the pod's own name."""
        names = f"{self.hostname}.{self.domain} {self.hostname}" if self.domain else self.hostname
        own = ["127.0.0.1 localhost", f"{self.address} {names}", *lines]
        (self.folder / "hosts").write_text("\n".join(own) + "\n")
        (self.folder / "hosts").replace(self.folder / "etc/hosts")

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], user: tuple[int, int, int], workdir: str
    ) -> None:
        """Start a command as a user, group and further group; what it prints is in ``log``."""
        uid, gid, further = user
        drop = (
            ["setpriv", f"--reuid={uid}", f"--regid={gid}", f"--groups={further}"]
            if any(user)
            else ["setpriv"]
        )
        inside = ["sh", "-ec", self._mounted(), "sh", workdir, *drop, "--", *command]
        apart = ["unshare", "--mount", "--propagation=private", "--uts", "--pid", "--fork"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", "nsenter", f"--net=/run/netns/{self.namespace}", *apart,
                 "--kill-child=KILL", "--mount-proc", *inside],
                env=dict(environ), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self, timeout_s: float) -> int | None:
        """The exit code as a container's; nothing while it runs."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if self._was_killed and code == 1:
            return 128 + signal.SIGKILL  # some unshare stumbles over such an end of what it has started
        return 128 - code if code < 0 else code

    def kill(self, number: signal.Signals) -> bool:
        """Send the first process inside a signal; false where there is none yet, or any more."""
        with suppress(ProcessLookupError):
            os.kill(self.first_pid(), number)
            self._was_killed |= number == signal.SIGKILL
            return True
        return False

    def first_pid(self) -> int:
        """The number, here, of the first process inside."""
        assert self._process is not None
        with suppress(OSError, IndexError):
            return int(
                Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()[0]
            )
        raise ProcessLookupError

    def pid_with(self, variable: bytes) -> int:
        """The number, here, of a later process inside that has ``NAME=VALUE`` in its environment."""
        first = self.first_pid()
        inside = Path(f"/proc/{first}/ns/pid").stat().st_ino
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if int(path.name) == first or (path / "ns/pid").stat().st_ino != inside:
                    continue
                if variable in (path / "environ").read_bytes().split(b"\0"):
                    return int(path.name)
        raise ProcessLookupError

    def unplug(self) -> None:
        """Nothing that is sent from here arrives any more, not even that its connections are gone."""
        do("ip", "link", "set", self.namespace, "down")

    def remove(self) -> None:
        if self._process is not None:
            self._process.kill()  # the first process inside dies with it, and so all others do
            self._process.wait()
        self.network.leave(self.namespace, self.address)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _mounted(self) -> str:
        """Shell commands that mount everything and go on as the command in the arguments."""
        here = self.folder
        lines = [f"hostname {shlex.quote(self.hostname)}"]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {here}/dev", f"mkdir {here}/dev/shm {here}/dev/pts"]
        lines += [f"mount -t tmpfs -o mode=1777 tmpfs {here}/dev/shm"]
        for device in _DEVICES:
            lines += [f"touch {here}/dev/{device}", f"mount --bind /dev/{device} {here}/dev/{device}"]
        lines += [f"ln -s /proc/self/fd {here}/dev/fd"]
        lines += [f"mount --rbind {here}/{name} /{name}" for name in _OWN]
        for place, source in self.mounts.items():
            at = shlex.quote(re.sub("^/var/run/", "/run/", place))
            made = f"mkdir -p {at}" if source.is_dir() else f"mkdir -p $(dirname {at}) && touch {at}"
            lines += [made, f"mount --bind {shlex.quote(str(source))} {at}"]
        return "\n".join([*lines, *_opened(), 'cd "$1"', "shift", 'exec "$@"'])


def _opened() -> list[str]:
    """Shell commands that let an ordinary user reach this Python and its packages where they lie in closed folders."""
    wanted: dict[Path, list[Path]] = {}
    for path in map(Path, dict.fromkeys((sys.base_prefix, sys.prefix, str(_CLONE)))):
        path = path.resolve()
        closed = [one for one in reversed(path.parents) if not one.stat().st_mode & 0o001]
        if closed:
            wanted.setdefault(closed[0], []).append(path)
    lines: list[str] = []
    for top, paths in wanted.items():
        held = {path: f"/dev/.open/{number}" for number, path in enumerate(paths)}
        for path, aside in held.items():
            lines += [f"mkdir -p {aside}", f"mount --bind {shlex.quote(str(path))} {aside}"]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(top))}"]
        for path, aside in held.items():
            at = shlex.quote(str(path))
            lines += [f"mkdir -p {at}", f"mount --bind {aside} {at}", f"umount {aside}"]
    return lines


def image_environ() -> dict[str, str]:
    """The environment that the image would set: this Python first on the path."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return {"PATH": path, "HOME": "/", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
