"""A small GPT in PyTorch. Nothing imports this file but suites that train it, when they run."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .gpt_shape import Shape


class GPT(nn.Module):
    """A decoder-only transformer over characters, as in GPT-2: learned positions, norms before each block, GELU.

    All dropout is left out and the head has weights of its own. Weights are normal with standard deviation 0.02, those
    that write into the residual stream divided by √(2·layers), as in GPT-2; ``seed`` alone decides them.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.alphabet, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.alphabet, bias=False)
        self._initialise(torch.Generator().manual_seed(seed), shape)

    def _initialise(self, generator: torch.Generator, shape: Shape) -> None:
        with torch.no_grad():
            for name, weights in self.named_parameters():
                if name.endswith("bias"):
                    weights.zero_()
                elif weights.ndim > 1:
                    residual = name.endswith(("attention_out.weight", "down.weight"))
                    scale = 0.02 / math.sqrt(2 * shape.layers) if residual else 0.02
                    weights.normal_(0, scale, generator=generator)

    def forward(self, symbols: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of ``targets`` after ``symbols``, both int64 [batch, context]."""
        return functional.cross_entropy(self.logits(symbols).flatten(0, 1), targets.flatten())

    def logits(self, symbols: Tensor) -> Tensor:
        """What is expected after each of ``symbols``, int64 [batch, context]: [batch, context, alphabet]."""
        x = self.embedding(symbols) + self.position.weight[: symbols.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    """Causal self-attention and a feed-forward layer of four times the width."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x))
        return x + self.down(functional.gelu(self.up(self.norm(x))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
