"""The upper bits of a record's flags."""

from __future__ import annotations

import pytest

from keepstep.core.events import (
    ELEMENTS,
    REDUCTIONS,
    Flag,
    element_bits,
    element_of,
    item_bytes,
    reduction_bits,
    reduction_of,
)


def test_element_type_and_reduction_come_back_from_flags() -> None:
    for element in ("", *ELEMENTS):
        for reduction in ("", *REDUCTIONS):
            flags = element_bits(element) | reduction_bits(reduction) | int(Flag.ASYNC | Flag.ON_DEVICE)
            assert 0 <= flags <= 0xFFFF
            assert (element_of(flags), reduction_of(flags)) == (element, reduction)


def test_rings_of_older_and_newer_versions_read_as_not_known() -> None:
    assert (element_of(0xFF), reduction_of(0xFF)) == ("", "")
    assert element_of(31 << 8) == ""


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "float"])
def test_a_type_without_a_number_is_not_known(name: str) -> None:
    assert element_bits(name) == reduction_bits(name) == 0


def test_sizes_of_elements() -> None:
    sizes = {name: item_bytes(name) for name in ("bool", "bfloat16", "float8_e5m2", "complex64", "quint8")}
    assert list(sizes.values()) == [1, 2, 1, 8, 1]


def test_numbers_are_never_given_anew() -> None:
    assert (ELEMENTS[6], ELEMENTS[12], ELEMENTS[23]) == ("float32", "bfloat16", "qint32")
    assert REDUCTIONS == ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BITWISE", "PREMUL_SUM")
