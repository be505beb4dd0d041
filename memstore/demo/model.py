"""A small character-level transformer, sharded over the ranks with FSDP2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional


@dataclass(frozen=True)
class ModelSize:
    """The sizes of the model. The number of ranks divides all widths, so that all shards have the same size."""

    width: int = 128
    heads: int = 4
    layers: int = 4
    context: int = 64
    vocabulary: int = 128


class Block(nn.Module):
    """A layer of causal attention and a feed-forward layer, each after a norm."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm_feed = nn.LayerNorm(size.width)
        self.feed = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, context, width] to the same shape."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        fed: torch.Tensor = x + self.feed(self.norm_feed(x))
        return fed


class CharTransformer(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Map characters [batch, context] to logits [batch, context, vocabulary]."""
        x = self.tokens(characters) + self.positions[: characters.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.clone()  # FSDP2 hooks the output, and warns if it is a view


def sharded_model(size: ModelSize, *, seed: int) -> CharTransformer:
    """Return the model with its parameters sharded over the ranks; equal seeds give equal bits on all ranks."""
    torch.manual_seed(seed)
    model = CharTransformer(size)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def parameters_count(size: ModelSize) -> int:
    """Return how many numbers the model learns; allocate no memory for them."""
    with torch.device("meta"):
        return sum(p.numel() for p in CharTransformer(size).parameters())
