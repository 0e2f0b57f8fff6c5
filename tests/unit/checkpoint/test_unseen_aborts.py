"""Whether a step could be kept that an aborted collective has fed. On NCCL: tests/cuda/test_healthy_aborts.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from keepstep.checkpoint.unseen_aborts import HANDLING, why_unseen


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    yield
    dist.destroy_process_group()


class Group:
    """What is asked of a group of NCCL's that was called so often; this process has no shim. None: it tells nothing."""

    def __init__(self, calls: int | None) -> None:
        if calls is not None:
            backend = SimpleNamespace(name=lambda: "nccl", _get_sequence_number_for_group=lambda: calls)
            self._device_types, self._get_backend = [torch.device("cuda")], lambda _: backend


@pytest.mark.parametrize(
    ("handling", "groups", "told"),
    [
        (None, [Group(3)], False),
        ("3", [Group(3)], False),  # torch's watchdog aborts nothing
        ("1", [Group(3)], True),
        ("2", [Group(3)], True),
        ("2", [Group(0)], False),  # nothing was called that could be aborted
        ("2", [], False),
        ("2", [Group(None)], False),
        ("2", [Group(None), Group(1)], True),
    ],
)
def test_it_is_told_where_the_watchdog_aborts_and_nobody_sees_it(
    monkeypatch: pytest.MonkeyPatch, handling: str | None, groups: list[Group], told: bool
) -> None:
    if handling is None:
        monkeypatch.delenv(HANDLING, raising=False)
    else:
        monkeypatch.setenv(HANDLING, handling)
    known: dict[Any, Any] = distributed_c10d._pg_map
    for one in groups:
        monkeypatch.setitem(known, one, ("", None))
    assert (f": set {HANDLING}=3" in why_unseen()) == told
