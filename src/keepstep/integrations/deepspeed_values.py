"""Turns the objects that DeepSpeed and its users put into checkpoints into values that a snapshot can hold, and back.

A snapshot names no code, so the few classes that DeepSpeed stores as objects, and some that users store, are listed
here. An object of such a class becomes ``{(MARK, its name): its fields}``, and reading makes objects of no other class.
Any other value is left as it is, for `flatten` to accept or to refuse.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, cast

import torch

from keepstep.checkpoint.header import MOST_DEPTH, decode_header, encode_header, join
from keepstep.checkpoint.state import flatten, laid_out, unflatten
from keepstep.core.errors import CheckpointError

MARK = "keepstep.object"
_PATH = "Path"
_CLASSES = {
    "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "Namespace": "argparse",
    "SimpleNamespace": "types",
    "SubparamShape": "deepspeed.checkpoint.universal_checkpoint",
    "ZeroStageEnum": "deepspeed.runtime.zero.config",
    "fragment_address": "deepspeed.utils.tensor_fragment",
}
_LENGTH_BYTES = 8


def to_plain(value: Any, path: str = "", depth: int = 0) -> Any:
    """A copy of ``value`` with objects of the listed classes replaced; tensors are shared with it.

    Raises:
        CheckpointError: a dict has a key that stands for an object, or ``value`` is nested too deeply.
    """
    if depth > MOST_DEPTH:
        raise CheckpointError(
            f"{path[:200]}: nested deeper than {MOST_DEPTH}, or in itself; give a flat state"
        )
    kind = cast("Any", type(cast("object", value)))
    if kind is dict or kind is OrderedDict:
        if any(_name(key) for key in value):
            raise CheckpointError(
                f"{path or 'the state'}: a key that begins with {MARK!r}, which is keepstep's own"
            )
        return _mapped(value, lambda key, item: to_plain(item, join(path, str(key)), depth + 1))
    if kind in (list, tuple):
        return cast("Any", kind)(
            to_plain(item, join(path, str(index)), depth + 1) for index, item in enumerate(value)
        )
    if isinstance(value, PurePath):
        return {(MARK, _PATH): str(value)}
    if _CLASSES.get(kind.__qualname__) == kind.__module__:
        fields = value.value if issubclass(kind, Enum) else value.__dict__
        return {(MARK, kind.__qualname__): to_plain(fields, path, depth + 1)}
    return value


def from_plain(value: Any, path: str = "") -> Any:
    """The value that `to_plain` was given.

    Raises:
        CheckpointError: an object's class is not listed, or this DeepSpeed does not have it.
    """
    kind = cast("Any", type(cast("object", value)))
    if kind is dict or kind is OrderedDict:
        name = _name(next(iter(value))) if len(value) == 1 else ""
        if name:
            return _made(name, from_plain(next(iter(value.values())), path), path)
        return _mapped(value, lambda key, item: from_plain(item, join(path, str(key))))
    if kind in (list, tuple):
        return cast("Any", kind)(from_plain(item, join(path, str(index))) for index, item in enumerate(value))
    return value


def pack(state: Any) -> torch.Tensor:
    """A small state as a row of bytes, to be sent to other ranks or put into DeepSpeed's files.

    Raises:
        CheckpointError: the state has a value that cannot be saved; the message names its path.
    """
    header, spans = flatten(to_plain(state), step=0)
    text = bytearray(encode_header(header))
    length = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little"))
    return torch.cat([torch.frombuffer(length + text, dtype=torch.uint8), laid_out(header, spans)])


def unpack(packed: Any) -> Any:
    """The state that `pack` was given.

    Raises:
        CheckpointError: ``packed`` is anything else.
    """
    if not isinstance(packed, torch.Tensor) or packed.dtype != torch.uint8 or packed.dim() != 1:
        raise CheckpointError("a packed state that is no row of bytes")
    row = packed.cpu()
    begin = _LENGTH_BYTES + int.from_bytes(row[:_LENGTH_BYTES].numpy().tobytes(), "little")
    if not _LENGTH_BYTES < begin <= row.numel():
        raise CheckpointError("a packed state that is cut short")
    header = decode_header(row[_LENGTH_BYTES:begin].numpy().tobytes())
    if header.data_bytes > row.numel() - begin:
        raise CheckpointError("a packed state that is cut short")
    data = row[begin:]
    return from_plain(
        unflatten(header, [data[e.offset : e.offset + e.nbytes].clone() for e in header.storages])
    )


def _mapped(value: Any, item: Callable[[Any, Any], Any]) -> Any:
    """A dict of the same kind with ``item(key, value)`` in place of each value."""
    made = type(value)((key, item(key, one)) for key, one in value.items())
    if hasattr(value, "_metadata"):  # the versions that a module's state_dict carries
        made._metadata = value._metadata
    return made


def _name(key: Any) -> str:
    """The name of the class that a key stands for; "" for any other key."""
    pair = cast("tuple[Any, ...]", key) if type(key) is tuple else ()
    return str(pair[1]) if len(pair) == 2 and pair[0] == MARK else ""


def _made(name: str, fields: Any, path: str) -> Any:
    try:
        if name == _PATH:
            return Path(fields)
        found: Any = getattr(import_module(_CLASSES[name]), name)
        if issubclass(found, Enum):
            return found(fields)
        made: Any = found.__new__(found)
        made.__dict__.update({str(key): value for key, value in fields.items()})
        return made
    except (KeyError, ImportError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path or 'the state'}: a {name[:40]} cannot be made here: {error}") from None
