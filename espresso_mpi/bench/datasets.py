"""What models are trained and validated on: text that Python carries, and images that scikit-learn carries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError
from . import text

Batch = tuple[np.ndarray, np.ndarray]
"""Inputs and targets."""


class Dataset(Protocol):
    """Training batches of every rank, and validation batches that are the same in every run.

    Attributes:
        digest: equal exactly where two ranks have the same data.
        places: numbers of the validation examples.
        chunk: examples in one validation pass, so that its activations stay in the cache.
    """

    digest: str
    places: np.ndarray
    chunk: int

    def batches(self, ranks: int, rank: int, seed: int, batch: int) -> Callable[[], Batch]:
        """What makes this rank's next batch, of seed and rank alone, so that every method sees the same ones."""

    def validation(self, places: np.ndarray) -> Batch:
        """The validation examples with these numbers."""


class Characters:
    """Sequences of characters, int64 [batch, context], and the same one character later.

    Every ``stride``-th window of the validation text is predicted, windows without overlap.
    """

    chunk = 16

    def __init__(self, corpus: text.Corpus, context: int, stride: int = 4) -> None:
        self._corpus, self._context = corpus, context
        self.digest = corpus.sha256
        self.places = np.arange(0, len(corpus.validation) - context, context * stride)

    def batches(self, ranks: int, rank: int, seed: int, batch: int) -> Callable[[], Batch]:
        """Random places of this rank's part of the text."""
        start, stop = text.shard_bounds(len(self._corpus.train), ranks, rank)
        shard, rng = self._corpus.train[start:stop], np.random.default_rng([seed, rank])
        return lambda: self._sequences(shard, rng.integers(0, len(shard) - self._context, batch))

    def validation(self, places: np.ndarray) -> Batch:
        """Windows of the validation text."""
        return self._sequences(self._corpus.validation, places)

    def _sequences(self, symbols: np.ndarray, starts: np.ndarray) -> Batch:
        before, last = text.windows(symbols, starts, self._context)
        return before, np.concatenate([before[:, 1:], last[:, None]], axis=1)


@dataclass(frozen=True)
class Noise:
    """What is done to images, so that a small network does not know them all after a few steps.

    Attributes:
        deviation: of the normal noise that is added; pixels are from 0 to 1.
        copies: how many times each validation image is seen, with noise of its own.
    """

    deviation: float = 0.5
    copies: int = 8


class Digits:
    """Scikit-learn's 1797 handwritten digits with noise: float32 [batch, 1, 8, 8], and their classes, int64 [batch].

    A fifth of them, in an order that is always the same, is for validation, with noise that is always the same.

    Raises:
        ConfigError: scikit-learn is not installed.
    """

    chunk = 256

    def __init__(self, noise: Noise = Noise()) -> None:
        images, classes = _digits()
        rng = np.random.default_rng(0)
        order = rng.permutation(len(images))
        images, classes = images[order], classes[order]
        cut = len(images) - len(images) // 5
        self._noise, self._images, self._classes = noise, images[:cut], classes[:cut]
        seen = np.repeat(images[cut:], noise.copies, axis=0)
        self._seen, self._right = _noisy(seen, noise, rng), np.repeat(classes[cut:], noise.copies)
        self.places = np.arange(len(self._right))
        self.digest = hashlib.sha256(images.tobytes() + classes.tobytes()).hexdigest()

    def batches(self, ranks: int, rank: int, seed: int, batch: int) -> Callable[[], Batch]:
        """Random images of this rank's share, with new noise each time."""
        images, classes = self._images[rank::ranks], self._classes[rank::ranks]
        rng = np.random.default_rng([seed, rank])

        def batch_of() -> Batch:
            chosen = rng.integers(0, len(images), batch)
            return _noisy(images[chosen], self._noise, rng), classes[chosen]

        return batch_of

    def validation(self, places: np.ndarray) -> Batch:
        """Validation images with their noise."""
        return self._seen[places], self._right[places]


def _noisy(images: np.ndarray, noise: Noise, rng: np.random.Generator) -> np.ndarray:
    added = rng.standard_normal(images.shape, np.float32)
    return images + np.float32(noise.deviation) * added


def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "the images are those of scikit-learn, which is not installed: pip install scikit-learn; or choose a "
            "workload on text: gpt, lstm"
        ) from error
    found: Any = load_digits()
    return (found.images[:, None] / 16).astype(np.float32), found.target.astype(np.int64)
