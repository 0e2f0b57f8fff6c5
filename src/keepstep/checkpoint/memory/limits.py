"""How much memory of a node checkpoints may take."""

from __future__ import annotations

from keepstep.core.node_memory import total_bytes


def default_limit_bytes() -> int:
    """Half of the memory that this machine has, or the tightest control group around this process."""
    return total_bytes() // 2


def gib(nbytes: int) -> str:
    """Bytes as people read them."""
    return f"{nbytes / (1 << 30):.2f} GiB"
