"""A healthy training in which one rank does something long by itself while the others wait: it must not be ended.

Plain PyTorch on Gloo. Nothing here comes from keepstep, and nothing tells keepstep what is going on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_PIECE = 20_000  # most bytes that the store takes at once


def evaluate(model: torch.nn.Module, seconds: float) -> None:
    """A validation set that only this rank has."""
    until_s = time.monotonic() + seconds
    model.eval()
    with torch.no_grad():
        while time.monotonic() < until_s:
            model(torch.randn(8, 64))
            time.sleep(0.02)
    model.train()


def upload(seconds: float) -> None:
    """A checkpoint to a slow object store: the rank sits in ``sendall``, and now and then some bytes are taken."""
    until_s = time.monotonic() + seconds
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    store.bind(("127.0.0.1", 0))
    store.listen(1)

    def serve() -> None:
        connection, _ = store.accept()
        with connection:
            while connection.recv(_PIECE):
                if time.monotonic() < until_s:
                    time.sleep(0.5)

    threading.Thread(target=serve, daemon=True).start()
    with socket.create_connection(store.getsockname()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.sendall(bytes(int(seconds / 0.5) * _PIECE))


def wait_for_answer(seconds: float) -> None:
    """An upload whose answer comes only when all of it is stored: not a byte goes over the socket meanwhile."""
    ours, theirs = socket.socketpair()
    threading.Timer(seconds, lambda: theirs.sendall(b"stored")).start()
    ours.recv(16)


def _environment(pipe: Any, seconds: float) -> None:
    pipe.recv()
    time.sleep(seconds)  # a game, a simulator, another service that generates
    pipe.send(1.0)


def roll_out(seconds: float) -> None:
    """An RL rollout: another process plays, this one waits for its reward."""
    ours, theirs = multiprocessing.Pipe()
    player = multiprocessing.get_context("spawn").Process(target=_environment, args=(theirs, seconds))
    player.start()
    ours.send("play")
    ours.recv()
    player.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--what", choices=("evaluate", "upload", "answer", "roll-out", "stop", "export"), required=True)
    add("--rank", type=int, required=True, help="who does it")
    add("--step", type=int, required=True, help="after which step")
    add("--seconds", type=float, required=True)
    add("--wait", choices=("barrier", "broadcast", "gradients"), required=True, help="where the others wait")
    add("--steps", type=int, required=True)
    add("--step-times", required=True, help="FILE with {rank}")
    add(
        "--lives",
        required=True,
        help="FILE with {rank}: a line when the rank begins, and one when it is done",
    )
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    rank = dist.get_rank()
    lives = Path(given.lives.replace("{rank}", str(rank)))
    with lives.open("a") as file:
        file.write(f"began {os.getpid()}\n")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def long_way() -> None:
        if given.what == "evaluate":
            evaluate(model.module, given.seconds)
        elif given.what == "upload":
            upload(given.seconds)
        elif given.what == "answer":
            wait_for_answer(given.seconds)
        elif given.what == "roll-out":
            roll_out(given.seconds)

    with open(given.step_times.replace("{rank}", str(rank)), "w") as times:
        for step in range(given.steps):
            began_s = time.monotonic()
            optimizer.zero_grad()
            time.sleep(0.05)
            model(torch.randn(8, 64)).mean().backward()
            optimizer.step()
            if step == given.step and given.what not in ("stop", "export"):
                if rank == given.rank:
                    long_way()
                if given.wait == "barrier":
                    dist.barrier()
                elif given.wait == "broadcast":
                    dist.broadcast(torch.zeros(1), given.rank)
            times.write(json.dumps({"step": step, "seconds": time.monotonic() - began_s}) + "\n")
            times.flush()
    dist.destroy_process_group()
    if given.what == "export" and rank == given.rank:
        time.sleep(given.seconds)  # converts the last checkpoint; the others have ended
    with lives.open("a") as file:
        file.write(f"done {os.getpid()}\n")


if __name__ == "__main__":
    main()
