"""What is here runs on the stand-in GPU, by ``make test-cuda`` alone: its environment is 2 GB."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    asked_for = "cuda" in (config.getoption("markexpr") or "")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if not asked_for:
                item.add_marker(
                    pytest.mark.skip(reason="make test-cuda runs it: it needs the CUDA build of torch")
                )
