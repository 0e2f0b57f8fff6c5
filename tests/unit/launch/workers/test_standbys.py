"""Standbys as the launcher keeps them, with a program in the place of the real one that needs no torch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.alone import alone
from tests.unit.launch.local_runs import ToldRun

from keepstep.launch.command.placement import WorkerPlan
from keepstep.launch.workers.processes import Child
from keepstep.launch.workers.standbys import TRIES, Standbys

SCRIPT = "import json, os, sys; json.dump([sys.argv, dict(os.environ)], open(os.environ['OUT'], 'w'))"


class Node:
    """What a launcher has around its standbys."""

    def __init__(self, folder: Path, count: int, nproc: int, imports: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.run = ToldRun(folder)
        self.said, self.processes = self.run.said, self.run.processes
        self.ended: list[Child] = []
        self.standbys = Standbys(self.run, count, {**os.environ, "KEEPSTEP_RING": "/nowhere"})
        script = folder / "script.py"
        script.write_text(SCRIPT)
        told = imports or {"modules": ["json"], "environment": {}}
        for local_rank in range(nproc):
            for path in self.standbys.environment(local_rank).values():
                Path(path).write_text(json.dumps(told))
        self.plans = [
            WorkerPlan(
                rank=4 + local_rank,
                local_rank=local_rank,
                command=(sys.executable, "-u", str(script), f"--rank={local_rank}"),
                environment={
                    "LOCAL_RANK": str(local_rank),
                    "MASTER_PORT": "1",
                    "OUT": str(folder / f"out-{local_rank}"),
                },
            )
            for local_rank in range(nproc)
        ]
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.processes.reap)

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    def take(self, local_rank: int, **environment: str) -> Child | None:
        whole = {**os.environ, **environment, **self.plans[local_rank].environment}
        child = self.standbys.take(local_rank, whole, (1, 2))
        if child:
            self.processes.become(child, "worker", self.ended.append)
        return child

    async def end(self) -> None:
        self.standbys.end()
        await self.until(lambda: not self.standbys.pids)
        self.processes.guard.close()


def test_a_warm_one_becomes_the_worker_and_none_is_given_twice(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, count=2, nproc=3)
        assert node.take(0) is None
        node.standbys.warm(node.plans)
        assert not node.standbys.are_warm
        await node.until(lambda: node.said)
        assert node.said == ["standbys are warm for ranks 4-5"]
        assert node.standbys.are_warm
        assert len(node.standbys.pids) == 2
        assert node.take(2) is None
        child = node.take(1, NEW="yes")
        assert child is not None
        assert node.take(1) is None
        await node.until(lambda: node.ended)
        assert (node.ended, child.status) == ([child], 0)
        argv, environ = json.loads((tmp_path / "out-1").read_text())
        assert argv == [str(tmp_path / "script.py"), "--rank=1"]
        assert (environ["LOCAL_RANK"], environ["NEW"], environ["MASTER_PORT"]) == ("1", "yes", "1")
        assert not {"KEEPSTEP_RING", "KEEPSTEP_STANDBY", "KEEPSTEP_IMPORTS"} & environ.keys()
        await node.end()

    alone(main)


def test_those_that_are_there_stay_and_those_given_away_are_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, count=2, nproc=2)
        node.standbys.warm(node.plans)
        await node.until(lambda: node.said)
        before = node.standbys.pids
        taken = node.take(0)
        assert taken is not None
        node.standbys.warm(node.plans)
        await node.until(lambda: len(node.said) == 2)
        assert len(before & node.standbys.pids) == 1
        assert taken.pid not in node.standbys.pids
        await node.end()

    alone(main)


def test_one_that_gets_no_cpu_time_is_given_its_part(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time\n"
        "group = pathlib.Path('/proc/self/autogroup')\n"
        "while os.sched_getscheduler(0) == os.SCHED_IDLE or group.exists() and '19' in group.read_text().split():\n"
        "    time.sleep(0.01)\n"
        f"pathlib.Path({str(tmp_path / 'went on')!r}).touch()\n"
    )

    async def main() -> None:
        node = Node(tmp_path, 1, 1, {"modules": ["waits"], "environment": {}})
        node.run.job = replace(node.run.job, standby_idle_s=0.5)
        node.standbys.warm(node.plans)
        await node.until(lambda: "standbys are warm for ranks 4" in node.said)
        assert (tmp_path / "went on").exists()
        await node.end()

    alone(main)


def test_what_no_worker_has_told_is_not_warmed(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, count=2, nproc=2)
        for path in (tmp_path / "imports").iterdir():
            path.unlink()
        node.standbys.warm(node.plans)
        assert not node.standbys.pids
        await node.end()

    alone(main)


def test_one_that_keeps_dying_is_said_once(tmp_path: Path) -> None:
    async def main() -> None:
        # An import that ends the process is not to be caught.
        (tmp_path / "deadly.py").write_text("import os\nos._exit(5)\n")
        node = Node(tmp_path, 1, 1, {"modules": ["deadly"], "environment": {}})
        node.standbys.warm(node.plans)
        await node.until(lambda: node.said)
        (said,) = node.said
        assert said.startswith("no standby for rank 4: ended with status 5")
        assert not node.standbys.pids
        assert node.take(0) is None
        await node.end()

    assert TRIES == 3
    alone(main)


def test_one_in_which_an_import_made_a_context_is_not_used(tmp_path: Path) -> None:
    async def main() -> None:
        cuda = "class cuda:\n    @staticmethod\n    def is_initialized(): return True\n"
        (tmp_path / "torch.py").write_text(cuda)
        node = Node(tmp_path, 1, 1, {"modules": ["torch"], "environment": {}})
        node.standbys.warm(node.plans)
        await node.until(lambda: node.said)
        (said,) = node.said
        assert said.startswith("no standby for rank 4: not fit: an import made a CUDA context")
        await node.end()

    alone(main)


@pytest.mark.parametrize("name", ["KEEPSTEP_SET_BEFORE_IMPORT"])
def test_what_the_script_set_before_its_imports_is_set_before_them_and_gone_after(
    tmp_path: Path, name: str
) -> None:
    async def main() -> None:
        (tmp_path / "reads.py").write_text(
            f"import os\nopen('{tmp_path}/read', 'w').write(os.environ['{name}'])\nos.environ['LEFT'] = 'here'\n"
        )
        node = Node(tmp_path, 1, 1, {"modules": ["reads"], "environment": {name: "8"}})
        node.standbys.warm(node.plans)
        await node.until(lambda: node.said)
        assert (tmp_path / "read").read_text() == "8"
        assert node.take(0)
        await node.until(lambda: node.ended)
        _, environ = json.loads((tmp_path / "out-0").read_text())
        assert name not in environ
        assert environ["LEFT"] == "here"
        await node.end()

    alone(main)


def test_a_spare_warms_standbys_by_what_another_node_told(tmp_path: Path) -> None:
    for name in ("there", "here"):
        (tmp_path / name).mkdir()

    async def main() -> None:
        there = Node(tmp_path / "there", count=2, nproc=2)
        there.standbys.warm(there.plans)
        imports = there.standbys.imports
        assert imports is not None
        assert imports == (["json"], {})
        await there.end()
        node = Node(tmp_path / "here", count=2, nproc=2)
        plans = [replace(plan, rank=-1) for plan in node.plans]
        node.standbys.folder = tmp_path / "spares"
        node.standbys.warm_for_spare(imports, plans)
        await node.until(lambda: node.said)
        assert node.said == ["standbys are warm for local ranks 0-1"]
        child = node.take(1, RANK="5")
        assert child is not None
        await node.until(lambda: node.ended)
        _, environ = json.loads((tmp_path / "here" / "out-1").read_text())
        assert environ["RANK"] == "5"
        await node.end()

    alone(main)


@pytest.mark.parametrize(
    ("read", "said_of"),
    [
        ("os.environ.get('RANK')", "RANK"),
        ("os.getenv('RANK')", "RANK"),
        ("'RANK' in os.environ", "RANK"),
        ("os.environ.copy().get('RANK')", "the whole environment"),
    ],
)
def test_a_standby_of_a_spare_whose_imports_ask_for_the_rank_is_not_used(
    tmp_path: Path, read: str, said_of: str
) -> None:
    (tmp_path / "asks.py").write_text(f"import os\nrank = {read}\n")

    async def main() -> None:
        node = Node(tmp_path, count=1, nproc=1)
        node.standbys.folder = tmp_path / "spares"
        node.standbys.warm_for_spare((["asks"], {}), [replace(plan, rank=-1) for plan in node.plans])
        await node.until(lambda: node.said)
        (said,) = node.said
        assert said.startswith(
            f"no standby for local rank 0: not fit: an import reads {said_of}, and a spare does not know its rank yet"
        )
        assert node.take(0) is None
        await node.end()

    alone(main)


def test_nothing_is_told_where_ranks_set_different_variables(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, count=2, nproc=2)
        node.standbys.warm(node.plans)
        path = tmp_path / "imports" / "1.json"
        path.write_text(json.dumps({"modules": ["json"], "environment": {"OMP_NUM_THREADS": "3"}}))
        assert node.standbys.imports is None
        await node.end()

    alone(main)
