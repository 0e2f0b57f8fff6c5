"""What one rank does for long while the others wait: silently, or in work that moves bytes, children or the CPU."""

from __future__ import annotations

import gc
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.campaign.odd_draw import Odd
from torch.utils.data import DataLoader, Dataset

_PIECE = 20_000  # most bytes that the store takes at once
_COMPUTE = (
    "import sys, time\nuntil = time.monotonic() + {}\nwhile time.monotonic() < until: sum(range(10_000))\n"
)


def evaluate_in_a_loop(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """A validation set that only this rank has."""
    until_s = time.monotonic() + seconds
    model.eval()
    with torch.no_grad():
        while time.monotonic() < until_s:
            model(torch.randn(8, 64))
            time.sleep(0.02)
    model.train()


class _Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self._count:
            raise IndexError(index)
        time.sleep(0.05)  # is read and decoded
        return torch.randn(64)


def evaluate_from_a_loader(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """The same from a loader with a worker process."""
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(_Samples(int(seconds / 0.05)), batch_size=8, num_workers=1):
            model(batch)
    model.train()


def upload_in_pieces(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """A checkpoint to a slow object store: the rank sits in ``sendall``, and now and then some bytes are taken."""
    until_s = time.monotonic() + seconds
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    store.bind(("127.0.0.1", 0))
    store.listen(1)
    pause_s = chance.uniform(0.3, 2.0)

    def serve() -> None:
        connection, _ = store.accept()
        with connection:
            while connection.recv(_PIECE):
                if time.monotonic() < until_s:
                    time.sleep(pause_s)

    threading.Thread(target=serve, daemon=True).start()
    with socket.create_connection(store.getsockname()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.sendall(bytes(int(seconds / pause_s) * _PIECE))


def upload_and_wait_for_the_answer(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """An answer comes only when all of it is stored: not a byte goes over the socket meanwhile."""
    ours, theirs = socket.socketpair()
    threading.Timer(seconds, lambda: theirs.sendall(b"stored")).start()
    ours.recv(16)


def wait_for_a_file(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """Rollouts are made elsewhere and laid down as a file, which is looked for every second."""
    with tempfile.TemporaryDirectory() as folder:
        rewards = Path(folder) / "rewards"
        made = subprocess.Popen(["sh", "-c", f"sleep {seconds:.0f}; touch '{rewards}'"])
        while not rewards.exists():
            time.sleep(1)
        made.wait()


def wait_for_a_player(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """An RL rollout: another process plays, this one reads its reward from a pipe."""
    _reward_of([sys.executable, "-c", f"{_COMPUTE.format(seconds)}\nprint(1.0)"])


def wait_for_a_service(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """The same where the process itself only waits for a service that generates."""
    _reward_of(["sh", "-c", f"sleep {seconds:.0f}; echo 1.0"])


def _reward_of(command: list[str]) -> float:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as player:
        assert player.stdout is not None
        return float(player.stdout.readline())


def write_to_slow_storage(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """A checkpoint on a file system that takes a piece now and then."""
    until_s = time.monotonic() + seconds
    pause_s = chance.uniform(0.3, 2.0)
    with tempfile.NamedTemporaryFile() as file:
        while time.monotonic() < until_s:
            file.write(os.urandom(1 << 18))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(pause_s)


def compile_in_a_child(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """A compiler that runs as a process of its own."""
    subprocess.run([sys.executable, "-c", _COMPUTE.format(seconds)], check=True)


def collect_garbage(model: torch.nn.Module, seconds: float, chance: random.Random) -> None:
    """Long collections, one after the other; no other thread of the process runs meanwhile."""
    until_s = time.monotonic() + seconds
    kept: list[Any] = [[[]] for _ in range(800_000)]
    while time.monotonic() < until_s:
        kept.append(kept)
        gc.collect()
    kept.clear()


Way = Callable[[torch.nn.Module, float, random.Random], None]
SILENT: dict[str, Way] = {
    "upload, answer": upload_and_wait_for_the_answer,
    "rollout, file": wait_for_a_file,
    "rollout, service": wait_for_a_service,
}
MOVING: dict[str, Way] = {
    "evaluation, loop": evaluate_in_a_loop,
    "evaluation, loader": evaluate_from_a_loader,
    "upload, pieces": upload_in_pieces,
    "rollout, player": wait_for_a_player,
    "slow storage": write_to_slow_storage,
    "compile": compile_in_a_child,
    "garbage": collect_garbage,
}


def go_the_way(odd: Odd, model: torch.nn.Module) -> None:
    """Do what the seed has drawn."""
    (SILENT | MOVING)[odd.way](model, odd.seconds, odd.chance)
