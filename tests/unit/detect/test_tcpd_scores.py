"""The bench's scores against hand cases; they decide what the detector is said to be worth."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tcpd() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "changepoint" / "tcpd.py"
    spec = importlib.util.spec_from_file_location("_tcpd_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_perfect_and_empty(tcpd: ModuleType) -> None:
    assert tcpd.f1([[50], [50]], [50]) == 1.0
    assert tcpd.f1([[], []], []) == 1.0
    assert tcpd.cover([[50]], [50], 100) == 1.0
    assert tcpd.cover([[]], [], 100) == 1.0


def test_the_margin_counts_both_ways(tcpd: ModuleType) -> None:
    assert tcpd.f1([[50]], [55]) == 1.0
    assert tcpd.f1([[50]], [45]) == 1.0
    # The change point at 0 is matched: precision and recall are one half.
    assert tcpd.f1([[50]], [56]) == pytest.approx(0.5)


def test_one_report_matches_one_mark(tcpd: ModuleType) -> None:
    # Precision 2/3 (0 and one of the reports), recall 2/2.
    assert tcpd.f1([[50]], [49, 51]) == pytest.approx(0.8)


def test_precision_is_of_all_annotators_recall_of_each(tcpd: ModuleType) -> None:
    # Precision 2/2; recalls 2/2, 1/2, 1/1.
    recall = (1 + 0.5 + 1) / 3
    assert tcpd.f1([[50], [80], []], [50]) == pytest.approx(2 * recall / (1 + recall))


def test_cover_of_one_segment_is_its_best_overlap(tcpd: ModuleType) -> None:
    assert tcpd.cover([[50]], [], 100) == pytest.approx(0.5)
    assert tcpd.cover([[]], [25], 100) == pytest.approx(0.75)
    # [0, 50) against [0, 40): 0.8; [50, 100) against [40, 100): 50 / 60.
    assert tcpd.cover([[50]], [40], 100) == pytest.approx(0.5 * 0.8 + 0.5 * 50 / 60)
