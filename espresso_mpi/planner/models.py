"""Traces of well-known models, from their architectures: exact shapes, and times from operation counts.

A model is a list of layers (``_vision``, ``_language``) and a published training throughput, from which follows the
speed that the device achieves. docs/models.md has the resulting numbers, their sources and what is left out.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from .. import schema
from ..errors import ConfigError
from ..schema import Finite, Positive
from ..types import DeviceKind
from . import _language, _vision
from ._layers import Schedule, Shape
from .trace import Trace, TracedTensor

BANDWIDTH = 750e9
"""Bytes a second of a V100's memory, measured (Jia et al. 2018, arXiv:1804.06826); its data sheet says 900e9."""

SGD, ADAM = 5, 7
"""Passes over the parameters in an update: gradient, parameter and one moment are read, the last two written; Adam has
two moments."""


@dataclass(frozen=True)
class Published:
    """A training throughput that somebody measured on one V100 in float32.

    Attributes:
        throughput: samples a second.
        batch: samples a step.
        update: whether the time of the update is in it.
        source: who measured it.
    """

    throughput: float
    batch: int
    update: bool
    source: str


@dataclass(frozen=True)
class Model:
    """A model that is trained on one GPU of each rank.

    Attributes:
        name: in ``MODELS``.
        build: its training step.
        batch: samples a step that a trace has unless told otherwise.
        sample: what a sample is.
        optimizer: passes over the parameters in an update.
        published: what its speed is derived from; or the name of the model that it borrows the speed of.
    """

    name: str
    build: Callable[[], Schedule]
    batch: int
    sample: str
    optimizer: int
    published: Published | str

    @cached_property
    def schedule(self) -> Schedule:
        """Its training step."""
        return self.build()

    def shapes(self) -> dict[str, Shape]:
        """The shapes of its parameters by name, in the order in which the backward pass yields their gradients."""
        return {name: shape for parameters, _ in self.schedule.events for name, shape in parameters}

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.shapes().values()))

    def flops(self, batch: int | None = None) -> float:
        """Floating-point operations of a step: of the forward and the backward pass."""
        step = self.schedule
        return (self.batch if batch is None else batch) * (step.before.flops + sum(w.flops for _, w in step.events))

    @property
    def update(self) -> float:
        """Seconds of an update, which is a matter of memory."""
        return 4 * self.optimizer * self.parameters / BANDWIDTH

    @property
    def speed(self) -> float:
        """Operations a second with which the published throughput comes out, once memory has had its time."""
        if isinstance(self.published, str):
            return MODELS[self.published].speed
        batch, step = self.published.batch, self.schedule
        moving = step.before.moving(batch, BANDWIDTH) + sum(w.moving(batch, BANDWIDTH) for _, w in step.events)
        seconds = batch / self.published.throughput - moving - self.published.update * self.update
        return self.flops(batch) / seconds

    @property
    def source(self) -> str:
        """Where the speed is from, in words."""
        if isinstance(self.published, Published):
            return self.published.source
        return f"the speed of {self.published}: {MODELS[self.published].source}"


def model_trace(
    name: str, *, batch: int | None = None, speed: float | None = None, device: DeviceKind = "gpu"
) -> Trace:
    """The trace of a model in ``MODELS``.

    Args:
        batch: samples a step; the model's usual number if None.
        speed: operations a second that the device achieves in its matrix products and convolutions; if None what a
            V100 does in float32. Memory is a V100's, ``BANDWIDTH``, but as much faster or slower as this is.
        device: where gradients are.

    Raises:
        ConfigError: no such model, or a batch or speed that is not above 0.
    """
    model = _named(name)
    batch = model.batch if batch is None else batch
    schema.convert(batch, Positive, "models: batch")
    if speed is not None and schema.convert(speed, Finite, "models: speed") <= 0:
        raise ConfigError(f"models: speed: got {speed!r}; expected operations a second above 0, such as 1.2e13")
    usual = model.speed
    slower = 1.0 if speed is None else usual / speed
    return Trace(_tensors(model, batch, slower), device, slower * model.update, source=_described(model, batch, speed))


def _named(name: str) -> Model:
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(str(name).lower(), MODELS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"models: got {name!r}; expected one of {', '.join(MODELS)}{hint}")


def _tensors(model: Model, batch: int, slower: float) -> tuple[TracedTensor, ...]:
    speed, bandwidth = model.speed / slower, BANDWIDTH / slower
    at = model.schedule.before.seconds(batch, speed, bandwidth)
    found = []
    for parameters, work in model.schedule.events:
        at += work.seconds(batch, speed, bandwidth)
        found += [TracedTensor(name, math.prod(shape), at, "float32", shape) for name, shape in parameters]
    return tuple(found)


def _described(model: Model, batch: int, speed: float | None) -> str:
    achieved = model.speed if speed is None else speed
    why = f" ({model.source})" if speed is None else ""
    return f"{model.name}, batch of {batch} × {model.sample}, {achieved / 1e12:.3g} TFLOP/s{why}"


_PERF = "NGC PyTorch in float32 on a V100-SXM2, as measured by github.com/PaddlePaddle/Perf"

_ALL = (
    Model(
        "vgg16", _vision.vgg16, 32, "image of 224 × 224", SGD,
        Published(16 / 83.5e-3, 16, False, "PyTorch 0.3 on a V100, github.com/u39kun/deep-learning-benchmark: 83.5 ms"),
    ),
    Model("resnet50", _vision.resnet50, 32, "image of 224 × 224", SGD, Published(369.63, 128, True, _PERF)),
    Model("resnet101", _vision.resnet101, 32, "image of 224 × 224", SGD, "resnet50"),
    Model("ugatit", _vision.ugatit, 1, "pair of images of 256 × 256", ADAM, "vgg16"),
    Model(
        "bert-base", _language.bert_base, 8, "sequence of 128 tokens", ADAM, Published(158.642, 96, True, _PERF)
    ),
    Model(
        "bert-large", _language.bert_large, 8, "sequence of 128 tokens", ADAM,
        Published(313 / 7.83, 8, False, "NVIDIA DeepLearningExamples, PyTorch BERT on a DGX-1: 313 sequences/s on 8"),
    ),
    Model("gpt2", _language.gpt2, 8, "sequence of 80 tokens", ADAM, "bert-base"),
    Model("lstm", _language.lstm, 32, "sequence of 80 tokens", SGD, "bert-base"),
)  # fmt: skip

MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _ALL})
"""Every model by its name."""
