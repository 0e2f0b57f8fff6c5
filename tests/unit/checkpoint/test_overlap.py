"""Copying beside training: what is copied later, and what waits for it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.trainings import alone, hashes, same, training

from keepstep.checkpoint import snapshot as module
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.core.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("copy_engine")


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_restored_is_what_was_there_at_the_boundary(served: Any, overlap: bool) -> None:
    state, step = training()
    snapshots = Snapshots(served.address, Worker(), alone)
    for number in range(1, 5):
        step()
        state["position"] = number
        snapshots.save(state, number, overlap=overlap)
        before = hashes(state)
        if number < 4:
            continue
        step()  # the optimizer waits for the copy, and then changes what was copied
        assert not same(hashes(state), before)
    random = torch.rand(3)
    snapshots.close()

    fresh, _ = training(seed=1)
    snapshots = Snapshots(served.address, Worker(incarnation=1), alone)
    assert snapshots.load(fresh) == 4
    assert fresh["position"] == 4
    assert same(hashes(fresh), before)
    torch.randn(8, 64)
    assert torch.equal(torch.rand(3), random)
    snapshots.close()


def test_only_what_optimizers_own_is_copied_later_and_before_they_step(served: Any) -> None:
    state, step = training()
    state["average"] = [p.detach().clone() for p in state["model"].parameters()]
    snapshots = Snapshots(served.address, Worker(), alone)
    snapshots.save(state, 0)  # nothing has stepped: all is copied at once
    assert snapshots._flight is None
    step()
    snapshots.save(state, 1)
    flight = snapshots._flight
    assert flight is not None
    own = {p.untyped_storage()._cdata for p in state["model"].parameters()}
    own |= {
        t.untyped_storage()._cdata for values in state["optimizer"].state.values() for t in values.values()
    }
    assert flight.moving == own
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other]).step()  # owns none of the copied tensors
    assert snapshots._flight is flight
    step()
    assert snapshots._flight is None
    snapshots.close()


@pytest.mark.parametrize("own", [True, False])
def test_a_closure_runs_beside_the_copy_where_it_comes_before_any_change(served: Any, own: bool) -> None:
    class Sharpness(torch.optim.SGD):
        """Somebody's: might change parameters before it calls the closure."""

    model = torch.nn.Linear(64, 64)
    optimizer = (torch.optim.SGD if own else Sharpness)(model.parameters(), lr=0.1)
    snapshots, under_way = Snapshots(served.address, Worker(), alone), []

    def closure() -> torch.Tensor:
        under_way.append(snapshots._flight is not None)
        loss = model(torch.ones(2, 64)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    snapshots.save({"model": model, "optimizer": optimizer}, 1)
    assert optimizer.step(closure=closure) is not None
    assert under_way == [False, own]
    assert snapshots._flight is None
    snapshots.close()


def test_an_optimizer_whose_groups_are_empty_waits_for_its_states(served: Any) -> None:
    """As DeepSpeed's ZeRO-3 leaves the one inside it between steps."""
    state, step = training()
    snapshots = Snapshots(served.address, Worker(), alone)
    step()
    optimizer = state["optimizer"]
    for group in optimizer.param_groups:
        group["params"] = []
    snapshots.save({"moments": dict(enumerate(optimizer.state.values()))}, 1)
    assert snapshots._flight is not None
    optimizer.step()
    assert snapshots._flight is None
    snapshots.close()


def test_optimizers_that_step_in_backward_are_copied_at_the_boundary_and_that_is_said(
    served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizers = {p: torch.optim.SGD([p], momentum=0.9) for p in model.parameters()}
    for p in optimizers:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    snapshots = Snapshots(served.address, Worker(), alone)
    state = {"model": model, "optimizers": list(optimizers.values())}
    for number in range(1, 4):
        model(torch.ones(2, 4)).sum().backward()
        snapshots.save(state, number)
        assert snapshots._flight is None
    snapshots.close()
    assert (
        capsys.readouterr().err.count("an optimizer steps inside backward: snapshots are copied at the step")
        == 1
    )


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_optimizer_step_waits_too(served: Any) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    snapshots = Snapshots(served.address, Worker(), alone)
    for number in range(1, 4):
        model(torch.ones(2, 64)).sum().backward()
        compiled()
        assert snapshots._flight is None
        snapshots.save({"model": model, "optimizer": optimizer}, number)
        assert snapshots._flight is not None
    snapshots.close()


def test_a_forked_child_neither_waits_nor_saves(served: Any) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    parameter = torch.nn.Parameter(torch.zeros(20_000_000))
    optimizer = torch.optim.SGD([parameter])
    parameter.grad = torch.ones(1).expand(20_000_000)
    optimizer.step()
    snapshots.save({"w": parameter}, 1)
    child = os.fork()
    if child == 0:
        try:
            snapshots._before_step(iter([parameter.untyped_storage()._cdata]))
            snapshots.save({"w": 1}, 2)
        except CheckpointError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    snapshots.wait()
    assert snapshots.load({"w": parameter}) == 1
    snapshots.close()


def test_others_may_read_a_snapshot_from_its_seal_on(served: Any) -> None:
    state, step = training()
    snapshots = Snapshots(served.address, Worker(), alone)
    step()
    snapshots.save(state, 1)
    assert snapshots._flight is not None
    snapshots._flight.native.wait()  # sealed, and no optimizer has stepped yet
    child = os.fork()
    if child == 0:
        os._exit(7 if all(slot.lock(shared=True) for slot in snapshots._cache.slots) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    snapshots.close()


def test_a_device_that_does_not_give_its_bytes_is_said_and_training_goes_on(
    served: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What native code says of a GPU that is lost; that it seals nothing then is tested there."""
    state, step = training()
    snapshots = Snapshots(served.address, Worker(), alone)

    class Broken(module.native.Snapshot):
        def wait(self, urgent: bool = False) -> None:
            super().wait(urgent)
            raise RuntimeError("cuMemcpyDtoHAsync: CUDA_ERROR_LAUNCH_FAILED")

    for number in range(1, 6):
        step()
        with monkeypatch.context() as patches:
            if number == 3:
                patches.setattr(module.native, "Snapshot", Broken)
            snapshots.save(state, number)
            snapshots.wait()
    said = (
        "step 3 was not saved: the device did not give its bytes: cuMemcpyDtoHAsync: CUDA_ERROR_LAUNCH_FAILED"
    )
    assert capsys.readouterr().err.count(said) == 1
    assert snapshots.load(state) == 5
    snapshots.close()
