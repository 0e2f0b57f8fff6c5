"""Data in pickles and JSON of unknown origin: lists, dicts, strings and numbers, in bounded time and memory.

Python's own unpickler gives no bounds: one instruction can reserve gigabytes, and a few bytes make lists that hold each
other so often that nothing gets to the end of them. Here nothing is called or imported, and what was read is measured.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec

from keepstep.core.errors import TraceError

MOST_BYTES = 128 << 20  # of a file
MOST_VALUES = 6_000_000  # of a file, and instructions of a pickle: 20,000 calls with 40 frames each have less
_DEEPEST = 24  # containers within containers
_LETTERS = 64  # characters of a string that count as one more value
_LONGEST_NUMBER = 64  # bytes

_CUT = "was cut short"
_FOREIGN = "no flight-recorder dump does"


def read_json(data: bytes) -> Any:
    """The value that JSON text holds.

    Raises:
        TraceError: it is no JSON, or goes beyond the bounds.
    """
    # Each value but the first comes after one of these characters.
    if sum(map(data.count, (b",", b":", b"[", b"{"))) > MOST_VALUES:
        raise TraceError(_too_many())
    try:
        return msgspec.json.decode(data)
    except RecursionError as error:
        raise TraceError(f"holds lists within lists, deeper than {_DEEPEST}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        cut = "truncated" in str(error)
        raise TraceError(_CUT if cut else f"is neither a pickle nor JSON: {error}") from error


def read_pickle(data: bytes) -> Any:
    """The value that a pickle of protocol 2 to 5 holds.

    Raises:
        TraceError: it is no pickle, holds anything but plain data, or goes beyond the bounds.
    """
    try:
        value = _Reading(data).value()
    except IndexError as error:
        raise TraceError(_CUT) from error
    except KeyError as error:
        raise TraceError(f"is damaged: it refers to its part {error}, which it does not have") from error
    if _size(value, _DEEPEST, {}) > MOST_VALUES:
        raise TraceError(_too_many())
    return value


def _too_many() -> str:
    return f"holds more than {MOST_VALUES:,} values; record fewer calls (TORCH_FR_BUFFER_SIZE)"


def _size(value: Any, deepest: int, known: dict[int, int]) -> int:
    """How many values a value has in it, each counted as often as it is met; ``known``: sizes of containers by id."""
    if isinstance(value, (str, bytes)):
        return 1 + len(value) // _LETTERS
    if not isinstance(value, (list, tuple, dict)) or not value:
        return 1
    size = known.get(id(cast("object", value)))
    if size is None:
        if not deepest:
            raise TraceError(f"holds lists within lists, deeper than {_DEEPEST}")
        parts = cast("list[Any]", value)
        size = 1 + sum(_size(part, deepest - 1, known) for part in parts)
        if isinstance(value, dict):
            size += sum(_size(part, deepest - 1, known) for part in cast("dict[Any, Any]", value).values())
        known[id(cast("object", value))] = size
    return size


class _Reading:
    """Follows the instructions of one pickle. Those it has no method for make other things than plain data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # what was on the stack at each mark that is still open
        self._memo: dict[int, Any] = {}

    def value(self) -> Any:
        """The value at the end of the pickle."""
        data, memo, constants, stop = self._data, self._memo, _CONSTANTS, ord(".")
        for _ in range(MOST_VALUES):
            code = data[self._at]
            self._at += 1
            # The commonest instructions are followed here: a call for each of them would double the time.
            if code == _GET:
                self._stack.append(memo[data[self._at]])
                self._at += 1
            elif code == _PUT:
                memo[data[self._at]] = self._stack[-1]
                self._at += 1
            elif code == _SMALL_NUMBER:
                self._stack.append(data[self._at])
                self._at += 1
            elif code in constants:
                self._stack.append(constants[code])
            elif code == _LIST:
                self._stack.append([])
            elif code == stop:
                return self._stack[-1]
            elif code in _ACTS:
                _ACTS[code](self)
            else:
                raise TraceError(self._refused(code))
        raise TraceError(_too_many())

    def _refused(self, code: int) -> str:
        """Why the pickle is not read on."""
        if code == ord("c"):  # module and name follow as lines
            words = self._data[self._at : self._at + 200].split(b"\n")[:2]
            name = ".".join(word.decode(errors="replace") for word in words)
            return f"holds an object of {name}: {_FOREIGN}"
        if code == 0x93:
            name = ".".join(str(word)[:100] for word in self._stack[-2:] if isinstance(word, str))
            return f"holds an object of {name}: {_FOREIGN}"
        if code in b"PQ":
            return f"refers to data outside of it: {_FOREIGN}"
        if code in _OTHER_DATA:
            return f"holds sets, objects or buffers: {_FOREIGN}"
        return f"is neither a pickle nor JSON: it has no meaning at byte {self._at - 1}"

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise TraceError(_CUT)
        found = self._data[self._at : end]
        self._at = end
        return found

    def _number(self, size: int) -> int:
        """An unsigned number of ``size`` bytes."""
        return int.from_bytes(self._bytes(size), "little")

    def skip(self, size: int) -> None:
        self._bytes(size)

    def push_dict(self) -> None:
        self._stack.append({})

    def unsigned(self, size: int) -> None:
        self._stack.append(self._number(size))

    def signed(self) -> None:
        self._stack.append(int.from_bytes(self._bytes(4), "little", signed=True))

    def long(self, size: int) -> None:
        """A signed number of any length, which comes first in ``size`` bytes."""
        length = self._number(size)
        if length > _LONGEST_NUMBER:
            raise TraceError(f"holds a number of {length} bytes: {_FOREIGN}")
        self._stack.append(int.from_bytes(self._bytes(length), "little", signed=True))

    def real(self) -> None:
        self._stack.append(struct.unpack(">d", self._bytes(8))[0])

    def text(self, size: int) -> None:
        """A string; its length comes first in ``size`` bytes."""
        self._stack.append(self._bytes(self._number(size)).decode(errors="replace"))

    def raw(self, size: int) -> None:
        self._stack.append(self._bytes(self._number(size)))

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        found = self._stack
        self._stack = self._below.pop()
        return found

    def append(self) -> None:
        value = self._stack.pop()
        self._list().append(value)

    def appends(self) -> None:
        values = self._since_mark()
        self._list().extend(values)

    def _list(self) -> list[Any]:
        if not isinstance(self._stack[-1], list):
            raise TraceError("is damaged: it adds to a list that is none")
        return cast("list[Any]", self._stack[-1])

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self._since_mark())

    def _set(self, pairs: list[Any]) -> None:
        """Put keys and values, in turn, into the dict on top of the stack."""
        target = self._stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise TraceError("is damaged: it adds to a dict that is none, or a key without a value")
        for key in pairs[::2]:
            # Only these are compared in a time that the pickle's author cannot choose.
            if not isinstance(key, (str, bytes)) and not (isinstance(key, int) and abs(key) < 1 << 63):
                raise TraceError(f"has a key of type {type(key).__name__} in a dict: {_FOREIGN}")
        cast("dict[Any, Any]", target).update(zip(pairs[::2], pairs[1::2], strict=True))

    def tuple_since_mark(self) -> None:
        values = tuple(self._since_mark())
        self._stack.append(values)

    def tuple_of(self, count: int) -> None:
        values = tuple(self._stack[-count:])
        if len(values) < count:
            raise IndexError
        del self._stack[-count:]
        self._stack.append(values)

    def put(self, size: int) -> None:
        self._memo[self._number(size)] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, size: int) -> None:
        self._stack.append(self._memo[self._number(size)])


