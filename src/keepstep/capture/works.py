"""A ``Work`` that callers get in the place of torch's own, which also records when it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import Work

from keepstep.capture.internals import hidden
from keepstep.capture.recorder import Operation


class RecordedWork(Work):
    """Forwards everything to the native Work, and ends the record of the operation when a wait returns.

    If the caller asks for the future instead, the record ends when the future does. If the caller does neither, the
    record ends when this object is dropped.
    """

    def __init__(self, native: Any, operation: Operation) -> None:
        super().__init__()
        self.native = native
        self.operation = operation
        self._ends_by_future = False

    @hidden
    def wait(self, *args: Any, **kwargs: Any) -> Any:
        operation = self.operation
        operation.waiting()
        try:
            result = self.native.wait(*args, **kwargs)
        except BaseException:
            operation.fail()
            raise
        operation()
        return result

    @hidden
    def is_completed(self) -> bool:
        completed = self.native.is_completed()
        if completed:
            self.operation.waiting()
            self.operation()
        return completed

    @hidden
    def get_future(self) -> Any:
        future = self.native.get_future()
        if not self._ends_by_future:
            self._ends_by_future = True
            future.add_done_callback(self.operation)
        return future

    @hidden
    def __del__(self) -> None:
        if not self._ends_by_future:
            self.operation()


def _forwarded(name: str) -> Callable[..., Any]:
    def forward(self: RecordedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.native, name)(*args, **kwargs)

    forward.__name__ = name
    return hidden(forward)


for _name, _attribute in list(vars(Work).items()):
    if not _name.startswith(("__", "_pybind11")) and _name not in vars(RecordedWork) and _name != "unbox":
        setattr(RecordedWork, _name, _forwarded(_name))
