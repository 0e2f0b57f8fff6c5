"""What goes over the wire of what workers import."""

from __future__ import annotations

import pytest

from keepstep import wire
from keepstep.launch.controller.told_imports import for_spares


def test_modules_and_variables_are_told() -> None:
    told = for_spares(["json", "x" * 101], {"TOKENIZERS_PARALLELISM": "false"})
    assert told == wire.Imports(("json",), (("TOKENIZERS_PARALLELISM", "false"),))


BY_RANK = [("MY_RANK", "0"), ("CUDA_VISIBLE_DEVICES", "0")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_API_KEY", "0123456789abcdef"),
        ("HF_TOKEN", "hf_0123456789abcdefgh"),
        ("OMP_LONG", "x" * 501),
        *BY_RANK,
    ],
)
def test_nothing_is_told_where_a_script_sets_what_may_not_be_told(name: str, value: str) -> None:
    assert for_spares(["json"], {name: value}) is None
