"""For all tests: what runs beside what, and on which worker of pytest-xdist.

No test is judged by how long it takes. Those marked ``quiet`` judge how fast a job runs, though: while one runs,
the other workers wait.
"""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("keepstep", deadline=None)
settings.load_profile("keepstep")

# Locks on files that are there anyway: nothing is left behind, and two runs in one clone keep apart, too.
_GATE = os.open(Path(__file__), os.O_RDONLY | os.O_CLOEXEC)
"""Held for the moment of coming in, and by a quiet test that waits: no other test gets ahead of it."""
_ROOM = os.open(Path(__file__).with_name("effort.py"), os.O_RDONLY | os.O_CLOEXEC)
"""Shared by tests that may run beside each other, exclusive to a quiet one."""
_ALONE = pytest.StashKey[bool]()
"""Whether this process holds the room for a quiet test that comes next."""


def is_quiet(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("quiet") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real jobs first, each by itself, then unit tests, a file at a time; quiet tests last and on one worker."""
    for item in items:
        if is_quiet(item):
            item.add_marker(pytest.mark.xdist_group("quiet"))
        elif "/unit/" in item.nodeid and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(
        key=lambda item: (is_quiet(item), item.get_closest_marker("e2e") is None, "/unit/" in item.nodeid)
    )


def pytest_collection_finish() -> None:
    """Spare each garbage collection the search through all tests and what they have imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Around a test with its fixtures; the waiting does not count against its timeout."""
    quiet = is_quiet(item)
    if not item.config.stash.get(_ALONE, False):
        fcntl.flock(_GATE, fcntl.LOCK_EX)
        fcntl.flock(_ROOM, fcntl.LOCK_EX if quiet else fcntl.LOCK_SH)
        fcntl.flock(_GATE, fcntl.LOCK_UN)
    try:
        return (yield)
    finally:
        # From one quiet test to the next the room stays locked: the others wait once.
        item.config.stash[_ALONE] = alone = quiet and is_quiet(nextitem)
        if not alone:
            fcntl.flock(_ROOM, fcntl.LOCK_UN)
