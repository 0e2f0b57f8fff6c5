"""The default group that was made before the training: who holds it, and that it is made again alike."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from keepstep.session import default_group, groups

TIMEOUT = timedelta(seconds=77)


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hook = sys.excepthook
    dist.init_process_group("gloo", timeout=TIMEOUT)
    yield
    gc.unfreeze()
    groups.let_go()
    gc.unfreeze()
    sys.excepthook = hook


def known() -> default_group.DefaultGroup:
    found = default_group.found()
    assert found is not None
    return found


def function_that_takes(group: Any) -> Any:
    """As ``torch.distributed.nn.functional`` has some, of those that are imported after the group was made."""

    def reduce(_: object, group: Any = group, *, other: Any = group, size: int = 1) -> None: ...

    return reduce


def test_it_is_made_again_with_the_same_backend_and_timeout() -> None:
    default = known()
    assert groups.let_go(default) == []
    assert not dist.is_initialized()
    default.make_again()
    made: Any = dist.group.WORLD
    assert dist.get_backend() == "gloo"
    assert made._get_backend(made._device_types[0]).options._timeout == TIMEOUT


def test_defaults_of_arguments_get_the_next_group() -> None:
    function = function_that_takes(dist.group.WORLD)
    default = known()
    assert groups.let_go(default) == []
    assert (function.__defaults__, function.__kwdefaults__) == ((None,), {"other": None, "size": 1})
    default.make_again()
    assert function.__defaults__ == (dist.group.WORLD,)
    assert function.__kwdefaults__ == {"other": dist.group.WORLD, "size": 1}


def test_variables_of_modules_get_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("a_script")
    monkeypatch.setitem(sys.modules, "a_script", module)
    module.WORLD = dist.group.WORLD
    default = known()
    assert groups.let_go(default) == []
    assert module.WORLD is None
    default.make_again()
    assert module.WORLD is dist.group.WORLD


def test_what_was_imported_by_the_training_is_found_when_it_is_left() -> None:
    default = known()
    function = function_that_takes(dist.group.WORLD)
    assert groups.let_go(default) == []
    default.make_again()
    assert function.__defaults__ == (dist.group.WORLD,)
    assert groups.let_go(default) == []


def test_whoever_else_holds_it_is_named() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = [self]
            self.group = dist.group.WORLD

    trainer = Trainer()
    (held,) = groups.let_go(known())
    assert "threads of process groups (a Trainer)" in held
    trainer.group = None


def test_one_that_a_function_up_the_stack_keeps_is_named_by_its_variable() -> None:
    kept = dist.group.WORLD
    (held,) = groups.let_go(known())
    assert "(kept in test_one_that_a_function_up_the_stack_keeps_is_named_by_its_variable)" in held
    assert kept is not None
    del kept


def test_one_that_is_numbered_by_the_environment_is_not_refused() -> None:
    assert default_group.refusal() == ""


def test_one_that_numbers_ranks_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert default_group.refusal() == "its default group numbers ranks otherwise than the launcher does"


def test_one_with_a_store_of_its_own_is_refused() -> None:
    assert groups.let_go(known()) == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert default_group.refusal() == "its default group was made with a store or an address of its own"


def test_without_a_group_there_is_nothing_to_make_again() -> None:
    assert groups.let_go(known()) == []
    assert (default_group.found(), default_group.refusal()) == (None, "")


def test_errors_get_the_prefix_of_torch_once(capsys: pytest.CaptureFixture[str]) -> None:
    default = known()
    for _ in range(2):
        assert groups.let_go(default) == []
        default_group.take_off_prefix()
        default.make_again()
    sys.excepthook(ValueError, ValueError("boom"), None)
    said = capsys.readouterr().err
    assert "ValueError: boom" in said
    assert said.count("[rank0]") == said.count("\n")
