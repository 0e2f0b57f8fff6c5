"""A trace of the next steps: begun and ended at the end of a step, and never in the training's way."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.capture.test_hold import FakeRecorder

from keepstep.capture import step_trace
from keepstep.capture.hold import COUNT, ORDER, Hold
from keepstep.core.events import Phase
from keepstep.ring import orders
from keepstep.ring.orders import KNOCK, OrdersPage

PATIENCE_S = 60
STATES = 8


class Trainer:
    """A worker's steps, and its agent's side of the page."""

    def __init__(self, page: OrdersPage, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.recorder = FakeRecorder()
        self.hold = Hold(self.recorder)  # type: ignore[arg-type]
        self.hold.open()
        self.steps = 0
        self.weight = torch.ones(8, 8, requires_grad=True)

    def order(self, number: int, steps: int = 2, per_step: int = 1, for_s: float = 60.0) -> None:
        base = {"base_step": 100 + self.steps // per_step, "base_count": self.steps, "per_step": per_step}
        until_ns = time.monotonic_ns() + int(for_s * 1e9)
        self.page.trace.put(
            number, {"steps": steps, "until_ns": until_ns, "folder": str(self.folder), **base}
        )
        self.page.knock(True)

    def step(self, count: int = 1) -> None:
        """As the probe does it at the end of an optimizer step."""
        for _ in range(count):
            (self.weight @ self.weight).sum().backward()
            self.steps += 1
            words = self.hold.words
            words[COUNT] = self.steps
            if words[ORDER]:
                self.hold.look(self.steps)

    def told(self, number: int) -> dict[str, Any]:
        found = self.page.traced.newest()
        return found[1] if found is not None and found[0] // STATES == number else {}

    def until(self, number: int, state: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + PATIENCE_S
        while (told := self.told(number)).get("state") != state:
            assert time.monotonic() < deadline_s, told
            time.sleep(0.01)
        return told


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Trainer]:
    descriptor = orders.create()
    monkeypatch.setenv("KEEPSTEP_ORDERS", f"/proc/{os.getpid()}/fd/{descriptor}")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(step_trace, "_LEAST_FREE_BYTES", 0)
    page = OrdersPage(descriptor)
    yield Trainer(page, tmp_path / "traces")
    page.close()
    os.close(descriptor)


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_the_steps_that_were_ordered_are_in_the_file(trainer: Trainer) -> None:
    trainer.step(4)
    trainer.order(7, steps=3)
    trainer.step(1)  # it is begun where this ends
    assert trainer.told(7)["state"] == "tracing"
    trainer.page.knock(False)
    trainer.step(3)
    told = trainer.until(7, "written")
    path = trainer.folder / "rank-00003-step-106.json.gz"
    assert told["file"] == f"traces/{path.name}"
    assert (told["step"], told["nbytes"]) == (106, path.stat().st_size)
    assert path.stat().st_mode & 0o77 == 0
    names = [one.get("name") for one in events(path)]
    assert names.count("aten::mm") >= 3 * 3
    assert names.count("aten::mm") < 5 * 3
    assert os.listdir(trainer.folder) == [path.name]
    assert trainer.recorder.begun == [Phase.HOLD, Phase.HOLD]
    assert trainer.recorder.ended == 2
    assert type(trainer.hold.words) is memoryview
    trainer.step(1)
    assert not torch.autograd._profiler_enabled()


def test_another_one_may_follow(trainer: Trainer) -> None:
    for number in (1, 2):
        trainer.order(number, steps=1)
        trainer.step(2)
        trainer.until(number, "written")
        trainer.page.knock(False)
    assert len(os.listdir(trainer.folder)) == 2


def test_iterations_of_several_optimizer_steps_are_counted_as_one(trainer: Trainer) -> None:
    trainer.step(4)
    trainer.order(1, steps=2, per_step=2)
    trainer.step(1 + 3)
    assert trainer.told(1)["state"] == "tracing"
    trainer.step(1)
    trainer.until(1, "written")


def test_it_ends_by_itself_when_its_time_is_over_though_the_agent_has_gone(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.order(1, steps=50, for_s=600.0)
    trainer.step(1)
    trainer.page.knock(False)
    trainer.step(1)
    assert trainer.told(1)["state"] == "tracing"
    later_ns = time.monotonic_ns() + int(601e9)
    monkeypatch.setattr(step_trace, "time", SimpleNamespace(monotonic_ns=lambda: later_ns))
    trainer.step(1)
    trainer.until(1, "written")


def test_an_order_that_is_too_old_is_not_begun(trainer: Trainer) -> None:
    trainer.order(1, for_s=0.0)
    trainer.step(3)
    assert trainer.told(1) == {}
    assert not torch.autograd._profiler_enabled()


def test_a_script_with_a_profiler_at_work_keeps_it(trainer: Trainer) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        trainer.order(1)
        trainer.step(4)
    assert trainer.told(1) == {
        **trainer.told(1), "state": "failed", "why": "the script uses torch's profiler itself"
    }  # fmt: skip
    assert any(one.key == "aten::mm" for one in own.key_averages())


def test_so_does_one_between_two_cycles(trainer: Trainer) -> None:
    own = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=3, warmup=1, active=1),
    )
    own.start()
    trainer.order(1)
    for _ in range(3):
        trainer.step()
        own.step()
    assert trainer.told(1)["why"] == "the script uses torch's profiler itself"
    own.stop()


def test_a_script_that_begins_one_meanwhile_gets_it(trainer: Trainer) -> None:
    before = step_trace.autograd_profiler._enable_profiler
    trainer.order(1, steps=10)
    trainer.step(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        trainer.step(2)
    assert trainer.told(1)["state"] == "failed"
    assert "has begun to meanwhile" in trainer.told(1)["why"]
    assert any(one.key == "aten::mm" for one in own.key_averages())
    assert step_trace.autograd_profiler._enable_profiler is before
    assert not trainer.recorder.stumbles


@pytest.mark.parametrize("where", ["start", "stop"])
def test_a_profiler_that_fails_does_not_reach_the_training(
    where: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no CUPTI\nhere")

    monkeypatch.setattr(torch.profiler.profile, where, fail)
    trainer.order(1)
    trainer.step(4)
    assert trainer.told(1)["why"] == "the profiler failed: RuntimeError: no CUPTI"
    assert not trainer.recorder.stumbles
    monkeypatch.undo()
    if torch.autograd._profiler_enabled():
        torch.autograd._disable_profiler()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder, patch: folder.write_text("no folder"), "the profiler failed: FileExistsError"),
        (lambda folder, patch: patch.setattr(step_trace, "MOST_BYTES", 10), "the file is larger than 0 MiB"),
        (
            lambda folder, patch: patch.setattr(step_trace, "_LEAST_FREE_BYTES", 1 << 62),
            "are free there, a trace takes up to 1 GiB",
        ),
        (
            lambda folder, patch: patch.setattr(step_trace, "_pack", lambda *_: 1 / 0),
            "the file cannot be written: ZeroDivisionError",
        ),
        (lambda folder, patch: patch.setattr(step_trace, "_is_whole", lambda *_: False), "is the disk full?"),
    ],
)
def test_a_file_that_cannot_be_is_told(
    spoil: Callable[[Path, pytest.MonkeyPatch], Any],
    why: str,
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(trainer.folder, monkeypatch)
    trainer.order(1, steps=1)
    trainer.step(3)
    assert why in trainer.until(1, "failed")["why"]
    assert trainer.folder.is_file() or not os.listdir(trainer.folder)


def test_a_page_of_another_incarnation_ends_it(trainer: Trainer) -> None:
    trainer.order(1, steps=10)
    trainer.step(2)
    trainer.hold.renew()
    assert trainer.told(1)["why"] == "the job began again meanwhile"
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("body", [{}, {"steps": 1, "more": 2}])
def test_what_is_no_order_is_ignored(body: dict[str, Any], trainer: Trainer) -> None:
    trainer.page.trace.put(1, body)
    trainer.page.knock(True)
    trainer.step(2)
    assert trainer.told(1) == {}
    assert not torch.autograd._profiler_enabled()


def test_a_hold_beside_it_is_obeyed(trainer: Trainer) -> None:
    trainer.order(1, steps=10)
    assert trainer.page.words[ORDER] == KNOCK
    assert not trainer.page.leased(time.monotonic_ns())
    trainer.page.order(5, 1000, time.monotonic_ns() + int(5e9))
    trainer.step(2)
    assert trainer.told(1)["state"] == "tracing"
    assert trainer.page.state(5) is orders.State.COMING
    trainer.page.knock(False)
    assert trainer.page.words[ORDER] == 5
    trainer.page.release()
    trainer.hold.renew()


def test_a_step_without_an_order_looks_at_no_more_than_before(trainer: Trainer) -> None:
    """The probe reads one word and writes one; nothing of the trace is looked at."""
    calls: list[int] = []
    trainer.hold.look = calls.append  # type: ignore[method-assign]
    trainer.step(5)
    assert calls == []
