"""What spares are told that the workers of another node import. No secret that a script sets goes over the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from keepstep import wire
from keepstep.detect.secrets import blanked

_HARMLESS = ("OMP_", "MKL_", "KMP_", "NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "TORCH", "PYTORCH_", "TOKENIZERS_")
_BY_RANK = "CUDA_VISIBLE_DEVICES"


def for_spares(modules: Sequence[str], environment: Mapping[str, str]) -> wire.Imports | None:
    """The message; None where spares had better import nothing ahead.

    That is where the script sets a variable before its imports that may be a secret, may follow from the rank, or is
    too long to be told: without it the imports might do something else.
    """
    for name, value in environment.items():
        is_harmless = name.startswith(_HARMLESS) and name != _BY_RANK
        if not is_harmless or blanked(f"{name}={value}") != f"{name}={value}":
            return None
    names = [name for name in modules if len(name) <= wire.MOST_LABEL][: wire.MOST_MODULES]
    imports = wire.Imports(tuple(names), tuple(environment.items()))
    try:
        return msgspec.convert(msgspec.to_builtins(imports), wire.Imports)
    except msgspec.ValidationError:
        return None
