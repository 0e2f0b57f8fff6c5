"""Real processes that map what is named like torch's library and our part, or only one of them."""

from __future__ import annotations

import os
import sys

from tests.unit.agent.sensors.conftest import Start

from keepstep.agent.sensors.unwatched import UnwatchedSensor, why_unwatched

TORCH, OURS = "site/torch/lib/libtorch_python.so", "site/keepstep/ring/_native.cpython-311.so"
GIVEN = {"KEEPSTEP_RUN_DIR": "/tmp/run"}
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_who_is_not_watched(start: Start) -> None:
    assert why_unwatched(start()) == ("", 0.0)
    assert why_unwatched(start(OURS, TORCH, **OFF)) == ("", 0.0)  # keepstep was imported by hand
    reason, soon_s = why_unwatched(start(TORCH, **OFF))
    assert reason.startswith("not watched: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading")
    reason, late_s = why_unwatched(start(TORCH, **GIVEN))
    assert reason.startswith(
        "not watched: torch has not loaded keepstep's part: install keepstep for the Python of the script"
    )
    assert f"{os.path.realpath(sys.executable)}, torch in " in reason
    assert soon_s < late_s
    assert why_unwatched(start(TORCH)) == (
        "not watched: the script was started without keepstep's variables (KEEPSTEP_...): keep them in what starts it, "
        "as sudo and env -i do not",
        soon_s,
    )
    assert why_unwatched(start(TORCH, shell=True, **OFF)) == (why_unwatched(start(TORCH, **OFF))[0], late_s)


def test_it_is_believed_once_it_has_lasted_and_forgotten_when_the_ring_is_claimed(start: Start) -> None:
    sensor, workers = (
        UnwatchedSensor(),
        {0: start(TORCH, **OFF), 1: start(TORCH, **GIVEN), 2: start(OURS, TORCH)},
    )
    seen: list[list[int]] = []
    for second in range(100):
        sensor.look(second, workers)
        seen.append(sorted(sensor.reasons))
    assert seen[0] == []
    assert seen[10] == [0]
    assert seen[50] == [0]
    assert seen[-1] == [0, 1]
    sensor.look(200, {1: workers[1]})
    assert sorted(sensor.reasons) == [1]
