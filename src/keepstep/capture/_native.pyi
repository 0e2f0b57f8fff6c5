"""What runs in the middle of a training step, without a Python function of ours being entered."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, final

@final
class Here:
    """Finds the innermost line of the user's code.

    ``judge(file name)`` tells whose a file is: 0 the user's, 1 one that is skipped, more: the number of a library,
    which is skipped as well. ``enter(frame, through, inner)`` gives the line's site id; ``through`` is the number of
    the library that the line called, 0 for none, ``inner`` the innermost function of a library below it, if there is
    one. Each is asked once about the same thing.
    """

    def __new__(
        cls, judge: Callable[[str], int], enter: Callable[[FrameType, int, CodeType | None], int]
    ) -> Here: ...
    def __call__(self) -> int:
        """Site id of the user's line that led to the function that asks.

        Where no line is the user's, that of the innermost line of a library; 0 where there is none either.
        """

@final
class Buckets:
    """The all-reduces of DDP's reducer in the backward in progress, from their start to their end.

    ``queue(callback)`` has the autograd engine call when the gradients are computed; ``compiling()`` is None outside
    compiled modules; ``observers`` tell whether somebody looks at the operators that torch dispatches. The rest are
    fields of the records; ``typed`` has the flags by the type of the gradients.
    """

    plain: bool
    """Inside a backward that has no other backward inside it."""

    def __new__(
        cls,
        recorder: Any,
        here: Callable[[], int],
        queue: Callable[[Callable[[], None]], None],
        compiling: Callable[[], object],
        observers: tuple[Callable[[], object], ...],
        kind: int,
        op: int,
        peer: int,
        flags: int,
        typed: dict[Any, int],
    ) -> Buckets: ...
    def begin(self) -> None:
        """A backward begins, ``plain``. What an earlier one left is forgotten, without an end."""

    def call(
        self, whole: Callable[..., Any], direct: Callable[..., Any], group: int, general: Callable[..., Any]
    ) -> Callable[..., Any]:
        """An ``allreduce`` of a group, recorded, by the way that is ``direct``, or ``whole`` while it is observed.

        ``general`` is called where it cannot be recorded in this way.
        """

    def add(self, work: Any, operation: Any) -> None:
        """An operation was begun in a plain backward in the general way."""

    def computed(self) -> None:
        """The gradients are computed: wait for the Works in order, up to one that fails, and end each operation."""

    def over(self) -> None:
        """The backward is over: end what has no end yet."""

@final
class Oldest:
    """A garbage collector's callback that is passed on for the oldest generation only."""

    def __new__(cls, callback: Callable[[str, dict[str, int]], object]) -> Oldest: ...
    def __call__(self, when: str, info: dict[str, int], /) -> None: ...

@final
class Hidden:
    """A method ``ours`` for callers inside a compiled module: the compiler looks neither at it nor at what it calls.

    ``compiling()`` is what ``set_compiling`` puts back after the call, None outside compiled modules. With an ``owner``
    it binds to instances of just this class; to others ``original`` binds.
    """

    def __new__(
        cls,
        ours: Callable[..., Any],
        compiling: Callable[[], object] | None,
        set_compiling: Callable[[Any], object] | None,
        original: Any = None,
        owner: type | None = None,
    ) -> Hidden: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any: ...
