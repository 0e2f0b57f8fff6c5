"""A small GPT, whole or as one pipeline stage of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compute import Compute, Enter, Leave, Span
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    layers: int
    dim: int
    heads: int
    sequence: int
    vocabulary: int


class Attention(nn.Module):
    """Causal self-attention; its heads are split when the projections are (tensor parallelism)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        y = functional.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), is_causal=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward with residuals; ``compute`` says what it costs beyond its own arithmetic."""

    def __init__(self, shape: Shape, compute: Compute) -> None:
        super().__init__()
        self.compute = compute
        self.attention_norm = nn.LayerNorm(shape.dim)
        self.attention = Attention(shape.dim, shape.heads)
        self.forward_norm = nn.LayerNorm(shape.dim)
        self.up = nn.Linear(shape.dim, 4 * shape.dim, bias=False)
        self.down = nn.Linear(4 * shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        span = Span(self.compute)
        x = Enter.apply(x, span)
        x = x + self.attention(self.attention_norm(x))
        x = x + self.down(functional.gelu(self.up(self.forward_norm(x))))
        return Leave.apply(x, span)


class Stage(nn.Module):
    """Layers ``first_layer`` to ``end_layer - 1``; with the embedding if first, with the head if last.

    In: tokens (batch, sequence) for the first stage, else activations (batch, sequence, dim).
    Out: logits (batch, sequence, vocabulary) from the last stage, else activations.
    """

    def __init__(self, shape: Shape, compute: Compute, first_layer: int, end_layer: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim) if first_layer == 0 else None
        self.position = nn.Embedding(shape.sequence, shape.dim) if first_layer == 0 else None
        self.blocks = nn.ModuleList(Block(shape, compute) for _ in range(first_layer, end_layer))
        last = end_layer == shape.layers
        self.norm = nn.LayerNorm(shape.dim) if last else None
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None and self.position is not None:
            x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
