"""All of an incarnation's groups and meshes is let go, and who still holds something is found out."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from keepstep.session import groups


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.unfreeze()
    groups.let_go()
    gc.unfreeze()


def train(holder: list[Any]) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    mesh.get_group("dp")
    holder += [model, mesh]
    holder.append(holder)  # only a collection finds it


def test_nothing_is_left_of_what_only_the_training_held() -> None:
    assert groups.made()
    train([])
    assert groups.let_go() == []
    assert groups.made() == []


def stepped_in_backward() -> torch.nn.Linear:
    """A model whose optimizers step inside backward, which only the collector could find."""
    model = torch.nn.Linear(4, 1)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    model(torch.ones(2, 4)).sum().backward()
    return model


def test_optimizers_that_step_inside_backward_are_let_go_of_with_their_parameters() -> None:
    gone = weakref.ref(stepped_in_backward().weight)
    groups.let_go()
    assert gone() is None


def test_a_model_that_outlives_the_training_steps_inside_backward_as_before() -> None:
    model = stepped_in_backward()
    groups.let_go()
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight, before - 2.0 - 2.0)  # the gradients of both backward passes


def test_a_mesh_that_outlives_the_training_is_found() -> None:
    kept: list[Any] = []
    train(kept)
    del kept[0]  # the model
    held = groups.let_go()
    assert held[-1].startswith("1 device meshes")
    kept.clear()


def test_a_cache_that_clears_only_what_is_inside_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.7 and 2.8 has no ``cache_clear``."""
    from torch.distributed.tensor import DTensor

    inside = functools.lru_cache(str)
    inside(1)
    propagator = DTensor._op_dispatcher.sharding_propagator
    monkeypatch.setattr(propagator, "propagate_op_sharding", SimpleNamespace(cache=inside))
    groups.let_go()
    assert inside.cache_info().currsize == 0


def test_threads_that_wait_for_work_are_quiet() -> None:
    dist.barrier()
    groups.until_quiet()
    callers = groups._callers(groups._gloo_threads())
    if not callers and torch.__version__ < "2.8":
        pytest.skip("torch 2.7 gives Gloo's threads no names")
    assert callers
    assert groups._sleep(callers)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have loaded libraries, or stand-ins for them."""
    for name in groups._REFUSED:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_training_that_may_stay_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = sys.modules.get("torch._dynamo.convert_frame")
    if compiling is not None:  # in another test
        monkeypatch.setattr(compiling, "FRAME_COUNTER", 0)
    assert groups.refusal() == ""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("deepspeed", "DeepSpeed"),
        ("megatron.core", "Megatron"),
        ("lightning.pytorch", "Lightning"),
        ("transformers.trainer", "Trainer"),
    ],
)
def test_what_cannot_stay_is_refused_in_one_line(
    module: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    why = groups.refusal()
    assert words in why
    assert "\n" not in why


def test_compiled_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Any = ModuleType("torch._dynamo.convert_frame")
    compiled.FRAME_COUNTER = 1
    monkeypatch.setitem(sys.modules, compiled.__name__, compiled)
    assert "compiled code" in groups.refusal()
