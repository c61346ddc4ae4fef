"""Sizes of the GPT of ``bench optimizers``; apart from the network, which needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from espresso_mpi.errors import ConfigError

from . import text


@dataclass(frozen=True)
class Shape:
    """Sizes of the GPT: symbols, characters of context, width, blocks, attention heads.

    Raises:
        ConfigError: a size is below 1, or the heads do not divide the width.
    """

    alphabet: int = text.ALPHABET
    context: int = 64
    width: int = 256
    layers: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")
        if self.width % self.heads:
            raise ConfigError(f"width: expected a multiple of the {self.heads} heads, got {self.width}")

    @property
    def parameters(self) -> int:
        """Number of weights, biases included."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (2 * self.alphabet + self.context + 2) * self.width
