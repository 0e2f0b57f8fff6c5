"""``Here``, ``Oldest`` and ``Hidden`` of ``keepstep.capture._native`` in plain Python: what they are tested against."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType, MethodType
from typing import Any


class Here:
    """See ``_native``."""

    def __init__(
        self, judge: Callable[[str], int], enter: Callable[[FrameType, int, CodeType | None], int]
    ) -> None:
        self._judge, self._enter = judge, enter
        self._owners: dict[str, int] = {}
        self._sites: dict[tuple[object, ...], int] = {}

    def __call__(self) -> int:
        frame: FrameType | None = sys._getframe(1).f_back  # pyright: ignore[reportPrivateUsage]
        libraries: list[tuple[FrameType, int]] = []
        while frame is not None:
            name = frame.f_code.co_filename
            owner = self._owners.get(name)
            if owner is None:
                owner = self._owners[name] = self._judge(name)
            if owner == 0 and libraries:
                return self._site(frame, libraries[-1][1], libraries[0][0].f_code)
            if owner == 0:
                return self._site(frame, 0, None)
            if owner > 1:
                libraries.append((frame, owner))
            frame = frame.f_back
        return self._site(libraries[0][0], 0, None) if libraries else 0

    def _site(self, frame: FrameType, through: int, inner: CodeType | None) -> int:
        line = frame.f_code, frame.f_lineno, through, id(inner)
        if line not in self._sites:
            self._sites[line] = self._enter(frame, through, inner)
        return self._sites[line]


class Oldest:
    """See ``_native``."""

    def __init__(self, callback: Callable[[str, dict[str, int]], object]) -> None:
        self._callback = callback

    def __call__(self, when: str, info: dict[str, int], /) -> None:
        if info["generation"] == 2:
            self._callback(when, info)


class Hidden:
    """See ``_native``."""

    def __init__(
        self,
        ours: Callable[..., Any],
        compiling: Callable[[], object] | None,
        set_compiling: Callable[[Any], object] | None,
        original: Any = None,
        owner: type | None = None,
    ) -> None:
        self._ours, self._compiling, self._set_compiling = ours, compiling, set_compiling
        self._original, self._owner = original, owner
        self.__name__, self.__doc__ = getattr(ours, "__name__", ""), ours.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        callback = self._compiling() if self._compiling and self._set_compiling else None
        if callback is None or self._set_compiling is None:
            return self._ours(*args, **kwargs)
        self._set_compiling(None)
        try:
            return self._ours(*args, **kwargs)
        finally:
            self._set_compiling(callback)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if self._owner is not None and type(instance) is not self._owner:
            bind = getattr(type(self._original), "__get__", None)
            return bind(self._original, instance, owner) if bind else self._original
        return self if instance is None else MethodType(self, instance)