def _with(method: Callable[..., None], argument: Any) -> Callable[[_Reading], None]:
    return lambda reading: method(reading, argument)


_GET, _PUT, _SMALL_NUMBER, _LIST = b"hqK]"
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
_OTHER_DATA = b"RboiS" + bytes((0x81, 0x82, 0x83, 0x84, 0x8F, 0x90, 0x91, 0x92, 0x96, 0x97, 0x98))
# The other instructions by code, as in Python's ``pickletools``.
_ACTS: dict[int, Callable[[_Reading], None]] = {
    0x80: _with(_Reading.skip, 1), 0x95: _with(_Reading.skip, 8),
    ord("M"): _with(_Reading.unsigned, 2), ord("J"): _Reading.signed,
    0x8A: _with(_Reading.long, 1), 0x8B: _with(_Reading.long, 4), ord("G"): _Reading.real,
    0x8C: _with(_Reading.text, 1), ord("X"): _with(_Reading.text, 4), 0x8D: _with(_Reading.text, 8),
    ord("U"): _with(_Reading.text, 1), ord("T"): _with(_Reading.text, 4),
    ord("C"): _with(_Reading.raw, 1), ord("B"): _with(_Reading.raw, 4), 0x8E: _with(_Reading.raw, 8),
    ord("}"): _Reading.push_dict, ord("("): _Reading.mark,
    ord("a"): _Reading.append, ord("e"): _Reading.appends,
    ord("s"): _Reading.set_item, ord("u"): _Reading.set_items,
    ord("t"): _Reading.tuple_since_mark, 0x85: _with(_Reading.tuple_of, 1), 0x86: _with(_Reading.tuple_of, 2),
    0x87: _with(_Reading.tuple_of, 3),
    ord("r"): _with(_Reading.put, 4), 0x94: _Reading.memoize,
    ord("j"): _with(_Reading.get, 4),
}  # fmt: skip
