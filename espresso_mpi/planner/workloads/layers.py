"""Layers of neural networks as the planner sees them: the shapes of their parameters, and what they have to compute.

Work is counted for float32 training, so that a *pass* over n elements moves 4n bytes. Matrix products and convolutions
are priced by their operations, everything else by its passes over memory, and weights by being read and their gradients
by being written once a step. How many passes: see the constants below; each is (forward, backward).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Shape = tuple[int, ...]
Parameters = tuple[tuple[str, Shape], ...]

_BYTES = 4

Passes = tuple[int, int]
NORM: Passes = (3, 5)
"""Reads its input for the moments and again to normalise it, writes; backward it needs input and gradient twice."""
ACTIVATION: Passes = (2, 3)
"""Reads and writes; backward it reads gradient and output, writes."""
SUM: Passes = (3, 3)
"""Reads both, writes; backward two gradients meet in the same way."""
DROPOUT: Passes = (3, 3)
"""As an activation, and its mask."""
POOL: Passes = (1, 1)
"""Reads; what it writes is a fraction of that."""


@dataclass(frozen=True)
class Work:
    """What something has to compute.

    Attributes:
        flops: floating-point operations per sample.
        traffic: bytes per sample that pass through memory on their own account.
        weights: bytes of weights a step, whatever the batch.
    """

    flops: float = 0.0
    traffic: float = 0.0
    weights: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.traffic + other.traffic, self.weights + other.weights)

    def __mul__(self, factor: float) -> Work:
        return Work(self.flops * factor, self.traffic * factor, self.weights * factor)

    def moving(self, batch: float, bandwidth: float) -> float:
        """Seconds that memory takes, at ``bandwidth`` bytes per second."""
        return (self.traffic * batch + self.weights) / bandwidth

    def seconds(self, batch: float, speed: float, bandwidth: float) -> float:
        """Seconds for a batch, at ``speed`` operations per second; nothing of memory hides behind arithmetic."""
        return self.flops * batch / speed + self.moving(batch, bandwidth)


@dataclass(frozen=True)
class Layer:
    """Parameters whose gradients are ready at the same time, and the work of both passes up to there."""

    parameters: Parameters
    forward: Work
    backward: Work


@dataclass(frozen=True)
class NetworkStep:
    """A training step: work before the first gradient can begin, then what becomes ready by which work, in turn."""

    before: Work
    events: tuple[tuple[Parameters, Work], ...]

    @property
    def gradients(self) -> tuple[tuple[Parameters, Work], ...]:
        """What becomes ready at one moment, by all the work since the moment before; none that follows the last one."""
        found, since = [], Work()
        for parameters, work in self.events:
            since = since + work
            if parameters:
                found.append((parameters, since))
                since = Work()
        return tuple(found)


def network_step(layers: Sequence[Layer]) -> NetworkStep:
    """The step of a network: forward through all layers, then backward from the last, whose parameters come first."""
    return NetworkStep(total(layer.forward for layer in layers), backwards(layers))


def total(works: Iterable[Work]) -> Work:
    """The sum of works."""
    return sum(works, Work())


def backwards(layers: Sequence[Layer]) -> tuple[tuple[Parameters, Work], ...]:
    """The events of a backward pass. The first layer is spared the gradient of its input, half of its operations."""
    first, *others = layers
    spared = replace(first, backward=replace(first.backward, flops=first.backward.flops / 2))
    return tuple((layer.parameters[::-1], layer.backward) for layer in reversed([spared, *others]))


# --- layers -----------------------------------------------------------------------------------------------------------


def product(parameters: Parameters, flops: float, reads: int | None = None) -> Layer:
    """A layer whose work is a product with weights: twice as much backward, for the gradients of input and weights.

    Args:
        parameters: its own; a tied weight stands in another layer.
        reads: elements of the weights, where they are not the parameters.
    """
    elements = sum(math.prod(shape) for _, shape in parameters) if reads is None else reads
    weights = _BYTES * elements
    return Layer(parameters, Work(flops, 0.0, weights), Work(2 * flops, 0.0, 2 * weights))


def convolution(
    name: str, outputs: int, inputs: int, kernel: int, side: int, *, bias: bool = False, weight: str = "weight"
) -> Layer:
    """A convolution that yields ``side`` × ``side`` pixels."""
    parameters: Parameters = ((f"{name}.{weight}", (outputs, inputs, kernel, kernel)),)
    if bias:
        parameters += ((f"{name}.bias", (outputs,)),)
    return product(parameters, 2.0 * outputs * inputs * kernel**2 * side**2)


def linear(
    name: str, outputs: int, inputs: int, rows: int = 1, *, bias: bool = True, transposed: bool = False
) -> Layer:
    """A product with a matrix for each of ``rows`` vectors a sample; ``transposed`` as GPT-2 keeps its matrices."""
    parameters: Parameters = ((f"{name}.weight", (inputs, outputs) if transposed else (outputs, inputs)),)
    if bias:
        parameters += ((f"{name}.bias", (outputs,)),)
    return product(parameters, 2.0 * outputs * inputs * rows)


def embedding(parameters: Parameters, rows: int, dim: int) -> Layer:
    """Tables of which ``rows`` rows are read a sample; their gradients are dense and written as a whole."""
    written = _BYTES * sum(math.prod(shape) for _, shape in parameters)
    return Layer(parameters, Work(traffic=2.0 * _BYTES * rows * dim), Work(0.0, 3.0 * _BYTES * rows * dim, written))


def elementwise(elements: int, *passes: Passes, parameters: Parameters = ()) -> Layer:
    """One or more operations on each of ``elements`` values a sample."""
    forward, backward = (_BYTES * elements * sum(counts) for counts in zip(*passes))
    return Layer(parameters, Work(traffic=forward), Work(traffic=backward))


def norm(name: str, channels: int, elements: int, *others: Passes) -> Layer:
    """A normalisation with scale and shift, and what else is done to its result."""
    parameters: Parameters = ((f"{name}.weight", (channels,)), (f"{name}.bias", (channels,)))
    return elementwise(elements, NORM, *others, parameters=parameters)
