"""A character language model in plain numpy, with its backward pass written by hand.

``context`` characters -> embedding -> one hidden layer of rectified units -> softmax over the alphabet. Every
weight is a view into one flat vector and every gradient a view into another: the optimizer is two vector
operations, and the hash that shows whether replicas agree is one call.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from espresso_mpi.errors import ConfigError

from .defaults import Train as Defaults


def to_bits(nats: float) -> float:
    """Bits from nats."""
    return nats / math.log(2.0)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the network, all in units: characters of context, symbols, and widths of the two layers."""

    alphabet: int = 64
    context: int = 12
    embedding: int = 16
    hidden: int = Defaults.hidden

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and array shape of every tensor, in the order in which the backward pass finishes them."""
        return {
            "output.weight": (self.hidden, self.alphabet),
            "output.bias": (self.alphabet,),
            "hidden.weight": (self.context * self.embedding, self.hidden),
            "hidden.bias": (self.hidden,),
            "embedding": (self.alphabet, self.embedding),
        }

    def scales(self) -> dict[str, float]:
        """Standard deviations at the start of the tensors that do not start as zeros.

        Variance 2/fan-in before the rectifier, 1/fan-in before the softmax, unit embeddings.
        """
        return {
            "embedding": 1.0,
            "hidden.weight": math.sqrt(2 / (self.context * self.embedding)),
            "output.weight": math.sqrt(1 / self.hidden),
        }

    @property
    def parameters(self) -> int:
        """Number of weights, biases included."""
        return sum(math.prod(shape) for shape in self.tensors().values())


class CharModel:
    """The network with its weights, its gradients and nothing else.

    ``params`` and ``grads`` map tensor names to arrays of ``dtype`` (float32; float64 for checking the
    gradient), which are views into the flat vectors ``weights`` and ``gradient`` of ``shape.parameters``
    elements.
    """

    def __init__(self, shape: ModelShape, seed: int = 0, dtype: type = np.float32) -> None:
        self.shape = shape
        self.weights: np.ndarray = np.zeros(shape.parameters, dtype)
        self.gradient: np.ndarray = np.zeros(shape.parameters, dtype)
        self.params = _views(self.weights, shape)
        self.grads = _views(self.gradient, shape)
        rng = np.random.default_rng(seed)
        for name, scale in shape.scales().items():
            self.params[name][...] = scale * rng.standard_normal(self.params[name].shape)

    def loss(self, contexts: np.ndarray, targets: np.ndarray) -> float:
        """Mean cross-entropy in nats of ``targets`` [batch] after ``contexts`` [batch, context], integers."""
        _, _, logits = self._forward(contexts)
        return float(_softmax_and_loss(logits, targets))

    def loss_and_gradient(self, contexts: np.ndarray, targets: np.ndarray) -> float:
        """As ``loss``, and overwrites ``grads`` with the gradient of that mean."""
        embedded, hidden, probabilities = self._forward(contexts)
        loss = _softmax_and_loss(probabilities, targets)
        for _ in self._backward(contexts, embedded, hidden, _logit_gradient(probabilities, targets)):
            pass
        return float(loss)

    def gradients(self, contexts: np.ndarray, targets: np.ndarray) -> Iterator[str]:
        """As ``loss_and_gradient``, piece by piece: the name of each tensor as soon as its gradient is in ``grads``."""
        embedded, hidden, probabilities = self._forward(contexts)
        _softmax_and_loss(probabilities, targets)
        yield from self._backward(contexts, embedded, hidden, _logit_gradient(probabilities, targets))

    def digest(self) -> str:
        """SHA-256 of the weights' bits; equal exactly where two replicas agree to the last bit."""
        return hashlib.sha256(self.weights.tobytes()).hexdigest()

    def _forward(self, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        p = self.params
        embedded = p["embedding"][contexts].reshape(len(contexts), -1)
        hidden = embedded @ p["hidden.weight"]
        hidden += p["hidden.bias"]
        np.maximum(hidden, 0, out=hidden)
        logits = hidden @ p["output.weight"]
        logits += p["output.bias"]
        return embedded, hidden, logits

    def _backward(
        self, contexts: np.ndarray, embedded: np.ndarray, hidden: np.ndarray, d_logits: np.ndarray
    ) -> Iterator[str]:
        p, g = self.params, self.grads
        np.matmul(hidden.T, d_logits, out=g["output.weight"])
        yield "output.weight"
        np.sum(d_logits, axis=0, out=g["output.bias"])
        yield "output.bias"
        d_hidden = d_logits @ p["output.weight"].T
        d_hidden *= hidden > 0
        np.matmul(embedded.T, d_hidden, out=g["hidden.weight"])
        yield "hidden.weight"
        np.sum(d_hidden, axis=0, out=g["hidden.bias"])
        yield "hidden.bias"
        yield from self._backward_to_symbols(contexts, d_hidden @ p["hidden.weight"].T)

    def _backward_to_symbols(self, contexts: np.ndarray, d_embedded: np.ndarray) -> Iterator[str]:
        rows = d_embedded.reshape(-1, self.shape.embedding)
        np.matmul(self._one_hot(contexts).T, rows, out=self.grads["embedding"])
        yield "embedding"

    def _one_hot(self, contexts: np.ndarray) -> np.ndarray:
        # Rows of the embedding occur many times in a batch. One small matrix product sums them several times
        # faster than np.add.at, and always in the same order.
        symbols = contexts.ravel()
        one_hot = np.zeros((symbols.size, self.shape.alphabet), self.weights.dtype)
        one_hot[np.arange(symbols.size), symbols] = 1
        return one_hot


def _views(flat: np.ndarray, shape: ModelShape) -> dict[str, np.ndarray]:
    views, start = {}, 0
    for name, dims in shape.tensors().items():
        size = math.prod(dims)
        views[name] = flat[start : start + size].reshape(dims)
        start += size
    return views


def _softmax_and_loss(logits: np.ndarray, targets: np.ndarray) -> np.floating:
    """Turns ``logits`` [batch, alphabet] into probabilities in place; returns the mean loss in nats."""
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(targets)), targets]
    np.exp(logits, out=logits)
    total = logits.sum(axis=1, keepdims=True)
    logits /= total
    return np.mean(np.log(total[:, 0]) - chosen)


