"""Moves the memory pages of a dropped state under the tensors of the next one, instead of having the kernel make pages.

A process that stays (``session.staying``) drops its model and makes another one of the same size. The kernel takes a
quarter of a second to free 1 GB, and half a second to provide it again page by page; moving the entries of the page
table takes a millisecond. The old contents of the pages do not matter, because a restore fills them.
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

LEAST_BYTES = 32 << 20  # least size of a storage that is moved: from there on each has a mapping of its own
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_FIXED_NOREPLACE = 0x100000
_MADE_AGAIN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = _libc.mmap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)


class Trace:
    """Weak references to the large storages of a state."""

    def __init__(self, spans: Iterable[Span]) -> None:
        storages = {span.storage.data_ptr(): span.storage for span in spans}
        self._storages: list[Any] = [
            StorageWeakRef(one)
            for one in storages.values()
            if one.device.type == "cpu"
            and one.nbytes() >= LEAST_BYTES
            and one.resizable()  # otherwise torch does not own the memory, but numpy or another lender
            and not one.is_shared()
        ]

    def take(self) -> list[torch.UntypedStorage]:
        """The storages that still exist, as strong references."""
        again = cast("Any", torch.UntypedStorage)._new_with_weak_ptr
        return [storage for one in self._storages if (storage := again(one.cdata)) is not None]


class Pages:
    """Pages of storages that nobody else holds any more. Each storage gives its pages once, to a range of its size.

    The ranges that are to get pages must be mapped before this object is made.
    """

    def __init__(self, left: list[torch.UntypedStorage]) -> None:
        self._left: dict[int, list[torch.UntypedStorage]] = {}
        if not torch.cuda.is_initialized():  # a device may have registered pages by their address
            for one in _ours_alone(left):
                self._left.setdefault(one.nbytes(), []).append(one)
        self._plain = _plain_ranges() if self._left else []

    def put_under(self, address: int, nbytes: int) -> bool:
        """Replace the pages of a range by old ones of any content. Returns False when there are none for its size."""
        left = self._left.get(nbytes)
        if not left:
            return False
        source = left.pop()
        here, there = _whole_pages(address, nbytes), _whole_pages(source.data_ptr(), nbytes)
        size = min(len(here), len(there))
        if not (self._is_plain(here) and self._is_plain(there)):
            return False
        # MREMAP_DONTUNMAP leaves the old range mapped, without pages, so that its allocator can still free it.
        if _libc.mremap(there.start, size, size, _MAYMOVE | _FIXED | _DONTUNMAP, here.start) == here.start:
            return True
        unsupported = ctypes.get_errno() == errno.EINVAL  # EINVAL: the kernel has changed nothing
        self._left.clear()
        again = _libc.mmap(here.start, size, mmap.PROT_READ | mmap.PROT_WRITE, _MADE_AGAIN, -1, 0)
        if not unsupported and again != here.start:
            os.abort()  # the range was unmapped and may be in use by another thread, so the process cannot go on
        return False

    def _is_plain(self, pages: range) -> bool:
        at = bisect_right(self._plain, (pages.start, 1 << 64)) - 1
        return len(pages) > 0 and at >= 0 and self._plain[at][1] >= pages.stop


def _ours_alone(left: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """The storages that no tensor uses, and to which only this list refers."""
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
    """Address ranges of this process that are private, anonymous, readable and writable memory."""
    try:
        with open("/proc/self/maps") as maps:
            lines = [line.split() for line in maps]
    except OSError:
        return []
    plain = [words[0] for words in lines if words[1] == "rw-p" and words[4] == "0" and len(words) == 5]
    return sorted((int(begin, 16), int(end, 16)) for begin, end in (one.split("-") for one in plain))
