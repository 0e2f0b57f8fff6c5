"""The recovery bench's job for nvidia-resiliency-ext (in-process) and torchft, as their documentation has it.

    python -m benchmarks.recovery.peers nvidia-resiliency-ext|torchft FOLDER STEP_S

starts the processes of one host and waits for them. nvidia-resiliency-ext: one rank more than are active, in reserve,
which has imported everything; the store is kept outside the ranks, and collectives end after 10 s: with Gloo that alone
gets the survivors out. torchft: a lighthouse with the settings of its README, and as many replicas of one rank, each
under a torchrun that starts it again. The training is that of ``job.py``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.recovery.victim import Ballast, misbehave, ranks

RESERVE = 1


def free_port() -> int:
    """Of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_nvrx(folder: str, step_s: str) -> int:
    """Exit code of the last rank."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-m", "benchmarks.recovery.peers", "nvrx-rank", folder, step_s]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks() + RESERVE)}
    processes = [
        subprocess.Popen(words, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks() + RESERVE)
    ]
    codes = [process.wait() for process in processes]
    del store
    return min(codes, key=abs)


def start_torchft(folder: str, step_s: str) -> int:
    """Exit code of the worst replica."""
    lighthouse, port = Path(sys.executable).with_name("torchft_lighthouse"), free_port()
    words = [str(lighthouse), "--bind", f"[::]:{port}", "--min_replicas", "1"]
    server = subprocess.Popen([*words, "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"])
    replicas = []
    for replica in range(ranks()):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"]
        command += [
            "--max-restarts",
            "3",
            "--master-port",
            str(free_port()),
            "-m",
            "benchmarks.recovery.peers",
        ]
        environment = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "REPLICA": str(replica)}
        replicas.append(
            subprocess.Popen([*command, "torchft-rank", folder, step_s], env={**os.environ, **environment})
        )
    codes = [replica.wait() for replica in replicas]
    server.kill()
    server.wait()
    return max(codes, key=abs)


def _module() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))


def nvrx_rank(folder: Path, step_s: float) -> None:
    """One of five processes."""
    from nvidia_resiliency_ext import inprocess  # pyright: ignore[reportMissingImports]

    assignment = inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(ranks()), inprocess.rank_assignment.ShiftRanks()
    )

    def train(call_wrapper: Any = None) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        own = dist.PrefixStore(f"training-{call_wrapper.iteration}", store)
        limit = timedelta(seconds=10)  # a rank that waits for one that is well leaves by this only
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=limit)
        model = torch.nn.parallel.DistributedDataParallel(_module())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        file = Path("/dev/shm") / f"{folder.name}-{rank}.pt"
        found: dict[str, Any] = torch.load(file) if file.exists() else {"step": 0}
        ballast = Ballast()
        steps = torch.tensor(found["step"])
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
        if int(steps):
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
            ballast.load_state_dict(found["ballast"])
        else:
            ballast.initialise()
        step = int(steps)
        with (folder / f"steps-{rank}").open("a") as log:
            while True:
                misbehave(folder, rank)
                model(torch.full((8, 256), float(step % 7))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                log.write(f"{os.getpid()} {call_wrapper.iteration} {world} {step} {time.monotonic()}\n")
                log.flush()
                draft = file.with_suffix(".draft")
                of = {"model": model, "optimizer": optimizer, "ballast": ballast}
                torch.save({"step": step, **{name: one.state_dict() for name, one in of.items()}}, draft)
                draft.replace(file)
                time.sleep(step_s)
                over = torch.tensor(int((folder / "end").exists()))
                dist.all_reduce(over, op=dist.ReduceOp.MIN)
                if over:
                    break
        dist.destroy_process_group()

    train.__annotations__["call_wrapper"] = inprocess.CallWrapper  # found by its type, not by its name
    inprocess.Wrapper(rank_assignment=assignment)(train)()


def torchft_rank(folder: Path, step_s: float) -> None:
    """One replica: one process."""
    import torchft  # pyright: ignore[reportMissingImports]

    replica = int(os.environ["REPLICA"])
    module = _module()
    inner = torch.optim.AdamW(module.parameters(), lr=1e-3)
    ballast = Ballast()
    ballast.initialise()  # before it is known whether there is another to learn from

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        ballast.load_state_dict(state["ballast"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {
            "model": module.state_dict(),
            "optimizer": inner.state_dict(),
            "ballast": ballast.state_dict(),
        },
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=10),
    )
    model = torchft.DistributedDataParallel(manager, module)
    optimizer = torchft.Optimizer(manager, inner)
    with (folder / f"steps-{replica}").open("a") as log:
        while not (folder / "end").exists():
            misbehave(folder, replica)
            optimizer.zero_grad()
            before = manager.current_step()
            model(torch.full((8, 256), float(before % 7))).square().mean().backward()
            optimizer.step()
            if manager.current_step() > before:  # committed
                epoch, world, step = manager._quorum_id, manager.num_participants(), manager.current_step()
                log.write(f"{os.getpid()} {epoch} {world} {step} {time.monotonic()}\n")
                log.flush()
            time.sleep(step_s)
    manager.shutdown(wait=False)


def main() -> int:
    """See the module."""
    what, folder, step_s = sys.argv[1:4]
    if what == "nvidia-resiliency-ext":
        return start_nvrx(folder, step_s)
    if what == "torchft":
        return start_torchft(folder, step_s)
    (nvrx_rank if what == "nvrx-rank" else torchft_rank)(Path(folder), float(step_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
