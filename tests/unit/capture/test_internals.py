"""What differs from one version of torch to another."""

from __future__ import annotations

import ctypes
import sys

import pytest

from keepstep.capture.internals import COMPILING, with_own_reference

_CALLS = 100


def test_a_result_that_is_only_lent_keeps_its_references() -> None:
    one = object()
    held = [one] * (3 * _CALLS)  # enough to lose some
    lend = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_ssize_t)(
        ("PyList_GetItem", ctypes.pythonapi)
    )
    owned = with_own_reference(lambda: lend(held, 0))
    before = sys.getrefcount(one)
    for _ in range(_CALLS):
        assert owned() is one
    assert sys.getrefcount(one) == before


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="None is not counted any more")
def test_asking_for_the_compiler_costs_none_no_reference() -> None:
    before = sys.getrefcount(None)
    for _ in range(_CALLS):
        COMPILING()
    assert abs(sys.getrefcount(None) - before) < _CALLS // 2  # other threads count, too
