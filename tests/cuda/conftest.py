"""What is here runs on the stand-in GPU: with ``make test-cuda``, or where ``STAND_IN_VENV`` names its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    asked_for = "cuda" in (config.getoption("markexpr") or "") or "STAND_IN_VENV" in os.environ
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if not asked_for:
                item.add_marker(
                    pytest.mark.skip(reason="make test-cuda runs it: it needs the CUDA build of torch")
                )
