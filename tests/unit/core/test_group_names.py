"""Groups are shown by the names that they had in the first incarnation."""

from __future__ import annotations

import pytest

from keepstep.core.group_names import shown_name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("0", "0"),
        ("17", "17"),
        ("1000000", "0"),
        ("3000017", "17"),
        ("12000003#2", "3#2"),
        ("2000001 (default_pg)", "1 (default_pg)"),
        ("999999", "999999"),
        ("a94a8fe5ccb19ba61c4c0873d391e987982fbbd3", "a94a8fe5ccb19ba61c4c0873d391e987982fbbd3"),
        ("default_pg", "default_pg"),
        ("?3", "?3"),
        ("", ""),
        ("1" * 19, "1" * 19),
    ],
)
def test_the_million_of_an_incarnation_is_left_out(name: str, shown: str) -> None:
    assert shown_name(name) == shown
