"""What workers find their ring, orders and link table by, and which NCCL profiler plugin they are told of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.launch.command.placement import LINKS, OURS, RING, Place
from keepstep.launch.workers.rings import Rings
from keepstep.ring import link_table
from keepstep.ring.link_reader import LinkReader

PLACE = Place(node_rank=0, first_rank=4, world_size=8, node_count=2, master_addr="a", master_port=1)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of native modules with a plugin in it, and a home without settings of NCCL's."""
    from keepstep.ring import _native  # pyright: ignore[reportMissingModuleSource]

    library = tmp_path / "libkeepstep_nccl_profiler.so"
    library.write_bytes(b"")
    monkeypatch.setattr(_native.__spec__, "origin", str(tmp_path / "_native.so"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return library


def test_each_worker_has_a_link_table_of_its_own(built: Path) -> None:
    rings = Rings()
    rings.make(PLACE, 2, 64)
    try:
        environment = rings.environment(PLACE, Path("/run"), {})
        assert set(environment) == {0, 1}
        assert {LINKS, RING} <= OURS
        paths = {worker[LINKS] for worker in environment.values()}
        assert paths == set(rings.pages["links"].values())
        for path in paths:
            assert LinkReader(path).snapshot().pid == 0
        assert [worker[link_table.PLUGIN] for worker in environment.values()] == [str(built)] * 2
    finally:
        rings.close()
    assert not any(os.path.exists(path) and "keepstep-links" in os.readlink(path) for path in paths)


@pytest.mark.parametrize("chosen", ["none", "", "/opt/libother.so"])
def test_a_plugin_that_the_user_chose_is_left(built: Path, chosen: str) -> None:
    assert link_table.plugin({}) == built
    assert link_table.plugin({link_table.PLUGIN: chosen}) is None


def test_a_plugin_that_the_user_chose_in_a_file_is_left(built: Path, tmp_path: Path) -> None:
    settings = tmp_path / ".nccl.conf"
    settings.write_text("# NCCL_PROFILER_PLUGIN=x\nNCCL_DEBUG=WARN\n")
    assert link_table.plugin({}) == built
    settings.write_bytes(b"NCCL_DEBUG=WARN\xff\nNCCL_PROFILER_PLUGIN = inspector\n")
    assert link_table.plugin({}) is None
    assert link_table.plugin({"NCCL_CONF_FILE": str(tmp_path / "other")}) == built


def test_a_plugin_that_was_not_built_is_not_named(built: Path) -> None:
    built.unlink()
    assert link_table.plugin({}) is None
