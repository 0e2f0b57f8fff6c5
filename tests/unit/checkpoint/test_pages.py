"""Memory that a training has left is put under what the next one restores; never what somebody still holds."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from tests.unit.checkpoint.test_restore import sealed

from keepstep.checkpoint.pages import LEAST_BYTES, Pages, Trace
from keepstep.checkpoint.restore import Filling
from keepstep.checkpoint.state import Span

COUNT = LEAST_BYTES // 4


def storage(value: float, count: int = COUNT) -> torch.UntypedStorage:
    return torch.full((count,), value).untyped_storage()


def resident(tensor: torch.Tensor) -> int:
    """Pages under a tensor that are there."""
    first, count = tensor.data_ptr() // mmap.PAGESIZE, tensor.nbytes // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = torch.frombuffer(bytearray(file.read(8 * count)), dtype=torch.int64)
    return int((entries < 0).sum())  # bit 63


def span(of: torch.UntypedStorage) -> Span:
    return Span(of, 0, of.nbytes())


def test_pages_move_to_where_there_are_none() -> None:
    left, target = [storage(7.0)], torch.empty(COUNT)
    assert resident(target) < 10
    assert Pages(left).put_under(target.data_ptr(), target.nbytes)
    assert resident(target) > target.nbytes // mmap.PAGESIZE - 10
    assert target[COUNT // 2] == 7  # anything may be there
    left.clear()  # the old memory is freed by whoever has made it
    target.fill_(1)
    assert torch.equal(target, torch.ones(COUNT))


def test_again_and_again_the_same_pages() -> None:
    one = torch.full((COUNT,), 1.0)
    for value in range(20):
        left = [one.untyped_storage()]
        one = torch.empty(COUNT)
        assert Pages(left).put_under(one.data_ptr(), one.nbytes)
        left.clear()
        assert resident(one) > one.nbytes // mmap.PAGESIZE - 10
        one.fill_(value)
        assert int(one.sum()) == value * COUNT


def test_memory_that_somebody_holds_is_left_alone() -> None:
    held, target = torch.full((COUNT,), 3.0), torch.empty(COUNT)
    assert not Pages([held.untyped_storage()]).put_under(target.data_ptr(), target.nbytes)
    array = held.numpy()
    left = [held.untyped_storage()]
    del held
    assert not Pages(left).put_under(target.data_ptr(), target.nbytes)
    assert (array == 3).all()


def test_only_one_of_the_same_size_once() -> None:
    targets = [torch.empty(COUNT + 1), *(torch.empty(COUNT) for _ in range(2))]
    pages = Pages([storage(1.0)])
    assert [pages.put_under(one.data_ptr(), one.nbytes) for one in targets] == [False, True, False]


def test_memory_that_is_more_than_memory_is_neither_taken_nor_given(tmp_path: Path) -> None:
    file = tmp_path / "tensor"
    file.write_bytes(bytes(LEAST_BYTES))
    mapped = torch.from_file(str(file), shared=False, size=COUNT)
    shared = torch.empty(COUNT).share_memory_()
    for target in (mapped, shared):
        assert not Pages([storage(1.0)]).put_under(target.data_ptr(), target.nbytes)
        assert target.count_nonzero() == 0
    left = [mapped.untyped_storage()]
    del mapped
    target = torch.zeros(COUNT)
    assert not Pages(left).put_under(target.data_ptr(), target.nbytes)
    assert target.count_nonzero() == 0


def test_a_trace_keeps_nothing_alive_until_it_is_taken() -> None:
    large, small, gone = storage(1.0), storage(1.0, 10), storage(1.0)
    trace = Trace([span(one) for one in (large, large, small, gone)])
    del gone
    assert [one.data_ptr() for one in trace.take()] == [large.data_ptr()]


def test_a_restore_is_the_same_with_them() -> None:
    torch.manual_seed(0)
    saved = {"kept": torch.randn(COUNT), "fresh": torch.randn(COUNT), "small": torch.randn(9), "twice": None}
    saved["twice"] = saved["fresh"][5:]
    state = {"kept": torch.zeros(COUNT), "small": torch.zeros(9)}
    filling = Filling(state, *sealed(saved), 2, [storage(8.0), storage(9.0)])
    filling.copy()
    assert filling.damaged == []
    filling.finish()
    for name, tensor in saved.items():
        assert tensor is not None
        assert torch.equal(state[name], tensor), name
    assert state["twice"].data_ptr() == state["fresh"].data_ptr() + 20
