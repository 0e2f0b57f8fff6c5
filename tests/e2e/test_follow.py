"""A job on two hosts is followed from a third one, also when its controller dies, and then the controller's host."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import testbed as beds
from tests.e2e.test_backups import read
from tests.e2e.test_election import controllers, start
from tests.e2e.test_reforming import PATIENCE_S, until
from tests.e2e.testbed import HOURS

from keepstep.view.node_links import read_paths

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(900)]


@pytest.mark.long
def test_a_job_is_followed_wherever_its_controller_is(tmp_path: Path) -> None:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    with beds.four_hosts((0, 5 * HOURS, 11 * HOURS)) as bed:
        running = start(bed, tmp_path)
        command = [sys.executable, "-m", "tests.e2e.follow_viewer", str(tmp_path / "run"), str(tmp_path)]
        viewer = bed.hosts["node-c"].start(command, {"OMP_NUM_THREADS": "1"})

        def seen() -> dict[str, Any]:
            return read(tmp_path / "seen.json")

        def kept(name: str) -> list[int]:
            return [node[name] for node in seen().get("status", {}).get("nodes", ())]

        until(lambda: min(kept("sealed_step"), default=-1) >= 7 and min(kept("backed_up_step")) >= 6)
        assert (seen()["ranks"], seen()["nodes"], seen()["steps"]) == ([0, 1], [0, 1], [7, 7])
        assert seen()["status"]["spares"] == ["node-c"]
        links = "nodes/*/links.json"
        until(lambda: len(list((tmp_path / "run").glob(links))) == 2)
        first = controllers(bed.hosts["node-a"])
        os.kill(first[0], signal.SIGKILL)
        before_s = seen()["status"]["unix_s"]
        until(lambda: seen()["status"]["unix_s"] > before_s + 1 and seen()["ranks"] == [0, 1])
        bed.hosts["node-a"].shut_down()
        until((tmp_path / "start-0-1").exists)
        until(lambda: seen()["status"]["incarnation"] == 1 and seen()["incidents"])
        (tmp_path / "go").touch()
        (tmp_path / "stop").touch()
        ended = {name: one for name, one in running.items() if name != "node-a"}
        results = beds.collect({**ended, "viewer": viewer}, PATIENCE_S)  # type: ignore[dict-item]
    assert [one.returncode for one in results.values()] == [0, 0, 0], results
    # They stay for a run that has ended.
    assert all(read_paths(path) for path in (tmp_path / "run").glob(links))
