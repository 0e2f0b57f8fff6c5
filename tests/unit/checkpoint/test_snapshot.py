"""Snapshots of live training: what is copied when, and what comes back."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from keepstep.checkpoint import api as door
from keepstep.checkpoint import snapshot as module
from keepstep.checkpoint.api import RandomState
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.restore.restore_service import RestoreClient
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.checkpoint.storage.cadence import Storing
from keepstep.core.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("copy_engine")


def alone(row: list[int]) -> list[list[int]]:
    return [row]


def training(seed: int = 0) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer, "random": RandomState(), "position": 0}, step


def hashes(state: dict[str, Any]) -> dict[str, Any]:
    found = {f"m{n}": t.clone() for n, t in state["model"].state_dict().items()}
    for i, values in state["optimizer"].state_dict()["state"].items():
        found |= {f"o{i}{n}": t.clone() for n, t in values.items()}
    return found


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


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


def test_a_growing_state_gets_larger_slots_and_keeps_the_last_snapshot(served: Any) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    for number in range(1, 7):
        snapshots.save({"w": torch.full((number * 100_000,), float(number))}, number)
        held = {key.step for key in snapshots._cache.held() if key}
        assert held == {number, number - 1} - {0}
    state = {"w": torch.zeros(600_000)}
    assert snapshots.load(state) == 6
    assert torch.all(state["w"] == 6)
    snapshots.close()


def test_a_state_that_does_not_fit_is_refused_and_the_last_snapshot_stays(served: Any) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    snapshots.save({"w": torch.ones(10)}, 1)
    served.cache.limit_bytes = 1 << 20
    with pytest.raises(CheckpointError, match=r"whose limit is 0\.00 GiB"):
        snapshots.save({"w": torch.zeros(1 << 20)}, 2)
    with pytest.raises(CheckpointError, match="whose limit is"):
        Snapshots(served.address, Worker(rank=1, world_size=2), alone).register({"w": torch.zeros(1 << 20)})
    snapshots.save({"w": torch.ones(1)}, 3)
    state = {"w": torch.zeros(1)}
    assert snapshots.load(state) == 3
    snapshots.close()


def test_steps_must_grow(served: Any) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    snapshots.save({"a": 1}, 5)
    with pytest.raises(CheckpointError, match="step 5 after step 5: steps must grow"):
        snapshots.save({"a": 1}, 5)
    snapshots.close()


def test_a_damaged_snapshot_is_told_and_the_one_before_is_restored(
    served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    for number in (1, 2):
        snapshots.save({"w": torch.full((5000,), float(number))}, number)
    snapshots._cache.slots[1].memory[8000] ^= 1
    state = {"w": torch.zeros(5000)}
    assert snapshots.load(state) == 1
    assert torch.all(state["w"] == 1)
    said = capsys.readouterr().err
    assert "the snapshot of rank 0 at step 2 is damaged, not restored" in said
    assert "resumed after step 1 from this node's cache" in said
    snapshots._cache.slots[0].memory[8000] ^= 1
    with pytest.raises(CheckpointError, match="the state is half restored, and no snapshot is left"):
        snapshots.load(state)
    snapshots.close()


def test_another_jobs_shape_is_not_restored(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    snapshots.save({"w": 1}, 1)
    snapshots.close()
    snapshots = Snapshots(served.address, Worker(world_size=2, local_world_size=2), lambda row: [row, row])
    assert snapshots.load({"w": 0}) is None
    assert "it is of rank 0 of 1" in capsys.readouterr().err
    snapshots.close()


class Ranks:
    """Ranks of one node as threads, which agree through a barrier."""

    def __init__(self, count: int) -> None:
        self.count, self.rows = count, {}
        self.barrier = threading.Barrier(count, timeout=60)

    def gather(self, rank: int, row: list[int]) -> list[list[int]]:
        self.rows[rank] = row
        self.barrier.wait()
        found = [self.rows[r] for r in range(self.count)]
        self.barrier.wait()
        return found

    def run(
        self, served: Any, work: Any, incarnation: int = 0, *, one_node: bool = True, every: int | None = None
    ) -> list[Any]:
        results: list[Any] = [None] * self.count

        def one(rank: int) -> None:
            worker = Worker(rank, self.count, self.count if one_node else 1, incarnation)
            storing = None if every is None else Storing("/ckpt", every)
            snapshots = Snapshots(served.address, worker, lambda row: self.gather(rank, row), storing=storing)
            try:
                results[rank] = work(rank, snapshots)
            except CheckpointError as error:
                results[rank] = str(error)
            snapshots.close()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def test_ranks_that_got_differently_far_resume_together(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        for number in range(1, 6 if rank else 5):
            snapshots.save({"w": torch.full((100,), number * 10.0 + rank)}, number)

    def load(rank: int, snapshots: Snapshots) -> tuple[int | None, float, list[Key | None]]:
        state = {"w": torch.zeros(100)}
        return snapshots.load(state), state["w"][0].item(), snapshots._cache.held()

    ranks = Ranks(3)
    ranks.run(served, save)
    for rank, (step, value, held) in enumerate(ranks.run(served, load, incarnation=1)):
        assert (step, value) == (4, 40.0 + rank)
        assert [key for key in held if key] == [Key(0, 4)]


def test_ranks_on_several_nodes_tell_each_other_what_they_hold(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> list[int]:
        for number in range(1, 6):
            snapshots.save({"w": rank}, number)
        return sorted(key.step for key in snapshots._cache.held() if key)

    ranks = Ranks(3)
    assert ranks.run(served, save, one_node=False) == [[4, 5]] * 3
    assert ranks.run(served, lambda _, found: found.load({"w": 0}), 1, one_node=False) == [5, 5, 5]


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


def test_when_one_rank_finds_damage_all_take_the_snapshot_before(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        for number in (1, 2):
            snapshots.save(
                {"w": torch.full((5000,), number * 10.0 + rank), "seen": [number] * number}, number
            )

    def load(rank: int, snapshots: Snapshots) -> Any:
        state = {"w": torch.zeros(5000), "seen": [0]}
        return snapshots.load(state), state["w"].unique().tolist(), state["seen"]

    ranks = Ranks(2)
    ranks.run(served, save)
    os.pwrite(served.cache.slots(1)[1], b"\xff", 7000)
    assert ranks.run(served, load, incarnation=1) == [(1, [10.0], [1]), (1, [11.0], [1])]


def test_a_rank_whose_state_differs_stops_all(served: Any) -> None:
    ranks = Ranks(2)
    ranks.run(served, lambda rank, snapshots: snapshots.save({"w": torch.ones(4)}, 1))
    said = ranks.run(
        served, lambda rank, snapshots: snapshots.load({"w": torch.ones(4 + rank)}), incarnation=1
    )
    assert said[0] == "another rank could not restore its state: see what it says"
    assert said[1] == "w: the snapshot has float32 of (4,), the state torch.float32 of (5,)"


def test_a_rank_without_a_snapshot_refuses_the_restore_of_all(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        for step in (1, 2, 3):
            snapshots.save({"w": rank}, step)

    ranks = Ranks(2)
    ranks.run(served, save)
    served.cache._slots.pop(1)
    for said in ranks.run(served, lambda rank, snapshots: snapshots.load({"w": 0}), incarnation=1):
        assert "ranks 0: step 2 of incarnation 0, step 3 of incarnation 0; ranks 1: nothing" in said


def test_ranks_that_died_over_their_very_first_snapshot_begin_anew(
    served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(2)
    ranks.run(served, lambda rank, snapshots: snapshots.save({"w": rank}, 1))
    served.cache._slots.pop(1)
    assert ranks.run(served, lambda rank, snapshots: snapshots.load({"w": 0}), incarnation=1) == [None, None]
    assert "begins anew" in capsys.readouterr().err


def test_a_rank_that_saves_alone_is_told_and_keeps_what_all_may_need(
    served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)

    def save(rank: int, snapshots: Snapshots) -> list[int]:
        snapshots.save({"w": 0}, 1)
        if rank == 0:
            for number in (2, 3, 4):
                snapshots.save({"w": 0}, number)
        return sorted(key.step for key in snapshots._cache.held() if key)

    assert Ranks(2).run(served, save)[0] == [1, 2]
    assert "step 3 was not saved" in capsys.readouterr().err


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


def test_a_step_that_waits_for_storage_outlasts_later_saves_and_a_restart(
    served: Any, empty_service: None, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots = Snapshots(served.address, Worker(), alone, storing=Storing("/ckpt", every=0))
    for number in range(1, 8):
        snapshots.save({"w": torch.full((50,), float(number))}, number, persist=number == 2)
        assert snapshots._cache.wanted() == ({Key(0, 2)} if number > 1 else set())
    assert {key.step for key in snapshots._cache.held() if key} == {2, 6, 7}
    assert "3 snapshots of rank 0 take" in capsys.readouterr().err
    snapshots.close()
    snapshots = Snapshots(served.address, Worker(incarnation=1), alone, storing=Storing("/ckpt", every=0))
    state = {"w": torch.zeros(50)}
    assert snapshots.load(state) == 7
    assert snapshots._cache.wanted() == {Key(0, 2)}
    assert {key for key in snapshots._cache.held() if key} == {Key(0, 2), Key(0, 7)}
    snapshots.save(state, 8)
    snapshots.save(state, 9)
    assert {key for key in snapshots._cache.held() if key} == {Key(0, 2), Key(1, 8), Key(1, 9)}
    snapshots.close()


def test_what_is_to_be_brought_to_storage_without_one_is_refused(served: Any) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    with pytest.raises(CheckpointError, match="step 1 is to be brought to storage, and there is none"):
        snapshots.save({"w": 1}, 1, persist=True)
    snapshots.close()


def test_ranks_agree_on_which_steps_go_to_storage(served: Any, empty_service: None) -> None:
    def save(rank: int, snapshots: Snapshots) -> list[list[int]]:
        said: list[list[int]] = []
        for number in range(1, 7):
            snapshots.save({"w": rank}, number)
            said.append(sorted(key.step for key in snapshots._cache.wanted()))
            if rank == 0 and number == 1:
                snapshots._cache.let_go(Key(0, 1))  # it is on storage, and rank 1 has not heard of it
            if rank == 1 and number == 4:
                snapshots._cache.let_go(Key(0, 1))
        return said

    first, second = Ranks(2).run(served, save, every=1)
    assert first == [[1], [], [], [], [5], [5]]
    assert second == [[1], [1], [1], [1], [5], [5]]


def test_what_one_rank_did_not_keep_is_waited_for_no_longer(
    served: Any, empty_service: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(rank: int, snapshots: Snapshots) -> list[int]:
        snapshots.save({"w": rank}, 1, persist=True)
        snapshots._unkept = Key(0, 1) if rank == 1 else None
        snapshots.save({"w": rank}, 2, persist=True)
        return sorted(key.step for key in snapshots._cache.wanted())

    assert Ranks(2).run(served, save, every=0) == [[2], [2]]
    assert "step 1 is not brought to storage /ckpt: rank 1 did not keep it" in capsys.readouterr().err


def test_what_not_all_ranks_hold_any_more_is_let_go_in_time(
    served: Any, empty_service: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ALONE_S", -1.0)

    def save(rank: int, snapshots: Snapshots) -> list[list[int]]:
        snapshots.save({"w": rank}, 1, persist=True)
        if rank == 1:
            snapshots._cache.drop(0)  # the agent found it damaged
        said: list[list[int]] = []
        for number in (2, 3):
            snapshots.save({"w": rank}, number)
            said.append(sorted(key.step for key in snapshots._cache.wanted()))
        return said

    assert Ranks(2).run(served, save, every=1) == [[[], [3]], [[], [3]]]


def test_without_an_agent_nobody_begins_as_if_storage_were_empty(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestoreClient, "_ask", lambda *_: (_ for _ in ()).throw(CheckpointError("no agent")))
    for what in (lambda s: s.load({"w": 1}), lambda s: s.save({"w": 1}, 1)):
        snapshots = Snapshots(served.address, Worker(), alone, storing=Storing("/ckpt"))
        with pytest.raises(CheckpointError, match=r"it is not known what other sources have \(no agent\)"):
            what(snapshots)
        snapshots.close()


def test_on_several_nodes_without_an_agent_the_own_cache_is_looked_at_and_that_is_said(
    served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RestoreClient, "_ask", lambda *_: (_ for _ in ()).throw(CheckpointError("no agent")))
    snapshots = Snapshots(served.address, Worker(), alone, elsewhere=True)
    assert snapshots.load({"w": 1}) is None
    assert "no agent; only this node's cache is looked at" in capsys.readouterr().err
    snapshots.close()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("KEEPSTEP_NO_CACHE", "node-3 has no cache: too many open files", "node-3 has no cache"),
        ("KEEPSTEP_CACHE", "keepstep-cache-nobody", "the cache of this node does not answer"),
    ],
)
def test_without_a_cache_all_ranks_are_told_and_nothing_is_taken_for_a_beginning(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    gathered: list[list[int]] = []

    def gather(row: list[int]) -> list[list[int]]:
        gathered.append(row)
        return [row]

    monkeypatch.delenv("KEEPSTEP_CACHE", raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(door, "_open", [])
    monkeypatch.setattr(door, "_no_cache", [])
    monkeypatch.setattr(door, "_gather", gather)
    state = {"step": 1}
    door.register(state)
    assert gathered == []
    for call in (lambda: door.load(state), lambda: door.save(state, 1)):
        with pytest.raises(CheckpointError, match=why):
            call()
    door.wait()
    assert len(gathered) == 2


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
