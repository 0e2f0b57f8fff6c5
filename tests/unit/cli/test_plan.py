"""`keepstep plan`: FlashRecovery's model reckoned by hand, and what it refuses."""

from __future__ import annotations

import json

import pytest

from keepstep.cli import main

HAND = ["--failures-per-day", "10", "--step-time", "2", "--detection", "600", "--restart", "200"]
HAND += ["--checkpoint-time", "30", "--interval", "1000", "--recovery", "5", "--overhead", "0.01"]


def plan(*words: str) -> int:
    return main(["plan", *words])


def test_a_day_reckoned_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*HAND, "--devices", "100", "--json") == 0
    terms = json.loads(capsys.readouterr().out)
    without, kept = terms["without"], terms["with"]
    assert without == {
        "recovery_s": 800,
        "redone_s": 500,
        "saving_s": 86.4 * 30,
        "lost_s": 13_000 + 86.4 * 30,
    }
    assert kept["redone_s"] == 2
    assert kept["lost_s"] == pytest.approx(10 * (5 + 2) + 864)
    assert terms["saved_device_hours"] == pytest.approx((without["lost_s"] - kept["lost_s"]) * 100 / 3600)


def test_rate_and_restart_follow_the_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--devices", "5000", "--device-mtbf", "24000", "--step-time", "10", "--json") == 0
    terms = json.loads(capsys.readouterr().out)
    assert terms["failures_per_day"] == pytest.approx(5)
    assert terms["without"]["recovery_s"] == pytest.approx(600 + 1000)
    assert terms["interval_s"] == pytest.approx(
        (2 * 86_400 * 30 / 5) ** 0.5, abs=10
    )  # a whole number of steps


def test_no_more_than_the_day_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--devices", "1000000", "--step-time", "10") == 0
    assert "100.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--step-time", "2", "--interval", "1"], "--interval 1"),
        (["--step-time", "2", "--devices", "0"], "--devices 0"),
        (["--step-time", "2", "--device-mtbf", "0"], "--device-mtbf 0"),
        (["--step-time", "2", "--failures-per-day", "0"], "failures is 0"),
        (["--step-time", "2", "--recovery", "nan"], "recovery s is nan"),
        ([], "no step time"),
    ],
)
def test_what_cannot_be_reckoned(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*words) == 2
    assert reason in capsys.readouterr().err
