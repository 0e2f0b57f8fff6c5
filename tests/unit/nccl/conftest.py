from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.unit.nccl import shim

from keepstep.ring import create


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> shim.Built:
    if shim.COMPILER is None:
        pytest.skip("no C++ compiler (set CXX)")
    return shim.build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def rings() -> Iterator[list[int]]:
    """Four rings, as a launcher holds them for the workers of its node."""
    made = [create(1024) for _ in range(4)]
    yield made
    for ring in made:
        os.close(ring)
