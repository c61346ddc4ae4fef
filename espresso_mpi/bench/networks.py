"""An LSTM and a residual network in PyTorch. Nothing imports this file but suites that train them, when they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class CharLSTM(nn.Module):
    """Embedding, an LSTM of so many layers, and a head over the alphabet; ``seed`` alone decides the weights."""

    def __init__(self, alphabet: int, width: int, layers: int, seed: int) -> None:
        super().__init__()
        with _seeded(seed):
            self.embedding = nn.Embedding(alphabet, width)
            self.lstm = nn.LSTM(width, width, layers, batch_first=True)
            self.head = nn.Linear(width, alphabet)

    def forward(self, symbols: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of ``targets`` after ``symbols``, both int64 [batch, context]."""
        seen, _ = self.lstm(self.embedding(symbols))
        return functional.cross_entropy(self.head(seen).flatten(0, 1), targets.flatten())


class ImageResNet(nn.Module):
    """A residual network for images [batch, 1, height, width]: three stages that halve the image and double the width.

    Norms are over groups of channels, not over the batch: they have no statistics that ranks would have to average.

    Args:
        width: channels of the first stage, a multiple of 4.
        layers: residual blocks of each stage.
    """

    def __init__(self, classes: int, width: int, layers: int, seed: int) -> None:
        super().__init__()
        with _seeded(seed):
            widths = [width] + [width << stage for stage in range(3) for _ in range(layers)]
            self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
            self.blocks = nn.Sequential(*(_Block(before, after) for before, after in pairwise(widths)))
            self.norm = nn.GroupNorm(4, widths[-1])
            self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Mean cross-entropy in nats of ``classes``, int64 [batch]."""
        seen = functional.relu(self.norm(self.blocks(self.stem(images)))).mean(dim=(2, 3))
        return functional.cross_entropy(self.head(seen), classes)


class _Block(nn.Module):
    """Two convolutions beside a shortcut; norms and rectifiers before them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for width in (before, after))
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = functional.relu(self.norms[0](x))
        inner = self.second(functional.relu(self.norms[1](self.first(ready))))
        return inner + self.shortcut(x if isinstance(self.shortcut, nn.Identity) else ready)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """PyTorch's own initialisation, from this seed, which leaves its generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
