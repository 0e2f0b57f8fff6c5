"""Why keepstep's parts inside NCCL, the shim and the profiler plugin, see nothing of a process that trains on it.

A job is watched without them, but slow GPUs and slow links are then not told. What is looked at is what the process has
mapped, the environment that it was started with, and what the shim has written into its ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.agent.sensors.processes import PROC, ProcessId, alive
from keepstep.agent.sensors.unwatched import noticed_of
from keepstep.core.events import NCCL_NOTE
from keepstep.ring import link_table

_LOOK_S = 1.0
_SURE_S = (
    10.0  # after torch has a group of NCCL's: by then its libraries are loaded, and its first calls made
)
_TORCH = ("/torch/lib/libtorch_cuda.so", "/torch/lib/libtorch_hip.so")
_NCCL = ("/libnccl.so", "/librccl.so")
_SHIM = "libkeepstep_nccl.so"
_WITHOUT = "so a slow GPU is not told from a slow host"
_MOST_BYTES = 1 << 20  # largest environment of a process that is read


@dataclass(frozen=True, slots=True)
class NcclRecords:
    """What the ring of a process with groups on NCCL has of them.

    Attributes:
        calls: whether the probe has seen two operations on one of these groups: the first makes a communicator.
        seen: whether the shim has seen NCCL make a communicator.
        notes: the lines of code of its calls, and other lines that were left there.
    """

    calls: bool
    seen: bool
    notes: Sequence[str] = ()


class UnseenNccl:
    """Looks at each process some seconds after it has its first group on NCCL, and again where that was too early."""

    def __init__(self) -> None:
        # Since when a process waits for its next look, and for how long.
        self._waits: dict[ProcessId, tuple[float, float]] = {}
        # Why shim and plugin see nothing; "": they do. None: it is too early to tell.
        self._told: dict[ProcessId, tuple[str | None, str]] = {}
        self._next_s = 0.0

    def lines(
        self,
        now_s: float,
        node: str,
        processes: Mapping[int, ProcessId],
        records: Callable[[int], NcclRecords],
    ) -> list[str]:
        """Lines for the operator.

        Args:
            now_s: the time on the node's clock.
            node: the name of the node.
            processes: those with groups on NCCL, by rank.
            records: what the ring of a rank has, asked for once.
        """
        if now_s >= self._next_s:
            self._next_s = now_s + _LOOK_S
            self._look(now_s, processes, records)
        lines: list[str] = []
        for kind in range(2):
            told = {rank: self._told[one][kind] for rank, one in processes.items() if one in self._told}
            lines += noticed_of(node, {rank: why for rank, why in told.items() if why})
        return lines

    def _look(
        self, now_s: float, processes: Mapping[int, ProcessId], records: Callable[[int], NcclRecords]
    ) -> None:
        there = set(processes.values())
        for known in (self._waits, self._told):
            for process in known.keys() - there:
                del known[process]
        for rank, process in processes.items():
            since_s, wait_s = self._waits.setdefault(process, (now_s, _SURE_S))
            is_open = self._told.get(process, (None, ""))[0] is None
            if is_open and now_s - since_s >= wait_s and alive(process):
                self._told[process] = why_unseen(process, records(rank))
                self._waits[process] = now_s, 2 * wait_s


def why_unseen(process: ProcessId, records: NcclRecords) -> tuple[str | None, str]:
    """Why the shim and the plugin see nothing of a process; "" where they may, or the process cannot be looked at.

    None for the shim: it is too early to tell.
    """
    folder = PROC / str(process.pid)
    try:
        with open(folder / "maps", errors="replace") as file:
            mapped = [line for line in file if ".so" in line]
        with open(folder / "environ", "rb") as file:
            words = file.read(_MOST_BYTES).decode(errors="replace").split("\0")
    except OSError:
        return "", ""
    if not _has(mapped, *_TORCH):  # a double: no NCCL is called
        return "", ""
    environ = dict(word.split("=", 1) for word in words if "=" in word)
    return _of_shim(records, mapped, environ), _of_plugin(environ)


def _has(mapped: list[str], *names: str) -> bool:
    return any(name in line for line in mapped for name in names)


def _of_shim(records: NcclRecords, mapped: list[str], environ: Mapping[str, str]) -> str | None:
    note = next((text for text in records.notes if text.startswith(NCCL_NOTE)), "")
    if note:
        why = note.removeprefix(NCCL_NOTE)
        return f"NCCL's calls are not seen, {_WITHOUT}: {why}: use NCCL 2.18 or newer"
    if records.seen or environ.get("KEEPSTEP_NCCL_SHIM") == "0":
        return ""
    begin = f"NCCL's calls are not seen, {_WITHOUT}: "
    if not _has(mapped, f"/{_SHIM}"):
        preloaded = environ.get("LD_PRELOAD", "")
        if _SHIM in preloaded:
            return f"{begin}the library in LD_PRELOAD ({preloaded}) is not there: make it readable in the container"
        return (
            f"{begin}keepstep's library is not in LD_PRELOAD, which sudo, env -i or a wrapper of the script has "
            "dropped: keep it"
        )
    if not _has(mapped, *_NCCL):
        return f"{begin}NCCL is linked statically into torch (no libnccl.so is loaded): use a torch with libnccl.so"
    if records.calls:
        return f"{begin}they pass by the library in LD_PRELOAD, as after dlsym or RTLD_DEEPBIND: link NCCL"
    return None


def _of_plugin(environ: Mapping[str, str]) -> str:
    if not environ.get("KEEPSTEP_LINKS"):
        return ""  # dropped with the rest
    given = environ.get(link_table.PLUGIN)
    if given is not None and Path(given).name == link_table.LIBRARY:
        return ""
    file = link_table.file_with_plugin(environ) if given is None else None
    if given is None and file is None:
        return ""  # the plugin was not built, or its path is too long for NCCL
    where = f"{link_table.PLUGIN} in {file}" if file is not None else f"{link_table.PLUGIN}={given}"
    return f"a slow or cut link of NCCL is not told: {where} has the place of keepstep's plugin: unset it"
