from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest
from tests.unit.nccl import shim

from keepstep.ring import create


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> shim.Built:
    """The shim and what it is tried with; one of pytest-xdist's workers builds them for all."""
    if shim.COMPILER is None:
        pytest.skip("no C++ compiler (set CXX)")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return shim.build(tmp_path_factory.mktemp("nccl"))
    folder = tmp_path_factory.getbasetemp().parent / "nccl"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.fstat(lock.fileno()).st_size:  # another may have built since the file was opened
            shim.build(folder)
            lock.write("built")
    return shim.Built(folder)


@pytest.fixture
def rings() -> Iterator[list[int]]:
    """Four rings, as a launcher holds them for the workers of its node."""
    made = [create(1024) for _ in range(4)]
    yield made
    for ring in made:
        os.close(ring)
