"""The parts of the probe that need no process group."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import AllreduceOptions, ReduceOp

from keepstep.capture import death
from keepstep.capture.evaluation import Evaluation
from keepstep.capture.methods import METHODS
from keepstep.capture.patches import Patches
from keepstep.capture.recorder import Recorder
from keepstep.capture.sites import finder, library_of
from keepstep.capture.works import RecordedWork
from keepstep.core.errors import RingError
from keepstep.core.events import Kind, Op, Phase, element_of, reduction_of


def reducing(op: ReduceOp.RedOpType) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(op)
    return options


SUM, MAX, BITWISE = (reducing(op) for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BXOR))


class FakeOperation:
    seq = 1

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.ended = log, name, False

    def __call__(self, *_: object) -> None:
        if not self.ended:
            self.log.append(f"end {self.name}")
        self.ended = True

    def waiting(self, *_: object) -> None:
        self.log.append(f"wait {self.name}")

    def fail(self, *_: object) -> None:
        if not self.ended:
            self.log.append(f"fail {self.name}")
        self.ended = True


class FakeWriter:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.texts: list[str] = [""]

    def start(
        self, kind: int, op: int, group: int, peer: int, nbytes: int, flags: int, site: int
    ) -> FakeOperation:
        name = Phase(op).name if kind == Kind.PHASE else Op(op).name
        self.log.append(f"start {name}")
        return FakeOperation(self.log, name)

    def group(self, name: str, members: Sequence[int], backend: str, desc: str) -> int:
        return 0

    def site(self, text: str) -> int:
        self.texts.append(text)
        return len(self.texts) - 1

    def begins_at(self, step: int) -> None:
        self.log.append(f"begins at {step}")

    def close(self) -> None:
        self.log.append("close")


def recorder_of(writer: Any) -> Recorder:  # Any: a stand-in for the native writer
    return Recorder(lambda: writer)


def claimed() -> tuple[Recorder, FakeWriter]:
    writer = FakeWriter()
    recorder = recorder_of(writer)
    assert recorder.claim()
    return recorder, writer


def test_nothing_is_recorded_before_the_claim_nor_after_the_end() -> None:
    writer = FakeWriter()
    recorder = recorder_of(writer)
    assert recorder.phase(Phase.DATA) is None
    assert recorder.claim()
    assert recorder.claim()
    assert recorder.phase(Phase.DATA) is not None
    recorder.pause(True)
    assert recorder.phase(Phase.DATA) is None
    recorder.pause(False)
    assert recorder.phase(Phase.DATA) is not None
    recorder.stop()
    assert recorder.phase(Phase.DATA) is None
    assert not recorder.claim()


def test_a_ring_that_cannot_be_claimed_is_tried_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[int] = []

    def refuse() -> Any:
        tried.append(1)
        raise RingError("ring /x: claimed by process 7, which still runs")

    gone: list[int] = []
    recorder = Recorder(refuse)
    recorder.on_give_up = lambda: gone.append(1)
    assert not recorder.claim()
    assert not recorder.claim()
    assert (tried, gone) == ([1], [1])
    said = capsys.readouterr().err
    assert said.count("keepstep: this process trains unwatched") == 1
    assert "claimed by process 7" in said


def test_what_cannot_be_recorded_is_noted_but_not_without_bound() -> None:
    recorder, writer = claimed()
    for number in range(1000):
        recorder.stumbled(ValueError(f"odd {number}"))
    assert recorder.stumbles == 1000
    assert 1 < len(writer.texts) < 50


def test_patches_go_in_and_out_and_leave_later_ones_alone() -> None:
    module: Any = types.SimpleNamespace(__name__="module", f=lambda: "torch")
    patches = Patches()
    patches.replace(module, "f", lambda original: lambda: f"ours({original()})")
    patches.replace(module, "absent", lambda original: original)
    assert patches.missing == ["module.absent"]
    assert module.f() == "ours(torch)"
    patches.take_out()
    assert module.f() == "torch"
    patches.put_in()
    assert module.f() == "ours(torch)"
    ours = module.f
    module.f = lambda: f"theirs({ours()})"
    patches.take_out()
    assert module.f() == "theirs(ours(torch))"


class FakeWork:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.waited: list[Any] = []

    def wait(self, *args: Any) -> bool:
        self.waited.append(args)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> str:
        return "result"


def recorded(native: Any, operation: Any) -> RecordedWork:  # Any: stand-ins
    return RecordedWork(native, operation)


def test_a_work_is_stamped_when_it_is_waited_for() -> None:
    log: list[str] = []
    native = FakeWork()
    work = recorded(native, FakeOperation(log, "op"))
    assert isinstance(work, torch.distributed.Work)
    assert work.wait(3) is True
    assert native.waited == [(3,)]
    assert work.result() == "result"
    assert log == ["wait op", "end op"]


def test_a_failed_wait_raises_the_same_error() -> None:
    log: list[str] = []
    work = recorded(FakeWork(RuntimeError("peer")), FakeOperation(log, "op"))
    with pytest.raises(RuntimeError, match="peer"):
        work.wait()
    del work
    assert log == ["wait op", "fail op"]


def test_a_work_nobody_waits_for_ends_when_it_is_dropped_or_seen_complete() -> None:
    log: list[str] = []
    recorded(FakeWork(), FakeOperation(log, "dropped"))
    seen = recorded(FakeWork(), FakeOperation(log, "seen"))
    assert seen.is_completed()
    assert log == ["end dropped", "wait seen", "end seen"]


def test_a_caller_of_the_future_gets_the_end_from_there() -> None:
    log: list[str] = []
    native = FakeWork()
    future: torch.futures.Future[int] = torch.futures.Future()
    native.get_future = lambda: future  # type: ignore[attr-defined]
    work = recorded(native, FakeOperation(log, "op"))
    assert work.get_future() is future
    assert work.get_future() is future
    del work
    assert log == []
    future.set_result(1)
    assert log == ["end op"]


def evaluation() -> tuple[Evaluation, FakeWriter, Any, Any]:
    recorder, writer = claimed()
    watched = Evaluation(recorder)
    watched.trained = True
    return watched, writer, watched.eval(nn.Module.eval), watched.train(nn.Module.train)


def test_evaluation_lasts_until_the_model_trains_again() -> None:
    watched, writer, evaluate, train = evaluation()
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    evaluate(model)
    evaluate(model)
    assert not model.training
    train(model[1])  # dropout that stays random while evaluating
    assert writer.log == ["start EVALUATION"]
    train(model)
    assert model.training
    assert writer.log == ["start EVALUATION", "end EVALUATION"]
    watched.end_by_backward()
    assert writer.log == ["start EVALUATION", "end EVALUATION"]


def test_a_frozen_part_is_no_evaluation() -> None:
    watched, writer, evaluate, _ = evaluation()
    norm = nn.BatchNorm1d(2)
    for _ in range(3):
        norm.train()
        evaluate(norm)
        watched.end_by_backward()
    assert writer.log == ["start EVALUATION", "end EVALUATION"]


def test_an_evaluated_copy_that_is_gone_ends_the_evaluation() -> None:
    watched, writer, evaluate, _ = evaluation()
    copy = nn.Linear(1, 1)
    evaluate(copy)
    del copy
    watched.end_if_over()
    assert writer.log == ["start EVALUATION", "end EVALUATION"]


def test_a_model_built_for_evaluation_before_any_step_is_none() -> None:
    watched, writer, evaluate, _ = evaluation()
    watched.trained = False
    evaluate(nn.Linear(1, 1))
    assert writer.log == []


def test_a_site_is_the_users_line_and_entered_once() -> None:
    recorder, writer = claimed()
    here = finder(recorder, os.path.dirname(torch.__file__))

    def operation() -> int:  # stands for the method of ours that asks
        return here()

    found = {operation() for _ in range(3)}
    assert len(found) == 1
    other = operation()
    assert other not in found
    assert writer.texts[other].startswith(__file__)
    assert "test_a_site_is_the_users_line" in writer.texts[other]


def test_a_site_behind_a_library_is_the_users_line_and_names_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pytorch_lightning"
    package.mkdir()
    (package / "__init__.py").write_text("def fit(asks):\n    return asks()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    fit = importlib.import_module("pytorch_lightning").fit
    recorder, writer = claimed()
    here = finder(recorder, os.path.dirname(torch.__file__))
    scope: dict[str, Any] = {}
    exec(compile("def operation(here):\n    return here()\n", str(package / "own.py"), "exec"), scope)
    found = fit(
        lambda: scope["operation"](here)
    )  # the lambda is a line of the user's, inside of the library's call
    assert writer.texts[found].endswith("<lambda>")
    found = fit(functools.partial(scope["operation"], here))
    assert writer.texts[found].startswith(f"{__file__}:")
    assert writer.texts[found].endswith(
        "test_a_site_behind_a_library_is_the_users_line_and_names_the_library (called through lightning, fit)"
    )
    del sys.modules["pytorch_lightning"]  # with monkeypatch it would be put back


def test_a_folder_of_the_users_is_no_library_by_its_name() -> None:
    assert library_of("/home/me/model/transformers/block.py") == ""
    assert library_of(__file__) == ""


@pytest.mark.parametrize(
    ("name", "arguments", "element", "reduction"),
    [
        ("allreduce", ([torch.zeros(4)], SUM), "float32", "SUM"),
        ("allreduce", (torch.zeros(4, dtype=torch.bfloat16), MAX), "bfloat16", "MAX"),
        ("allreduce", ([torch.zeros(4)],), "float32", ""),
        ("allreduce", ([torch.zeros(4)], BITWISE), "float32", "BITWISE"),
        ("allgather", ([[torch.zeros(4)] * 2], [torch.zeros(4)], SUM), "float32", ""),
        ("broadcast", ([torch.zeros(4, dtype=torch.int64)],), "int64", ""),
        ("gather", ([], [torch.zeros(4, dtype=torch.bool)]), "bool", ""),
        ("allreduce", ([],), "", ""),
        ("allreduce", (), "", ""),
        ("barrier", (SUM,), "", ""),
        ("allreduce", (torch.zeros(4).to_sparse(), SUM), "float32", "SUM"),
    ],
)
def test_the_content_of_a_call(name: str, arguments: tuple[Any, ...], element: str, reduction: str) -> None:
    bits = METHODS[name].content(arguments)
    assert (element_of(bits), reduction_of(bits)) == (element, reduction)
    assert bits & 0xFF == 0
    assert 0 <= bits <= 0xFFFF


def test_bytes_of_each_operation() -> None:
    t = torch.zeros(4)
    assert METHODS["allreduce"].measure(2, ([t, t],)) == 32
    assert METHODS["allreduce"].measure(2, (t,)) == 16
    assert METHODS["allgather"].measure(4, ([[t] * 4], [t])) == 64
    assert METHODS["all_gather_single"].measure(4, (torch.zeros(16), t)) == 64
    assert METHODS["reduce_scatter"].measure(4, ([t], [[t] * 4])) == 64
    assert METHODS["_reduce_scatter_base"].measure(4, (t, torch.zeros(16))) == 64
    assert METHODS["gather"].measure(4, ([], [t])) == 16
    assert METHODS["scatter"].measure(4, ([t], [])) == 16
    assert METHODS["barrier"].measure(4, ()) == 0


def test_an_error_file_has_torchs_form_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    try:
        raise ValueError("bad shard")
    except ValueError as error:
        death.write_error_file(str(path), error)
        left = json.loads(path.read_text())
        assert left["message"]["message"] == "ValueError: bad shard"
        assert set(left["message"]["extraInfo"]) == {"py_callstack", "timestamp"}
        assert "test_an_error_file" in left["message"]["extraInfo"]["py_callstack"]
        with pytest.raises(FileExistsError):
            death.write_error_file(str(path), error)
