"""Memory that a training has left is put under what the next one restores; never what somebody still holds."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from tests.unit.checkpoint.restore.test_restore import sealed

from keepstep.checkpoint.memory.pages import LEAST_BYTES, Pages, Trace
from keepstep.checkpoint.restore.filling import Filling
from keepstep.checkpoint.state import Span

COUNT = LEAST_BYTES // 4


def left(value: float, count: int = COUNT) -> torch.UntypedStorage:
    """That of a tensor that is gone."""
    return torch.full((count,), value).untyped_storage()


def resident(tensor: torch.Tensor) -> int:
    """Pages under a tensor that are there."""
    first, count = tensor.data_ptr() // mmap.PAGESIZE, tensor.nbytes // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = torch.frombuffer(bytearray(file.read(8 * count)), dtype=torch.int64)
    return int((entries < 0).sum())  # bit 63


def taken(*of: torch.Tensor) -> list[torch.UntypedStorage]:
    return Trace([Span(one.untyped_storage(), 0, one.nbytes) for one in of]).take()


def test_pages_move_to_where_there_are_none() -> None:
    old, target = [left(7.0)], torch.empty(COUNT)
    assert resident(target) < 10
    assert Pages(old).put_under(target.data_ptr(), target.nbytes)
    assert resident(target) > target.nbytes // mmap.PAGESIZE - 10
    assert target[COUNT // 2] == 7  # anything may be there
    old.clear()  # the old memory is freed by whoever has made it
    target.fill_(1)
    assert torch.equal(target, torch.ones(COUNT))


def test_again_and_again_the_same_pages() -> None:
    one = torch.full((COUNT,), 1.0)
    for value in range(20):
        old = taken(one)
        one = torch.empty(COUNT)
        assert Pages(old).put_under(one.data_ptr(), one.nbytes)
        old.clear()
        assert resident(one) > one.nbytes // mmap.PAGESIZE - 10
        one.fill_(value)
        assert int(one.sum()) == value * COUNT


def test_memory_that_somebody_holds_is_left_alone() -> None:
    held, target = torch.full((COUNT,), 3.0), torch.empty(COUNT)
    old = taken(held)
    assert not Pages(old).put_under(target.data_ptr(), target.nbytes)
    array = held.numpy()
    del held
    assert not Pages(old).put_under(target.data_ptr(), target.nbytes)
    assert (array == 3).all()
    assert taken(torch.from_numpy(array)) == []  # numpy's, by now
    storage = old[0]
    del array
    assert not Pages(old).put_under(target.data_ptr(), target.nbytes)
    assert set(storage[:8]) == set(torch.full((2,), 3.0).untyped_storage())
    del storage
    assert Pages(old).put_under(target.data_ptr(), target.nbytes)


def test_only_one_of_the_same_size_once() -> None:
    targets = [torch.empty(COUNT + 1), *(torch.empty(COUNT) for _ in range(2))]
    pages = Pages([left(1.0)])
    assert [pages.put_under(one.data_ptr(), one.nbytes) for one in targets] == [False, True, False]


def test_memory_that_is_more_than_memory_is_neither_taken_nor_given(tmp_path: Path) -> None:
    file = tmp_path / "tensor"
    file.write_bytes(bytes(LEAST_BYTES))
    mapped = torch.from_file(str(file), shared=False, size=COUNT)
    shared = torch.empty(COUNT).share_memory_()
    for target in (mapped, shared):
        assert not Pages([left(1.0)]).put_under(target.data_ptr(), target.nbytes)
        assert target.count_nonzero() == 0
    old = [mapped.untyped_storage()]
    del mapped
    target = torch.zeros(COUNT)
    assert not Pages(old).put_under(target.data_ptr(), target.nbytes)
    assert target.count_nonzero() == 0


def test_a_trace_keeps_nothing_alive_until_it_is_taken() -> None:
    large, small, gone = left(1.0), left(1.0, 10), left(1.0)
    trace = Trace([Span(one, 0, one.nbytes()) for one in (large, large, small, gone)])
    del gone
    assert [one.data_ptr() for one in trace.take()] == [large.data_ptr()]


def test_a_restore_is_the_same_with_them() -> None:
    torch.manual_seed(0)
    saved = {"kept": torch.randn(COUNT), "fresh": torch.randn(COUNT), "small": torch.randn(9), "twice": None}
    saved["twice"] = saved["fresh"][5:]
    state = {"kept": torch.zeros(COUNT), "small": torch.zeros(9)}
    filling = Filling(state, *sealed(saved), 2, [left(8.0), left(9.0)])
    filling.copy()
    assert filling.damaged == []
    filling.finish()
    for name, tensor in saved.items():
        assert tensor is not None
        assert torch.equal(state[name], tensor), name
    assert state["twice"].data_ptr() == state["fresh"].data_ptr() + 20
