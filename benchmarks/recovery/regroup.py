"""The default group after a death, until all have reduced in it: made anew, or reconfigured in place by torch.

    python -m benchmarks.recovery.regroup [--backend gloo|nccl2] [--ranks 4] [--rounds 6] [--json FILE]

In each round one of the ranks above 0 is killed. The others let go of the group, or keep it, and come to the next one;
a process that has imported torch takes the dead one's place and comes last, as in a job: some milliseconds after the
others. Time is from its coming. Each way has jobs of its own, in turns. The store is made by rank 0 (as in a job; it
looks every 10 ms whether all have come), or by rank 0 without waiting for the others, or it stays, in another process.
nccl2 runs on the stand-in GPU (``make cuda``). For Gloo, run this with a torch that can reconfigure (2.14).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks.recovery.peers import free_port

WAYS = {
    "anew": "made anew",
    "unwaited": "made anew, whose store waits for nobody",
    "kept": "made anew on a store that stays",
    "reconfigured": "reconfigured on a store that stays",
}
_COMES_LATER_S = 0.03
_REST_S = 0.2
_PATIENCE = timedelta(seconds=60)
_JOBS = 2  # of each way


class Rank:
    """One process of a group; told what to do by lines."""

    def __init__(self, backend: str) -> None:
        self.backend, self.on_gpu = backend, backend != "gloo"
        self.store: Any = None

    def come(self, way: str, rank: int, size: int, port: int, number: int) -> None:
        """To the group of this number: make it, and reduce in it."""
        import torch
        import torch.distributed as dist

        from keepstep.worker import group_setup

        if self.on_gpu:
            torch.cuda.set_device(rank)
        if way == "anew":
            environment = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in environment.items()})
            group_setup.set_names(number)
            dist.init_process_group(self.backend, timeout=_PATIENCE)
        else:
            is_new = self.store is None or way == "unwaited"
            if is_new:
                is_master = way == "unwaited" and rank == 0
                if rank > 0:
                    group_setup.wait_for_listener(port)
                self.store = dist.TCPStore("127.0.0.1", port, None, is_master, wait_for_workers=False)
            make: Any = dist.init_process_group
            given: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": _PATIENCE}
            if way != "reconfigured":
                group_setup.set_names(number)
                assert self.store is not None
                make(self.backend, store=dist.PrefixStore(str(number), self.store), **given)
            else:
                if is_new:
                    make(self.backend, store=self.store, enable_reconfigure=True, **given)
                self._reconfigure(rank, size, number)
        one = torch.ones(1).to("cuda" if self.on_gpu else "cpu")  # the stand-in copies, and does not fill
        dist.all_reduce(one)
        assert int(one.item()) == size

    def _reconfigure(self, rank: int, size: int, number: int) -> None:
        from torch.distributed import distributed_c10d

        from keepstep.worker import group_connections

        c10d: Any = distributed_c10d  # types are checked against an older torch
        self.store.set(f"handle-{number}-{rank}", c10d._get_reconfigure_handle())
        handles = self.store.multi_get([f"handle-{number}-{other}" for other in range(size)])
        with group_connections.OURS.making():  # as when torch makes a group
            c10d._reconfigure(number, [one.decode() for one in handles], timeout=_PATIENCE).wait()

    def leave(self, way: str) -> None:
        """Let go of what is over, after a death."""
        import torch.distributed as dist

        from keepstep.worker import group_connections

        if self.on_gpu:
            group: Any = dist.group.WORLD
            group.abort()
        else:
            group_connections.OURS.shut()
        if way != "reconfigured":
            dist.destroy_process_group()

    def obey(self) -> None:
        """Do as told, and say when it began and ended."""
        from keepstep.worker import group_connections, group_setup

        group_setup.install()
        group_connections.install()
        print("ready", flush=True)
        for line in sys.stdin:
            word, arguments = json.loads(line)
            began_s = time.monotonic()
            getattr(self, word)(*arguments)
            print(json.dumps([began_s, time.monotonic()]), flush=True)


class Job:
    """The ranks of one way."""

    def __init__(self, backend: str, way: str, ranks: int, environment: dict[str, str], python: str) -> None:
        import torch.distributed as dist

        self._words = [python, "-m", "benchmarks.recovery.regroup", "--rank-of", backend]
        self._way, self._environment, self._number = way, environment, 1
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._ranks = [self._start() for _ in range(ranks)]
        for one in self._ranks:
            one.stdout.readline()
        self._come(None)

    def _start(self) -> Any:
        pipe = subprocess.PIPE
        return subprocess.Popen(self._words, stdin=pipe, stdout=pipe, text=True, env=self._environment)

    def death(self) -> tuple[float, float]:
        """Milliseconds until a death's survivors have let go, and from the successor's coming until all reduced."""
        victim = 1 + self._number % (len(self._ranks) - 1)
        successor = self._start()
        successor.stdout.readline()
        self._ranks[victim].kill()
        self._ranks[victim].wait()
        self._ranks[victim] = successor
        survivors = [one for one in self._ranks if one is not successor]
        time.sleep(_REST_S)
        for one in survivors:
            self._tell(one, "leave", self._way)
        left_s = max(ended - began for began, ended in map(self._hear, survivors))
        time.sleep(_REST_S)
        self._number += 1
        return left_s * 1e3, self._come(victim) * 1e3

    def _come(self, last: int | None) -> float:
        port = self._store.port if self._way in ("kept", "reconfigured") else free_port()
        for rank in sorted(range(len(self._ranks)), key=lambda one: one == last):
            if rank == last:
                time.sleep(_COMES_LATER_S)
            self._tell(self._ranks[rank], "come", self._way, rank, len(self._ranks), port, self._number)
        times = [self._hear(one) for one in self._ranks]
        return max(ended for _, ended in times) - times[last or 0][0]

    @staticmethod
    def _tell(one: Any, word: str, *arguments: object) -> None:
        one.stdin.write(json.dumps([word, arguments]) + "\n")
        one.stdin.flush()

    @staticmethod
    def _hear(one: Any) -> list[float]:
        return json.loads(one.stdout.readline())

    def end(self) -> None:
        for one in self._ranks:
            one.kill()
            one.wait()


def main() -> int:
    if sys.argv[1:2] == ["--rank-of"]:
        Rank(sys.argv[2]).obey()
        return 0
    parser = bench_arguments("recovery.regroup", (__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=("gloo", "nccl2"), default="gloo")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6, help="deaths of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    report = Report("recovery-regroup", quick=given.quick)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in given.ways}
    with tempfile.TemporaryDirectory() as folder:
        python, environment = sys.executable, {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
        if given.backend != "gloo":
            from benchmarks.stand_in import launch

            python = str(launch.PYTHON)
            environment |= launch.environment(Path(folder), values=True)
            environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1"
        for _ in range(1 if given.quick else _JOBS):
            for way, found in times.items():
                job = Job(given.backend, way, given.ranks, environment, python)
                try:
                    found += [
                        job.death() for _ in range(given.rounds if given.quick else given.rounds // _JOBS)
                    ]
                finally:
                    job.end()
                print(f"{way}: " + ", ".join(f"{ms:.1f}" for _, ms in found), file=sys.stderr, flush=True)
    for way, found in times.items():
        left, came = zip(*found, strict=True)
        spread = f"median of {len(came)} ({min(came):.1f} to {max(came):.1f} ms)"
        report.add(
            Line(
                f"from the successor's coming until all have reduced, {given.backend}, {given.ranks} ranks, "
                f"{WAYS[way]}, {spread}",
                round(statistics.median(came), 1),
                "ms",
                limit=f"letting go before it: {statistics.median(left):.1f} ms",
            )
        )
    report.finish(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
