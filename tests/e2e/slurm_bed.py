"""A real Slurm on this machine: munged, slurmctld and a slurmd for each node, all below one folder, for one test.

The nodes n0, n1, … are names of this host: in the mount namespace of every process here, ``/etc/hosts`` says so.

With ``KEEPSTEP_SLURM`` all processes see that folder's Linux, and so its Slurm, instead of this machine's; Python,
keepstep and what they write stay this machine's. ``tools/slurm_24.sh`` makes such a folder.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.core.own_address import ANYWHERE, address_towards

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
PATIENCE_S = 180.0
_SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_OTHER = os.environ.get("KEEPSTEP_SLURM", "")
_REPOSITORY = Path(__file__).resolve().parents[2]

_CONF = """\
ClusterName=bed
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctl_port}
SlurmUser=root
FirstJobId={first_job}
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
TopologyPlugin=topology/tree
GresTypes={gres}
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=8
KillWait=5
MinJobAge=300
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP {partition}
"""


def missing() -> str:
    """Why there can be no bed here; empty where there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    if _OTHER:
        whole = (Path(_OTHER) / ".ready").exists()
        return "" if whole else f"KEEPSTEP_SLURM={_OTHER}: was not made by tools/slurm_24.sh"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_SBIN) is None]
    return (
        f"not installed: {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client munge)"
        if absent
        else ""
    )


@dataclass
class SlurmBed:
    """A running cluster. ``nodes``: their names."""

    folder: Path
    nodes: tuple[str, ...]
    environ: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    def inside(self, *command: str) -> list[str]:
        """A command as it runs on the bed: names of nodes are known to it."""
        hosts = f"{self.folder}/hosts"
        if _OTHER:
            mount = _in_other_linux(self.folder, hosts)
        else:
            mount = f'mount --bind {hosts} /etc/hosts && {_open_python(self.folder)} exec "$@"'
        return ["unshare", "--mount", "--propagation=private", "sh", "-c", mount, "sh", *command]

    def run(
        self, *command: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of Slurm's, or another one, to its end."""
        return subprocess.run(
            self.inside(*command),
            env={**self.environ, **(environ or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            cwd=self.folder,
        )

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a program on the bed; its output is kept."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.inside(*command), env=self.environ, stdout=pipe, stderr=pipe, text=True, cwd=self.folder
        )

    def daemon(self, name: str, *command: str) -> None:
        """Start a daemon of Slurm's."""
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                self.inside(*command), env=self.environ, stdout=log, stderr=log, start_new_session=True
            )

    def start_controller(self) -> None:
        """Start slurmctld; after `stop_controller` it knows the jobs that run."""
        self.daemon("slurmctld", "slurmctld", "-D", "-f", f"{self.folder}/slurm.conf")

    def stop_controller(self) -> None:
        """End slurmctld."""
        daemon = self.daemons.pop("slurmctld")
        daemon.terminate()
        daemon.wait(PATIENCE_S)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node, which has a host name of its own."""
        named = ("unshare", "--uts", "sh", "-c", f'hostname {node} && exec "$@"', "sh")
        self.daemon(node, *named, "slurmd", "-D", "-f", f"{self.folder}/slurm.conf", "-N", node)

    def state(self, node: str) -> str:
        """The state of a node in ``sinfo``'s words."""
        return self.run("sinfo", "--noheader", f"--nodes={node}", "--format=%T").stdout.strip()

    def is_drained(self, node: str) -> bool:
        """Whether a node is drained and no job has it; ``sinfo`` of 24.11 may call it draining until the job ends."""
        return "State=IDLE+DRAIN " in self.run("scontrol", "show", "node", node).stdout

    def told(self, job: str, name: str) -> str:
        """What ``scontrol`` shows of a job under a name, as ``Restarts``; empty where there is nothing."""
        shown = self.run("scontrol", "show", "job", job).stdout
        found = re.search(rf"(?:^|\s){name}=(\S+)", shown)
        return found[1] if found else ""

    def processes(self, node: str) -> dict[int, str]:
        """Command lines of the processes that run in job steps on a node, by process id."""
        found: dict[int, str] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environ = (path / "environ").read_bytes().split(b"\0")
                if (
                    f"SLURMD_NODENAME={node}".encode() in environ
                    and f"KEEPSTEP_BED={self.folder}".encode() in environ
                ):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def kill_launcher(self, node: str) -> None:
        """Kill the launcher of a node, and so its workers."""
        launchers = [
            pid
            for pid, line in self.processes(node).items()
            # On the first node there are the steps' sruns, too, which have the launchers' commands.
            if " keepstep.cli run " in line and not line.startswith("srun ")
        ]
        assert launchers, f"no launcher on {node}"
        for pid in launchers:
            os.kill(pid, signal.SIGKILL)

    def lose_node(self, node: str) -> None:
        """Kill everything that runs on a node, with its daemon."""
        daemon = self.daemons.pop(node)
        host = os.readlink(
            f"/proc/{daemon.pid}/ns/uts"
        )  # with a name of its own: all below its slurmd are in it
        lost = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_on(path, host)]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody there sees another one end
            for pid in lost:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        daemon.wait()


