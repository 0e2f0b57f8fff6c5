"""Memory that a training has left, put under tensors that have none yet: pages that need not be made anew.

A process that stays (``session.staying``) drops its model and makes another one of the same size. The kernel takes a
quarter of a second to free 1 GB, and half a second to give it again page by page; moving its page table takes a
millisecond. What is in the pages does not count: a restore fills them.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from keepstep.checkpoint.state import Span

LEAST_BYTES = 32 << 20  # of a storage; an allocator has mapped it for itself, and less is soon made
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_FIXED_NOREPLACE = 0x100000
_MADE_AGAIN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = _libc.mmap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)


class Trace:
    """Where large storages of a state are, without keeping them alive."""

    def __init__(self, spans: Iterable[Span]) -> None:
        storages = {span.storage.data_ptr(): span.storage for span in spans}
        self._storages: list[Any] = [
            StorageWeakRef(one)
            for one in storages.values()
            if one.device.type == "cpu"
            and one.nbytes() >= LEAST_BYTES
            and one.resizable()  # else the memory is numpy's, or somebody's who only lent it
            and not one.is_shared()
        ]

    def take(self) -> list[torch.UntypedStorage]:
        """Those that are still there, kept alive from here on."""
        again = cast("Any", torch.UntypedStorage)._new_with_weak_ptr
        return [storage for one in self._storages if (storage := again(one.cdata)) is not None]


class Pages:
    """Of what a `Trace` has taken and nobody else holds any more. Each gives its pages once, to a range of its size.

    Made when the ranges that are to get them are there.
    """

    def __init__(self, left: list[torch.UntypedStorage]) -> None:
        self._left: dict[int, list[torch.UntypedStorage]] = {}
        if not torch.cuda.is_initialized():  # a device may know pages by where they are
            for one in _ours_alone(left):
                self._left.setdefault(one.nbytes(), []).append(one)
        self._plain = _plain_ranges() if self._left else []

    def put_under(self, address: int, nbytes: int) -> bool:
        """Give a range pages whose bytes are anything, where some are left: what it held is lost then."""
        left = self._left.get(nbytes)
        if not left:
            return False
        source = left.pop()
        here, there = _whole_pages(address, nbytes), _whole_pages(source.data_ptr(), nbytes)
        size = min(len(here), len(there))
        if not (self._is_plain(here) and self._is_plain(there)):
            return False
        # The old range stays mapped, without pages: whoever allocated it still frees it.
        if _libc.mremap(there.start, size, size, _MAYMOVE | _FIXED | _DONTUNMAP, here.start) == here.start:
            return True
        unsupported = ctypes.get_errno() == errno.EINVAL  # nothing was done
        self._left.clear()
        again = _libc.mmap(here.start, size, mmap.PROT_READ | mmap.PROT_WRITE, _MADE_AGAIN, -1, 0)
        if not unsupported and again != here.start:
            os.abort()  # the range is gone, and may be another's: better one rank that begins anew
        return False

    def _is_plain(self, pages: range) -> bool:
        at = bisect_right(self._plain, (pages.start, 1 << 64)) - 1
        return len(pages) > 0 and at >= 0 and self._plain[at][1] >= pages.stop


def _ours_alone(left: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """What no tensor has, and no variable but this list."""
    holders: Any = getattr(torch._C, "_storage_Use_Count", None)
    held = [holders is not None and holders(one._cdata) == 1 for one in left]
    (alone,) = _references([object()])
    return [
        one for one, ours, count in zip(left, held, _references(left), strict=True) if ours and count <= alone
    ]


def _references(objects: list[Any]) -> list[int]:
    return [sys.getrefcount(one) for one in objects]


def _whole_pages(address: int, nbytes: int) -> range:
    return range(-(-address // _PAGE) * _PAGE, (address + nbytes) // _PAGE * _PAGE)


def _plain_ranges() -> list[tuple[int, int]]:
    """Ranges of this process that are memory and nothing else: private, of no file, to be read and written."""
    try:
        with open("/proc/self/maps") as maps:
            lines = [line.split() for line in maps]
    except OSError:
        return []
    plain = [words[0] for words in lines if words[1] == "rw-p" and words[4] == "0" and len(words) == 5]
    return sorted(_of(one) for one in plain)


def _of(line: str) -> tuple[int, int]:
    begin, _, end = line.split()[0].partition("-")
    return int(begin, 16), int(end, 16)
