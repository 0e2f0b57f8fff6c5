"""An installation without the compiled modules says what to do."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize("room", ["ring", "capture", "checkpoint"])
def test_a_missing_compiled_module_is_told_in_one_line(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"keepstep.{room}._native", None)
    monkeypatch.delitem(sys.modules, f"keepstep.{room}.native", raising=False)
    with pytest.raises(
        ImportError, match=rf"keepstep\.{room}\._native.*`pip install`.*C\+\+ compiler"
    ) as told:
        import_module(f"keepstep.{room}.native")
    assert "\n" not in str(told.value)
