"""A deep character language model in plain numpy: many tensors of different sizes, whose gradients come one by one.

Context and softmax are those of ``model``; between them is a tower of residual blocks, each a root-mean-square norm, a
wide layer of rectified units and a narrow one, as in the feed-forward half of a transformer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .model import CharModel, ModelShape

_EPSILON = 1e-5


@dataclass(frozen=True)
class DeepShape(ModelShape):
    """Sizes of the network: ``hidden`` of the stream through the blocks, ``widening`` times that of their wide layers.

    The defaults make 60 tensors of 255 800 parameters, about as many as ``ModelShape(hidden=1024)`` has in five.
    """

    hidden: int = 52
    blocks: int = 11
    widening: int = 4

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and array shape of every tensor, in the order in which the backward pass finishes them."""
        whole = super().tensors()
        wide = self.widening * self.hidden
        own = {
            "down.weight": (wide, self.hidden), "down.bias": (self.hidden,), "up.weight": (self.hidden, wide),
            "up.bias": (wide,), "norm": (self.hidden,),
        }  # fmt: skip
        outer = {name: whole.pop(name) for name in ("output.weight", "output.bias")}
        blocks = {f"{n}.{name}": dims for n in reversed(range(self.blocks)) for name, dims in own.items()}
        return {**outer, **blocks, **whole}

    def scales(self) -> dict[str, float]:
        """Blocks add little to the stream at the start, however many there are."""
        found = {**super().scales(), "hidden.weight": math.sqrt(1 / (self.context * self.embedding))}
        for n in range(self.blocks):
            found[f"{n}.up.weight"] = math.sqrt(2 / self.hidden)
            found[f"{n}.down.weight"] = math.sqrt(1 / (self.widening * self.hidden * self.blocks))
        return found


@dataclass(frozen=True)
class _Block:
    """What the backward pass needs of a block: [batch, hidden] arrays but ``active`` [batch, wide]; rms [batch, 1]."""

    unit: np.ndarray
    rms: np.ndarray
    scaled: np.ndarray
    active: np.ndarray


class DeepModel(CharModel):
    """The network; see ``CharModel`` for what it holds."""

    shape: DeepShape

    def __init__(self, shape: DeepShape, seed: int = 0, dtype: type = np.float32) -> None:
        super().__init__(shape, seed, dtype)
        self._passed: list[_Block] = []
        for n in range(shape.blocks):
            self.params[f"{n}.norm"].fill(1.0)

    def _forward(self, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        p = self.params
        embedded = p["embedding"][contexts].reshape(len(contexts), -1)
        stream = embedded @ p["hidden.weight"] + p["hidden.bias"]
        self._passed = []
        for n in range(self.shape.blocks):
            rms = np.sqrt(np.mean(np.square(stream), axis=1, keepdims=True) + _EPSILON)
            unit = stream / rms
            scaled = unit * p[f"{n}.norm"]
            active = np.maximum(scaled @ p[f"{n}.up.weight"] + p[f"{n}.up.bias"], 0)
            stream = stream + active @ p[f"{n}.down.weight"] + p[f"{n}.down.bias"]
            self._passed.append(_Block(unit, rms, scaled, active))
        return embedded, stream, stream @ p["output.weight"] + p["output.bias"]

    def _backward(
        self, contexts: np.ndarray, embedded: np.ndarray, hidden: np.ndarray, d_logits: np.ndarray
    ) -> Iterator[str]:
        p = self.params
        yield from self._layer("output", hidden, d_logits)
        d_stream = d_logits @ p["output.weight"].T
        for n in reversed(range(self.shape.blocks)):
            kept = self._passed[n]
            yield from self._layer(f"{n}.down", kept.active, d_stream)
            d_active = d_stream @ p[f"{n}.down.weight"].T
            d_active *= kept.active > 0
            yield from self._layer(f"{n}.up", kept.scaled, d_active)
            d_scaled = d_active @ p[f"{n}.up.weight"].T
            np.sum(d_scaled * kept.unit, axis=0, out=self.grads[f"{n}.norm"])
            yield f"{n}.norm"
            d_unit = d_scaled * p[f"{n}.norm"]
            d_unit -= kept.unit * np.mean(d_unit * kept.unit, axis=1, keepdims=True)
            d_stream = d_stream + d_unit / kept.rms
        yield from self._layer("hidden", embedded, d_stream)
        yield from self._backward_to_symbols(contexts, d_stream @ p["hidden.weight"].T)

    def _layer(self, name: str, before: np.ndarray, after: np.ndarray) -> Iterator[str]:
        """Gradients of a weight and a bias, from the activations before and the gradient after."""
        np.matmul(before.T, after, out=self.grads[f"{name}.weight"])
        yield f"{name}.weight"
        np.sum(after, axis=0, out=self.grads[f"{name}.bias"])
        yield f"{name}.bias"