def _open_python(folder: Path) -> str:
    """Shell commands that let an ordinary user reach this Python where it lies in a folder of root's; else none."""
    prefix = Path(sys.base_prefix).resolve()
    closed = [one for one in reversed(prefix.parents) if not one.stat().st_mode & 0o001]
    if not closed:
        return ""
    return (
        f"mkdir -p {folder}/python && mount --bind {prefix} {folder}/python && "
        f"mount -t tmpfs -o mode=755 tmpfs {closed[0]} && mkdir -p {prefix} && "
        f"mount --bind {folder}/python {prefix} &&"
    )


def _in_other_linux(folder: Path, hosts: str) -> str:
    """Shell commands that run "$@" in the folder ``_OTHER``. What they mount ends with the last process there."""
    root = folder / "linux"
    kept: list[Path] = []  # what is this machine's
    for path in (
        Path("/tmp"),
        *(Path(one).resolve() for one in (sys.base_prefix, sys.prefix)),
        _REPOSITORY,
        folder,
    ):
        if not any(path.is_relative_to(one) for one in kept):
            kept.append(path)
    binds = [f"mkdir -p {root}{path} && mount --bind {path} {root}{path} &&" for path in kept]
    kernels = [f"mount --rbind {path} {root}{path} &&" for path in ("/proc", "/sys", "/dev")]
    return " ".join(
        [
            f"mkdir -p {root} && mount --bind {_OTHER} {root} && mount --bind {hosts} {root}/etc/hosts &&",
            *(_open_python(folder), *binds, *kernels),
            f'exec chroot {root} env --chdir={folder} "$@"',
        ]
    )


def _is_on(process: Path, host: str) -> bool:
    with suppress(OSError):
        return os.readlink(process / "ns" / "uts") == host
    return False


def until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited too long: {what}"
        time.sleep(0.1)


@contextmanager
def slurm(
    folder: Path,
    count: int = 6,
    *,
    gres: bool = False,
    conf: Mapping[str, str] | None = None,
    partition: str = "",
) -> Iterator[SlurmBed]:
    """A cluster of so many nodes, on two switches.

    Args:
        gres: whether each node has eight GPUs, which are not there.
        conf: more settings of slurm.conf, or others than the bed's.
        partition: more settings of the partition "all", and lines with other partitions.
    """
    nodes = tuple(f"n{number}" for number in range(count))
    folder.chmod(0o755)
    for name in ("munge", "state"):
        (folder / name).mkdir()
    ports = free_ports(count + 1)
    gpus = " Gres=gpu:8" if gres else ""
    lines = "\n".join(
        f"NodeName={node} NodeHostname={os.uname().nodename} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs=64 RealMemory=8000{gpus}"
        for node, port in zip(nodes, ports, strict=False)
    )
    own = _CONF.format(
        partition=partition,
        host=os.uname().nodename,
        ctl_port=ports[-1],
        folder=folder,
        nodes=lines,
        gres="gpu" if gres else "",
        first_job=random.randrange(1, 9000),  # controllers of several beds on this host have other ports
    )
    kept = [
        line
        for line in own.splitlines()
        if line != "GresTypes=" and line.partition("=")[0] not in (conf or {})
    ]
    others = [f"{name}={value}" for name, value in (conf or {}).items()]
    (folder / "slurm.conf").write_text("\n".join([*others, *kept]) + "\n")
    for number in range(8 if gres else 0):
        (folder / f"gpu{number}").touch()  # stands for a device file
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-7]\n" if gres else "")
    half = count // 2
    (folder / "topology.conf").write_text(
        f"SwitchName=s0 Nodes=n[0-{half - 1}]\nSwitchName=s1 Nodes=n[{half}-{count - 1}]\n"
        "SwitchName=core Switches=s[0-1]\n"
    )
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    hosts = Path("/etc/hosts").read_text()
    # Under a loopback address a host's own name would stand for the one from which packets leave the machine.
    (folder / "hosts").write_text(hosts + f"\n{address_towards(ANYWHERE)} {' '.join(nodes)}\n")
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "munge").chmod(0o755)
    home = folder / "home"
    home.mkdir()
    home.chmod(0o1777)
    python = str(Path(sys.executable).parent)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
        "PATH": f"{python}:{_SBIN}",
        "SLURM_CONF": f"{folder}/slurm.conf",
        "KEEPSTEP_BED": str(folder),
        "OMP_NUM_THREADS": "1",
        "HOME": str(
            home
        ),  # each process of the bed has a home folder of root's of its own, and secrets are shared
    }
    bed = SlurmBed(folder, nodes, environ)
    try:
        munge = folder / "munge"
        bed.daemon(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        until((munge / "socket").exists, "munged")
        bed.start_controller()
        for node in nodes:
            bed.start_node(node)
        until(lambda: all(bed.state(node) == "idle" for node in nodes), "all nodes are idle")
        yield bed
    finally:
        bed.run("scancel", "--signal=KILL", "--user=root")
        for node in nodes:
            for pid in bed.processes(node):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in reversed(bed.daemons.values()):
            daemon.kill()
            daemon.wait()


def free_ports(count: int) -> Sequence[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
