"""Which findings the open cases explain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from keepstep.control.incidents.open_cases import OpenCases


def opened(*, ending: bool = False, crashed_in: int | None = None) -> OpenCases:
    plain: Any = SimpleNamespace
    crash = None if crashed_in is None else plain(incarnation=crashed_in, closed=False)
    return OpenCases(plain(under_way=ending), plain(under_way=False), crash=crash)


def test_a_crash_ends_its_incarnation_and_none_that_comes_after_it() -> None:
    assert not opened().ends(0)
    assert [opened(crashed_in=1).ends(incarnation) for incarnation in (0, 1, 2)] == [True, True, False]
    assert opened(crashed_in=-1).ends(2)  # it is not known in which it was
    assert opened(ending=True, crashed_in=1).ends(2)
