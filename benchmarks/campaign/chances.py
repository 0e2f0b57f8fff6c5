"""What a seed draws is the same in every run."""

from __future__ import annotations

import random
from collections.abc import Collection


def drawn(case: str, seed: int) -> random.Random:
    """A seed's own chances, the same in every run."""
    return random.Random(f"{case}:{seed}")


def kind_of(case: str, seed: int, kinds: Collection[str]) -> str:
    """A seed's own kind: each block of ``len(kinds)`` seeds has every kind once, in an order of its own."""
    block, place = divmod(seed, len(kinds))
    order = list(kinds)
    random.Random(f"{case}:block {block}").shuffle(order)
    return order[place]
