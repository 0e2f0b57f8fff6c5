"""Whether viewers that hang cost a training anything: the same job, with and without them in turn.

    python -m benchmarks.operate --part hanging [--quick] [--json FILE]

Four ranks train on Gloo, one of them slow, so that there is something to tell. Blocks alternate between nobody who
looks, a `keepstep serve` whose receivers answer, and one whose receivers hang for 60 s each: webhook, Slack form, mail,
tracker, and viewers who read nothing. The figure is the ratio of mean step times of neighbouring blocks; the noise is
that of two blocks in which nobody looked. The first seconds of a block, in which a server starts, are left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from benchmarks._intervals import interval
from benchmarks._report import Line, Report

RANKS = 4
GOAL = "step time within noise"
Who = Literal["nobody", "answering", "hanging"]
_ORDER: tuple[Who, ...] = ("nobody", "hanging", "nobody", "answering")
_HANG_S = 60
_VIEWERS = 4

JOB = """
import pathlib, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, stop = dist.get_rank(), pathlib.Path(sys.argv[1], "stop")
gradient, step = torch.ones(10_000), 0
with open(pathlib.Path(sys.argv[1], "steps"), "w", 1 << 12) if rank == 0 else open("/dev/null", "w") as file:
    while True:
        began = time.time()
        time.sleep(0.04 if rank == 3 and step >= 150 else 0.02)
        going = torch.tensor(0.0 if step % 50 == 0 and stop.exists() else 1.0)
        dist.all_reduce(gradient)
        dist.all_reduce(going, dist.ReduceOp.MIN)
        gradient /= dist.get_world_size()
        step += 1
        file.write(f"{began} {time.time() - began}\\n")
        if not going:
            break
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A time in which the same looked."""

    who: Who
    begin_s: float  # Unix time, after the start of the viewers
    end_s: float


class Receivers:
    """A host that takes connections and never answers, or one that answers as a web server."""

    def __init__(self, *, hangs: bool) -> None:
        self.connections = 0
        self._hangs, self._kept = hangs, list[socket.socket]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._server.accept()[0]
            except OSError:
                return
            self.connections += 1
            self._kept.append(connection)
            if not self._hangs:
                threading.Thread(target=_answer, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Let everybody go."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for one in self._kept:
            one.close()
        self._thread.join()


def _answer(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1 << 20)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()


def _notify_file(folder: Path, port: int, *, mail: bool) -> Path:
    url = folder / "hook.url"
    url.write_text(f"http://127.0.0.1:{port}/hook")
    url.chmod(0o600)
    text = f"[webhook.a]\nurl_file = 'hook.url'\ntimeout_s = {_HANG_S}\n"
    text += f"[slack.b]\nurl_file = 'hook.url'\ntimeout_s = {_HANG_S}\n"
    if mail:
        text += f"[mail.c]\nserver = '127.0.0.1:{port}'\nsecurity = 'none'\nfrom = 'a@b.c'\nto = ['d@e.f']\n"
        text += f"timeout_s = {_HANG_S}\n"
    if importlib.util.find_spec("opentelemetry.sdk") is not None:
        text += f"[otel]\nurl = 'http://127.0.0.1:{port}'\n"
    file = folder / "notify.toml"
    file.write_text(text)
    return file


@contextlib.contextmanager
def _viewers(folder: Path, who: Who) -> Iterator[None]:
    """The server of the run with its receivers, and viewers of its page."""
    if who == "nobody":
        yield
        return
    shutil.rmtree(folder / "run" / "notified", ignore_errors=True)  # or it would not be told again
    receivers = Receivers(hangs=who == "hanging")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    file = _notify_file(folder, receivers.port, mail=who == "hanging")
    command = [sys.executable, "-m", "keepstep.cli", "serve", str(folder / "run"), "--notify", str(file)]
    with (folder / f"serve-{who}.txt").open("ab") as log:
        server = subprocess.Popen([*command, "--listen", f"127.0.0.1:{port}"], stdout=log, stderr=log)
    stopping = threading.Event()
    threads = [
        threading.Thread(target=_view, args=(port, who == "hanging", stopping)) for _ in range(_VIEWERS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
        if receivers.connections == 0:
            raise RuntimeError(f"nobody was told: see {log.name}")
    finally:
        stopping.set()
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for thread in threads:
            thread.join()
        receivers.close()


def _view(port: int, hangs: bool, stopping: threading.Event) -> None:
    """A viewer of the page's events, who reads them or not."""
    while not stopping.wait(0.5):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as viewer:
            viewer.sendall(f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            while not stopping.wait(0.5):
                if not hangs and not viewer.recv(1 << 20):
                    break


def _trained(folder: Path, rounds: int, settle_s: float, block_s: float) -> list[Block]:
    """Run the job once, with everybody in turn; returns the blocks."""
    script = folder / "job.py"
    script.write_text(JOB)
    command = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", str(RANKS)]
    command += ["--run-dir", str(folder / "run"), str(script), str(folder)]
    blocks: list[Block] = []
    with (folder / "console.txt").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for_verdict(job, folder)
        for who in _ORDER * rounds:
            with _viewers(folder, who):
                time.sleep(settle_s)
                begin_s = time.time()
                time.sleep(block_s)
                blocks.append(Block(who, begin_s, time.time()))
            if job.poll() is not None:
                raise RuntimeError(f"the job ended early with {job.returncode}: {_last_words(folder)}")
    finally:
        (folder / "stop").touch()
        try:
            job.wait(60)
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait()
    return blocks


def _wait_for_verdict(job: subprocess.Popen[bytes], folder: Path) -> None:
    until_s = time.monotonic() + 120
    while not list((folder / "run" / "incidents").glob("*.json")):
        if job.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"no verdict came: {_last_words(folder)}")
        time.sleep(0.1)


