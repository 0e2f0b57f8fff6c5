"""The launcher's part of the workers' words: which streams are kept, and what a dead worker said last.

A worker whose stream is kept writes into memory of the launcher's (``kept_words``); a process of its own shows that on
the console and keeps it in files (``words_keeper``). Where the console is a terminal, the worker writes into one, too
(``terminals``), from which that process reads.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.core.within import within
from keepstep.launch.command.job import STDERR, STDOUT, Job
from keepstep.launch.command.run_folder import LogFiles
from keepstep.launch.workers.kept_words import can_be_kept, end_of, new_memory
from keepstep.launch.workers.rings import path_of
from keepstep.launch.workers.streams import WorkerStreams
from keepstep.launch.workers.terminals import drop, open_terminal, resize, until_read
from keepstep.launch.workers.words_keeper import OVER, SHOW, SHOWN, SHOWN_S, TROUBLE, Kept, fork_keeper

_END_BYTES = 1 << 14
_TRIES = 10  # keepers that die one after the other, before nothing is shown any more
_AGAIN_S = 0.1
_READ_S = 0.25  # the keeper is given so long to read what a dead worker has written to its terminal
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,32}[ -/]?[@-~]")


@dataclass(slots=True)
class _Memory:
    """The memory of one stream, or of both."""

    told: Kept
    name: str  # name of the stream, or "output" for both
    memory: int
    reader: int
    writer: int  # closed once the worker has it
    terminal: int = -1  # the end to be read, where the worker writes into a terminal

    def tell(self, keeper: socket.socket) -> None:
        """Tell the keeper of it. Raises OSError."""
        self.told.send(keeper, self.memory, self.reader, self.terminal)

    def close(self) -> None:
        """Let go of everything."""
        for descriptor in (self.memory, self.reader, *([self.terminal] if self.terminal >= 0 else [])):
            os.close(descriptor)
        self.started()

    def started(self) -> None:
        """Let the worker alone hold what it writes to."""
        if self.writer >= 0:
            os.close(self.writer)
        self.writer = -1


@dataclass(slots=True)
class RankWords:
    """The words of one worker; without any where its streams are not kept."""

    _memories: dict[int, _Memory] = field(default_factory=dict[int, _Memory])  # by STDOUT or STDERR

    def writer(self, stream: int) -> int | None:
        """The descriptor for the worker; None: the stream is not kept."""
        return self._memories[stream].writer if stream in self._memories else None

    @property
    def paths(self) -> dict[str, str]:
        """Where other processes can read what it writes, by the name of the stream."""
        return {one.name: path_of(one.reader) for one in self._memories.values()}

    def started(self) -> None:
        """Close the descriptors for the worker, which has them now."""
        for memory in self._memories.values():
            memory.started()

    def stderr(self) -> str | None:
        """The end of what it has written to stderr, and to stdout where both go to one place; None: it is not kept."""
        if STDERR not in self._memories:
            return None
        with suppress(OSError):
            if self._memories[STDERR].terminal >= 0:
                until_read(self._memories[STDERR].terminal, _READ_S)
            text = end_of(self._memories[STDERR].reader, _END_BYTES).decode(errors="replace")
            return (
                text if self._memories[STDERR].terminal < 0 else _COLOUR.sub("", text).replace("\r\n", "\n")
            )
        return ""


class Words:
    """The words of all workers of this launcher."""

    def __init__(self, job: Job, logs: LogFiles, warn: Callable[[str], None]) -> None:
        self._logs, self._warn = logs, warn
        self._consoles = kept_streams(job.keep_words)
        self._memories: dict[int, _Memory] = {}  # those into which somebody may still write, by number
        self._over: list[
            _Memory
        ] = []  # the others; what dead workers of this incarnation said is still asked for
        self._numbers = 0
        self._keeper: socket.socket | None = None
        self._deaths = 0
        self._shown = asyncio.Event()
        self._ended = asyncio.Event()
        self._has_trouble = self._is_ending = False

    def renew(self) -> None:
        """Let go of what nobody asks for any more, because another incarnation begins."""
        for memory in self._over:
            memory.close()
        self._over = []

    def begin(self, rank: int, local_rank: int, attempt: int, streams: WorkerStreams) -> RankWords:
        """Keep those streams of a worker that would go to the console."""
        targets = {STDOUT: streams.stdout, STDERR: streams.stderr}
        wanted = {stream: name for stream, name in self._consoles.items() if targets[stream] is None}
        both = len(wanted) == 2 and len(set(wanted.values())) == 1
        words: dict[int, _Memory] = {}
        try:
            for stream in wanted:
                if both and words:
                    words[stream] = next(iter(words.values()))
                    break
                name = "output" if both else {STDOUT: "stdout", STDERR: "stderr"}[stream]
                words[stream] = self._add(rank, local_rank, attempt, stream, name)
        except OSError as error:
            self._warn(f"the words of rank {rank} are not kept: {error}")
            return RankWords()
        return RankWords(words)

    def _add(self, rank: int, local_rank: int, attempt: int, stream: int, name: str) -> _Memory:
        folder = self._logs.of(rank, local_rank, attempt)
        head, end = (folder / f"{name}.{attempt}{which}.log" for which in ("", ".end"))
        if self._keeper is None:
            self._start()
        assert self._keeper
        told = Kept(self._numbers, f"rank {rank}", stream, str(head), str(end))
        memory = _Memory(told, name, *new_memory())
        try:
            if os.isatty(stream):
                memory.started()
                memory.terminal, memory.writer = open_terminal(stream)
            memory.tell(self._keeper)
        except OSError:
            memory.close()
            raise
        self._memories[self._numbers] = memory
        self._numbers += 1
        return memory

    async def shown(self) -> None:
        """Wait until the console has all that the workers have written; a few seconds where it takes it slowly."""
        if self._keeper and self._memories:
            self._shown.clear()
            with suppress(OSError, asyncio.TimeoutError):
                self._keeper.send(SHOW)
                await within(SHOWN_S + 1.0, self._shown.wait())

    async def end(self) -> None:
        """Show and keep what is left. Processes that outlive the job are still shown after this."""
        self._is_ending = True
        if self._keeper:
            self._deaths = _TRIES
            self._keeper.shutdown(socket.SHUT_WR)
            with suppress(asyncio.TimeoutError):
                await within(SHOWN_S + 1.0, self._ended.wait())

    def _start(self) -> None:
        self._keeper = fork_keeper()
        asyncio.get_running_loop().add_reader(self._keeper, self._hear, self._keeper)
        for memory in self._memories.values():
            if memory.terminal >= 0:
                asyncio.get_running_loop().remove_reader(memory.terminal)
            memory.tell(self._keeper)

    def resize(self) -> None:
        """Give all terminals the size that the console has now."""
        for memory in self._memories.values():
            if memory.terminal >= 0:
                resize(memory.terminal, memory.told.console)

    def _give_up(self) -> None:
        """Nothing is shown or kept any more; but nobody is to wait for a terminal that is not read."""
        self._warn(f"{_TRIES} processes that show the workers' words have died: they are not shown any more")
        loop = asyncio.get_running_loop()
        for memory in self._memories.values():
            if memory.terminal >= 0:
                loop.add_reader(memory.terminal, self._drop, memory.terminal)

    def _drop(self, terminal: int) -> None:
        if not drop(terminal):
            asyncio.get_running_loop().remove_reader(terminal)

    def _hear(self, keeper: socket.socket) -> None:
        try:
            message = keeper.recv(2000)
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(keeper)
            keeper.close()
            self._keeper = None
            self._ended.set()
            self._deaths += 1
            if self._deaths < _TRIES:
                asyncio.get_running_loop().call_later(_AGAIN_S, self._again)
            elif not self._is_ending:
                self._give_up()
        elif message == SHOWN:
            self._shown.set()
        elif message.startswith(OVER):
            if memory := self._memories.pop(int(message.removeprefix(OVER)), None):
                self._over.append(memory)
        elif message.startswith(TROUBLE) and not self._has_trouble:
            self._has_trouble = True
            why = message.removeprefix(TROUBLE).decode(errors="replace")
            self._warn(
                f"the workers' words cannot be kept ({why}): the console has them, files once there is room"
            )

    def _again(self) -> None:
        if self._keeper is None:
            with suppress(OSError):
                self._start()


def read_at(words: RankWords, streams: WorkerStreams, begin: Mapping[Path, int]) -> list[str]:
    """Where what a worker writes can be read: ``NAME:BEGIN:PATH`` for each stream.

    ``begin``: sizes of files before the worker began, because earlier ones may have written to them.
    """
    files = {"stdout": streams.stdout, "stderr": streams.stderr}
    kept = [f"{name}:0:{path}" for name, path in words.paths.items()]
    return kept + [
        f"{name}:{begin.get(path, 0)}:{path}"
        for name, path in files.items()
        if path and path != Path(os.devnull)
    ]


def kept_streams(which: str, consoles: Mapping[int, int] | None = None) -> dict[int, tuple[int, int]]:
    """The streams to keep, by STDOUT or STDERR, with what tells the same place: device and inode of the console.

    ``which``: off, stderr or all. Stdout is kept with stderr where both go to one place, so that their order stays.
    ``consoles``: descriptors of the consoles; None: those of this process.
    """
    found: dict[int, tuple[int, int]] = {}
    for stream, descriptor in (consoles or {STDOUT: 1, STDERR: 2}).items():
        with suppress(OSError):
            status = os.fstat(descriptor)
            found[stream] = (status.st_dev, status.st_ino)
    if which == "stderr" and STDOUT in found and found.get(STDERR) != found[STDOUT]:
        del found[STDOUT]
    return found if which != "off" and found and can_be_kept() else {}