def _logit_gradient(probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(p - one_hot(target)) / batch, in place."""
    probabilities[np.arange(len(targets)), targets] -= 1
    probabilities /= len(targets)
    return probabilities


class SGD:
    """m <- momentum m + (1 - momentum) g, w -= rate m, in place on flat vectors of equal length and dtype.

    Plain by default, and on purpose: an update that is linear in the gradient is what error feedback is exact for. A
    part of the gradient that arrives late has then the same effect as one on time, only later, and the
    weights stay within rate x residual of those without compression. Adam divides by a running size of the
    gradients it sees; compressed ones are larger and rarer, so Adam would hide a part of what a bad
    compressor does and punish a good one, and the comparison would be one of optimizers. Momentum is linear
    too, but does not go with gradients that come late. What methods lose under momentum and AdamW is measured by
    ``bench train --momentum`` and ``bench optimizers``, and stands in docs/compressors.md.
    """

    def __init__(self, weights: np.ndarray, momentum: float = 0.0) -> None:
        self._weights, self._momentum = weights, weights.dtype.type(momentum)
        self._scratch = np.empty_like(weights)
        self._mean = np.zeros_like(weights) if momentum else None

    def step(self, gradient: np.ndarray, rate: float) -> None:
        """One update with learning rate ``rate``; ``gradient`` is left as it is."""
        if self._mean is not None:
            np.multiply(gradient, 1 - self._momentum, out=self._scratch)
            self._mean *= self._momentum
            self._mean += self._scratch
            gradient = self._mean
        np.multiply(gradient, self._weights.dtype.type(rate), out=self._scratch)
        self._weights -= self._scratch


def learning_rate(step: int, steps: int, peak: float, warmup: float = 0.15) -> float:
    """Linear rise over the first ``warmup`` share of ``steps``, then a cosine down to 2 % of ``peak``."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return peak * (step + 1) / rise
    phase = (step - rise) / max(1, steps - rise)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * phase)))