def _last_words(folder: Path) -> str:
    return (folder / "console.txt").read_text(errors="replace")[-2000:]


def means_ms(steps: Sequence[tuple[float, float]], blocks: Sequence[Block]) -> list[float]:
    """The mean step time of each block, in ms. ``steps``: when each began and how long it took, in seconds."""
    found = [[took for began, took in steps if one.begin_s <= began < one.end_s] for one in blocks]
    return [statistics.fmean(took) * 1e3 for took in found]


def ratios(blocks: Sequence[Block], means: Sequence[float], who: Who) -> list[float]:
    """Mean step times of ``who`` over the mean of the blocks beside it in which nobody looked."""
    found: list[float] = []
    for place, one in enumerate(blocks):
        beside = [
            means[at] for at in (place - 1, place + 1) if 0 <= at < len(blocks) and blocks[at].who == "nobody"
        ]
        if one.who == who and beside:
            found.append(means[place] / statistics.fmean(beside))
    return found


def noise(blocks: Sequence[Block], means: Sequence[float]) -> list[float]:
    """The same for nobody: each block over the next one in which nobody looked."""
    quiet = [mean for one, mean in zip(blocks, means, strict=True) if one.who == "nobody"]
    return [first / second for first, second in pairwise(quiet)]


def report(quick: bool, json_path: Path | None) -> None:
    """Measure and print."""
    rounds, settle_s, block_s = (2, 4.0, 6.0) if quick else (6, 12.0, 50.0)
    found = Report("operate, hanging viewers", quick=quick)
    with tempfile.TemporaryDirectory(prefix="hanging-") as name:
        folder = Path(name)
        blocks = _trained(folder, rounds, settle_s, block_s)
        lines = (folder / "steps").read_text().splitlines()
        steps = [(float(one.split()[0]), float(one.split()[1])) for one in lines if len(one.split()) == 2]
    means = means_ms(steps, blocks)
    for who in ("nobody", "answering", "hanging"):
        own = [mean for one, mean in zip(blocks, means, strict=True) if one.who == who]
        found.add(Line(f"step, {who} looking", round(statistics.fmean(own), 3), "ms"))
    _, low, high = interval(noise(blocks, means))
    found.add(Line("noise: nobody against nobody", f"{low:.4f} to {high:.4f}", "ratio, 95 %"))
    for who in ("answering", "hanging"):
        mean, least, most = interval(ratios(blocks, means, who))
        met = least <= high if who == "hanging" and not quick else None  # a try has too few blocks
        name = f"step time, {who} against nobody"
        value = f"{mean:.4f} ({least:.4f} to {most:.4f})"
        found.add(Line(name, value, "ratio, 95 %", goal=GOAL if who == "hanging" else None, met=met))
    cores = len(os.sched_getaffinity(0))
    found.leave_out("a server on another host", f"here it shares {cores} cores with the job")
    found.finish(json_path)
    print(
        json.dumps({"blocks": [(one.who, round(mean, 3)) for one, mean in zip(blocks, means, strict=True)]})
    )
