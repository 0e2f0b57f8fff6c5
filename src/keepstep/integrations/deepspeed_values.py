"""What DeepSpeed and its users put into checkpoints beside tensors, as values that a snapshot can hold.

A snapshot names no code. The few classes that DeepSpeed stores as objects, and some that users do, are listed here: one
of them becomes ``{(MARK, its name): its fields}``, and reading makes nothing but these. Anything else is left as it is,
for `flatten` to take or to refuse by its path.
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
    """``value`` with the objects that are known here replaced; shares tensors with it, and changes nothing in it.

    Raises:
        CheckpointError: a key of a dict is one of those that stand for objects, or it is nested too deeply.
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
    """What `to_plain` made ``value`` of.

    Raises:
        CheckpointError: an object of a class that is not one of those, or is not in this DeepSpeed.
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
    """A small state as a row of bytes, to be sent or to be put into somebody else's file.

    Raises:
        CheckpointError: it has a value that cannot be saved; names its path.
    """
    header, spans = flatten(to_plain(state), step=0)
    text = bytearray(encode_header(header))
    length = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little"))
    return torch.cat([torch.frombuffer(length + text, dtype=torch.uint8), laid_out(header, spans)])


def unpack(packed: Any) -> Any:
    """The state that `pack` was given.

    Raises:
        CheckpointError: it is anything else.
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
    """A dict of the same kind with ``item(key, value)`` in it."""
    made = type(value)((key, item(key, one)) for key, one in value.items())
    if hasattr(value, "_metadata"):  # of a module's state_dict
        made._metadata = value._metadata
    return made


def _name(key: Any) -> str:
    """The class that a key stands for; "" for any other key."""
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
