"""A small GPT and its optimizers in PyTorch: the only file of the package that imports torch.

Nothing imports this file but ``bench optimizers``, when it runs.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
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


class Replica:
    """One rank's model and optimizer.

    Args:
        optimizer: "adamw", with PyTorch's betas 0.9 and 0.999 and weight decay 0.01, or "sgd".
        momentum: of "sgd".
        threads: of this rank's matrix products.
    """

    def __init__(self, shape: Shape, seed: int, optimizer: str, momentum: float, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = GPT(shape, seed)
        parameters = self.model.parameters()
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=0.0)
            if optimizer == "adamw"
            else torch.optim.SGD(parameters, lr=0.0, momentum=momentum)
        )

    def gradients(self, symbols: np.ndarray, targets: np.ndarray) -> dict[str, Tensor]:
        """The gradient of the mean loss on a batch, int64 [batch, context]: the arrays that ``update`` applies."""
        self._optimizer.zero_grad(set_to_none=False)
        self.model(torch.from_numpy(symbols), torch.from_numpy(targets)).backward()
        return {name: weights.grad for name, weights in self.model.named_parameters()}

    def update(self, rate: float) -> None:
        """One step of the optimizer with learning rate ``rate``."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def loss(self, symbols: np.ndarray, targets: np.ndarray) -> float:
        """Mean loss in nats on a batch, int64 [batch, context]."""
        with torch.no_grad():
            return float(self.model(torch.from_numpy(symbols), torch.from_numpy(targets)))

    def digest(self) -> str:
        """SHA-256 of the weights' bits; equal exactly where two replicas agree to the last bit."""
        whole = hashlib.sha256()
        for weights in self.model.parameters():
            whole.update(weights.detach().numpy().tobytes())
        return whole.hexdigest()


def version() -> str:
    """PyTorch's version: runs of different ones are not compared."""
    return str(torch.__version__)
