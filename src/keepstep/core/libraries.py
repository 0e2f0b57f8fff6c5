"""Libraries that train in the user's name: their frames are between the user's line and torch."""

from __future__ import annotations

# By the name of the package, with the name that the user knows.
LIBRARIES = {
    "accelerate": "accelerate",
    "composer": "composer",
    "deepspeed": "deepspeed",
    "fairscale": "fairscale",
    "ignite": "ignite",
    "lightning": "lightning",
    "lightning_fabric": "lightning",
    "megatron": "megatron",
    "peft": "peft",
    "pytorch_lightning": "lightning",
    "sentence_transformers": "sentence_transformers",
    "torchmetrics": "torchmetrics",
    "transformers": "transformers",
    "trl": "trl",
}


def site_text(file: str, line: int, function: str, package: str = "", inner: str = "") -> str:
    """A place in the user's code in words.

    ``package``: the one of ``LIBRARIES`` that it called, "" for none; ``inner``: the function that then called torch.
    """
    through = f" (called through {LIBRARIES[package]}{', ' if inner else ''}{inner})" if package else ""
    return f"{file}:{line} {function}{through}"
