"""``keepstep check`` on hosts of their own: one table at the host of the check, who is bad is named, exit 1 on all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e import testbed as beds
from tests.e2e.testbed import Host, Result, Testbed

from keepstep.faults import SlowLink

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture
def bed() -> Iterator[Testbed]:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    with beds.four_hosts(rate="200mbit") as made:
        yield made


def checking(folder: Path, nodes: int, *flags: str) -> Callable[[Host], list[str]]:
    common = [
        "--nnodes",
        str(nodes),
        "--rdzv-endpoint",
        "node-a:29500",
        "--secret-file",
        str(folder / "secret"),
    ]
    return lambda host: [sys.executable, "-m", "keepstep.cli", "check", *common, *flags]


def check(bed: Testbed, folder: Path, *flags: str) -> dict[str, Result]:
    env = {"KEEPSTEP_RUNS_DIR": str(folder)}
    return bed.run(checking(folder, len(bed.hosts), *flags), env=env, timeout_s=300)


def test_hosts_that_are_alike_are_fit(bed: Testbed, tmp_path: Path) -> None:
    done = check(bed, tmp_path, "--json", "--path", str(tmp_path))
    assert [one.returncode for one in done.values()] == [0] * 4, done
    found = json.loads(done["node-a"].stdout)
    assert sorted(row["node"] for row in found["nodes"]) == sorted(bed.hosts)
    assert all(len(row["links"]) == 2 for row in found["nodes"])
    assert all(row["paths"][0]["write"] > 0 for row in found["nodes"])
    assert [done[name].stdout for name in ("node-b", "node-c", "node-d")] == [""] * 3


def test_a_host_with_a_slow_interface_is_named_and_its_partners_are_not(bed: Testbed, tmp_path: Path) -> None:
    with bed.links.inject(SlowLink("node-c", None, "4mbit")):
        done = check(bed, tmp_path)
    assert [one.returncode for one in done.values()] == [1] * 4, done
    for one in done.values():
        told = [line for line in (one.stdout + one.stderr).splitlines() if "unfit: " in line]
        assert len(told) == 1, done
        assert "node node-c: at most " in told[0], told


def test_a_link_that_is_cut_is_told_and_neither_of_its_hosts_is_blamed(bed: Testbed, tmp_path: Path) -> None:
    bed.hosts.pop("node-d").shut_down()
    with bed.cut("node-b", "node-c"):
        done = check(bed, tmp_path)
    assert [one.returncode for one in done.values()] == [1] * 3, done
    told = [line for line in done["node-a"].stdout.splitlines() if line.startswith("unfit: ")]
    assert len(told) == 1
    assert "both reach other nodes" in told[0]
    assert {"node-b", "node-c"} <= set(told[0].replace(":", " ").split()), told
