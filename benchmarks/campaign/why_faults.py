"""What the driver of ``why-live`` does to a job from outside, and takes back: mounts, memory, ports, links, signals."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.campaign.trial import ROOT, processes_of
from benchmarks.campaign.why_draw import HOSTS, Why
from benchmarks.campaign.why_processes import RankProcesses, children_of

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_MORE_BYTES = 192 << 20  # what a rank may take beyond what it has
_TMPFS_BYTES = 300_000  # one save fits, a second does not
_MOUNTED_S = 5.0
_LAZILY = 2  # MNT_DETACH
_BIND = (
    "import socket, sys, time\ns = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "s.bind(('', int(sys.argv[1])))\ns.listen(1)\nprint('bound', flush=True)\ntime.sleep(600)\n"
)
_SLURM = (
    "slurmstepd: error: *** STEP 4711.0 ON {host} CANCELLED AT {time} DUE TO TIME LIMIT ***\n"
    "slurmstepd: error: *** JOB 4711 ON {host} CANCELLED AT {time} DUE TO TIME LIMIT ***\n"
)
_XIDS = {
    "48": "48, pid={pid}, name=python, An uncorrectable double bit error (DBE) has been detected on GPU in the "
    "framebuffer at partition 6, subpartition 0.",
    "95": "95, pid={pid}, name=python, Uncontained: LTC TAG (0x3,0x0). RST: Yes, D-RST: No",
}
KERNEL_LOG = "KEEPSTEP_KERNEL_LOG"  # what names the file that stands for the kernel's log


def lacking(need: str) -> str:
    """Why something that a kind needs is not to be had here; empty where it is."""
    if need == "root":
        return "" if os.geteuid() == 0 else "it needs root"
    if need == "fuse":
        return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "/dev/fuse cannot be opened"
    if need == "memory cgroup":
        return "" if _memory_groups() else "no control group may be made that limits memory"
    from tests.e2e import testbed

    return testbed.missing()


def _memory_groups() -> Path | None:
    """The folder in which groups that limit memory can be made."""
    if os.access(_V1 / "memory.limit_in_bytes", os.R_OK) and os.access(_V1, os.W_OK):
        return _V1
    with suppress(OSError):
        if "memory" in (_V2 / "cgroup.subtree_control").read_text().split() and os.access(_V2, os.W_OK):
            return _V2
    return None


class Faults:
    """One seed's. What it makes goes with `close`.

    Attributes:
        storage: where the script saves; ``address``, ``port``: where its ranks meet.
        environment: of the launcher on each host.
        began_s: when the fault was there, as far as the driver is its cause.
        line: what the resource manager writes beside the job's own words.
    """

    def __init__(self, why: Why, folder: Path, stack: ExitStack) -> None:
        self._why, self._folder, self._stack = why, folder, stack
        self.storage = folder / "checkpoints"
        self.address, self.port = (HOSTS[0] if why.hosts > 1 else "127.0.0.1"), 0
        self.began_s = 0.0
        self.line = ""
        self.bed: Any = None
        self._server: subprocess.Popen[bytes] | None = None
        self._group: Path | None = None
        self._done = False

    def before_hosts(self) -> None:
        """What hosts inherit: mounts, files, groups."""
        kind = self._why.kind
        if kind == "no mount":
            self.storage = Path(f"/mnt/shared-{random.Random(self._why.seed).randrange(10**6)}/checkpoints")
            return
        _remove_stale(self.storage)
        self.storage.mkdir(exist_ok=True)
        if kind.startswith("disk full"):
            _call("mount", "-t", "tmpfs", "-o", f"size={self._tmpfs_bytes()}", "tmpfs", str(self.storage))
            self._stack.callback(_unmount, self.storage)
        if kind in ("quota", "mount lost", "storage stalls"):
            self._serve(100_000 if kind == "quota" else 1 << 40)
        if kind == "OOM killer":
            self._limit_memory()
        if kind == "Xid":
            for host in self._hosts():
                (self._folder / f"kmsg-{host}").write_text("")

    def _tmpfs_bytes(self) -> int:
        return _TMPFS_BYTES if self._why.kind == "disk full, all" else 100_000

    def _hosts(self) -> tuple[str, ...]:
        return HOSTS[: self._why.hosts]

    def environment(self, host: str) -> dict[str, str]:
        return {KERNEL_LOG: str(self._folder / f"kmsg-{host}")} if self._why.kind == "Xid" else {}

    def _serve(self, most_bytes: int) -> None:
        command = [sys.executable, "-m", "benchmarks.campaign.why_fuse", str(self.storage), str(most_bytes)]
        self._server = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        self._stack.callback(_unmount, self.storage)
        self._stack.callback(_kill, self._server)
        assert self._server.stdout is not None
        if self._server.stdout.readline() != b"mounted\n":
            raise RuntimeError("the FUSE server did not mount")

    def _limit_memory(self) -> None:
        above = _memory_groups()
        assert above is not None
        self._group = above / f"keepstep-why-{os.getpid()}-{self._why.seed}"
        self._group.mkdir()
        self._stack.callback(_remove_group, self._group)
        name = "memory.limit_in_bytes" if above == _V1 else "memory.max"
        (self._group / name).write_text(str(_MORE_BYTES))

    def on_hosts(self, bed: Any) -> None:
        """What is there before the job begins, on its hosts."""
        self.bed = bed
        if self._why.kind != "port taken":
            return
        self.port = _free_port()
        command = [sys.executable, "-c", _BIND, str(self.port)]
        if bed is not None:
            command = bed.hosts[HOSTS[0]].command(command)
        squatter = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        self._stack.callback(_kill, squatter)
        assert squatter.stdout is not None
        if squatter.stdout.readline() != b"bound\n":
            raise RuntimeError("the port could not be taken")

    def advance(self, step: int, ranks: RankProcesses) -> None:
        """Do what is due once the rank of the seed has made ``step`` (-1: none yet)."""
        act = self._acts().get(self._why.kind)
        if act is None or self._done:
            return
        at, do = act
        if step >= at:
            self._done = True
            self.began_s = time.time()
            do(ranks)

    def _acts(self) -> dict[str, tuple[int, Callable[[RankProcesses], None]]]:
        due = self._why.step
        return {
            "OOM killer": (0, self._enter_group),
            "mount lost": (due - 2, lambda ranks: self._signal_server(signal.SIGKILL)),
            "storage stalls": (due - 2, lambda ranks: self._signal_server(signal.SIGSTOP)),
            "loader killed": (due, self._kill_loader),
            "link cut": (due, self._cut),
            "time limit": (due, self._end_in_time),
            "Xid": (due - 1, self._tell_of_gpu),
        }

    def _signal_server(self, number: int) -> None:
        assert self._server is not None
        self._server.send_signal(number)

    def _enter_group(self, ranks: RankProcesses) -> None:
        assert self._group is not None
        (self._group / "cgroup.procs").write_text(str(ranks.pid(self._why.rank)))

    def _kill_loader(self, ranks: RankProcesses) -> None:
        for child in children_of(ranks.pid(self._why.rank)):
            if b"train.py" in _command_line(child):
                os.kill(child, signal.SIGKILL)
                return
        self._done = False

    def _cut(self, ranks: RankProcesses) -> None:
        self._stack.enter_context(self.bed.cut(*HOSTS))

    def _end_in_time(self, ranks: RankProcesses) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%S")
        if self._why.way.startswith("USR1"):
            for pid in ranks.living():  # as a batch script passes on what `--signal=B:USR1@120` tells it
                _send(pid, signal.SIGUSR1)
            time.sleep(0.5)
        self.line = _SLURM.format(host=HOSTS[0], time=when)
        for pid, line in processes_of(self._folder / "run").items():
            if not line.startswith("nsenter"):
                _send(pid, signal.SIGTERM)

    def _tell_of_gpu(self, ranks: RankProcesses) -> None:
        why = self._why
        place = why.rank % why.per_host
        text = _XIDS[why.way].format(pid=ranks.pid_on_host(why.rank))
        clock_us = round(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
        line = f"3,{1000 + why.step},{clock_us},-;NVRM: Xid (PCI:0000:{0x1B + 0x20 * place:02x}:00): {text}\n"
        with (self._folder / f"kmsg-{why.host or HOSTS[0]}").open("a") as log:
            log.write(line)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_MOUNTED_S)


def _unmount(folder: Path) -> bool:
    """Whether anything was mounted there; its server need not be alive."""
    return ctypes.CDLL(None).umount2(os.fsencode(folder), _LAZILY) == 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _remove_group(group: Path) -> None:
    """With whoever is in it still."""
    for _ in range(50):
        with suppress(OSError):
            group.rmdir()
            return
        with suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                _send(int(pid), signal.SIGKILL)
        time.sleep(0.1)


def _remove_stale(storage: Path) -> None:
    """What a driver that was killed has left: mounts where this seed saves, groups of processes that are gone."""
    while _unmount(storage):
        pass
    above = _memory_groups()
    for group in above.glob("keepstep-why-*") if above else ():
        if not Path(f"/proc/{group.name.split('-')[2]}").exists():
            _remove_group(group)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
