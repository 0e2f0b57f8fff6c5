"""What goes over the wire of what workers import."""

from __future__ import annotations

import pytest

from keepstep import wire
from keepstep.launch.controller.told_imports import for_spares


def test_modules_and_variables_are_told() -> None:
    told = for_spares(["json", "x" * 101], {"TOKENIZERS_PARALLELISM": "false"})
    assert told == wire.Imports(("json",), (("TOKENIZERS_PARALLELISM", "false"),))


@pytest.mark.parametrize(
    ("name", "value"),
    [("WANDB_API_KEY", "0123456789abcdef"), ("HF_TOKEN", "hf_0123456789abcdefgh"), ("LONG", "x" * 501)],
)
def test_nothing_is_told_of_a_script_that_sets_a_secret_or_more_than_fits(name: str, value: str) -> None:
    assert for_spares(["json"], {name: value}) is None
