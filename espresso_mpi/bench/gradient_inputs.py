"""Gradients of a GPT in training, as inputs of a collective. Nothing imports this file but suites, when they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import text
from .datasets import Characters
from .gpt import GPT
from .gpt_shape import Shape
from .harness.checks import Inputs
from .model import learning_rate
from .replica import Replica

PEAK, STEPS = 1e-3, 300
"""Of the learning rate, and of its schedule."""


class Training:
    """The training of a GPT by AdamW in float32, one sequence on each rank in a step. Collective.

    Attributes:
        number: of the step, from 0.
        own: this rank's gradient in it, tensor after tensor, as many elements as asked for. mean: of all ranks.
        total: the sum of the means of all steps before it.

    Args:
        n: elements. The GPT is the smallest one of four layers that has as many.
    """

    def __init__(self, comm: Any, n: int) -> None:
        self._comm, self._n, self.number = comm, n, -1
        self.mean, self.total = np.zeros((2, n), np.float32)
        shape = next(shape for width in range(16, 1 << 20, 16) if (shape := Shape(width=width)).parameters >= n)
        self._replica = Replica(GPT(shape, 0), "adamw", 0.9, 1)
        self._batch = Characters(text.load(), shape.context).batches(comm.size, comm.rank, 0, 1)
        self.advance()

    def advance(self) -> None:
        """Update the weights by the mean gradient of the step, and compute the gradients of the next. Collective."""
        if self.number >= 0:
            self._replica.update(learning_rate(self.number % STEPS, STEPS, PEAK))
        self.total += self.mean
        self.number += 1
        grads = [gradient.numpy() for gradient in self._replica.gradients(*self._batch()).values()]
        own = np.concatenate([gradient.ravel() for gradient in grads])
        mean = np.empty_like(own)
        self._comm.Allreduce(own, mean)
        mean /= self._comm.size
        self.own, self.mean = own[: self._n], mean[: self._n]
        ends = np.cumsum([gradient.size for gradient in grads])
        for gradient, part in zip(grads, np.split(mean, ends[:-1])):
            gradient[...] = part.reshape(gradient.shape)


class Gradients(Inputs):
    """The inputs of one method: with each call, the gradients of the next step.

    Args:
        training: the same for all methods that take turns.
        name: of the tensor.
    """

    def __init__(self, training: Training, name: str) -> None:
        self._training, self._name, self._calls = training, name, 0
        self._mean, self._lost = np.zeros((2, training.own.size), np.float32)

    def refill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Count the array's result of the step before, and put this rank's next gradient there."""
        x = arrays[self._name]
        if self._calls:
            self._lost += self._mean
            self._lost -= x
        while self._training.number < self._calls:
            self._training.advance()
        self._calls += 1
        self._mean = self._training.mean
        x[...] = self._training.own

    def error(self) -> float:
        """‖Σ means − Σ results‖ / ‖Σ means‖ of all steps but the last; with feedback, it falls with their number."""
        return float(np.linalg.norm(self._lost) / np.linalg.norm(self._training.total))
