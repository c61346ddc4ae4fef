"""Workloads of well-known models, from their architectures: exact shapes, and times from operation counts.

A model is a list of layers (``vision``, ``language``) and a published training throughput, from which follows the
speed that the device achieves. Where the length of the backward pass was measured (``measured``), the times are scaled
to it. docs/models.md has the resulting numbers, their sources and what is left out.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from espresso_mpi.errors import ConfigError
from espresso_mpi.files import schema
from espresso_mpi.files.schema import Finite, Positive
from espresso_mpi.types import DeviceKind

from ..model.workload import Workload, WorkloadTensor
from . import language, vision
from .layers import NetworkStep, Shape
from .measured import Measured, Times

BANDWIDTH = 750e9
"""Bytes per second of a V100's memory, measured (Jia et al. 2018, arXiv:1804.06826); its data sheet says 900e9."""

SGD, ADAM = 5, 7
"""Passes over the parameters in an update: gradient, parameter and one moment are read, the last two written; Adam has
two moments."""


LONGEST = 1e8
"""Seconds of a backward pass, three years: times scaled to it stay below the end of what a workload may hold."""


@dataclass(frozen=True)
class Published:
    """A training throughput that somebody measured on one V100 in float32.

    Attributes:
        throughput: samples per second.
        batch: samples per step.
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
        batch: samples of a step, unless told otherwise. Where ``measured`` is given, the modelled times are computed
            with them before they are scaled: it is not known how many samples the measured step had.
        sample: what a sample is.
        optimizer: passes over the parameters in an update.
        published: what its speed is derived from; or the name of the model that it borrows the speed of.
        measured: the length of its backward pass, if that was measured; it outweighs the speed.
    """

    name: str
    build: Callable[[], NetworkStep]
    batch: int
    sample: str
    optimizer: int
    published: Published | str
    measured: Measured | None = None

    @cached_property
    def step(self) -> NetworkStep:
        """Its training step."""
        return self.build()

    def shapes(self) -> dict[str, Shape]:
        """The shapes of its parameters by name, in the order in which the backward pass yields their gradients."""
        return {name: shape for parameters, _ in self.step.events for name, shape in parameters}

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.shapes().values()))

    def flops(self, batch: int | None = None) -> float:
        """Floating-point operations of a step: of the forward and the backward pass."""
        step = self.step
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
        batch, step = self.published.batch, self.step
        moving = step.before.moving(batch, BANDWIDTH) + sum(w.moving(batch, BANDWIDTH) for _, w in step.events)
        seconds = batch / self.published.throughput - moving - self.published.update * self.update
        return self.flops(batch) / seconds

    def modelled(self, batch: int | None = None) -> Times:
        """Seconds that a step computes, from its operations and the speed; of its usual batch if None."""
        samples, speed = self.batch if batch is None else batch, self.speed
        works = [self.step.before, *(work for _, work in self.step.gradients)]
        forward, *gaps = (work.seconds(samples, speed, BANDWIDTH) for work in works)
        return Times(forward, tuple(gaps))

    def times(self, batch: int | None = None) -> Times:
        """The modelled times, scaled to the measured backward pass where there is one.

        The factors are those that the usual batch needs, so times of other batches go by it as the modelled ones do.
        """
        modelled = self.modelled(batch)
        return modelled if self.measured is None else self.measured.scaled(modelled, self.modelled())

    @property
    def source(self) -> str:
        """Where the speed is from, in words."""
        if isinstance(self.published, Published):
            return self.published.source
        return f"the speed of {self.published}: {MODELS[self.published].source}"


def model_workload(
    name: str,
    *,
    batch: int | None = None,
    speed: float | None = None,
    backward: float | None = None,
    device: DeviceKind = "gpu",
) -> Workload:
    """The workload of a model in ``MODELS``.

    The length of six models' backward passes was measured on a V100 (``Model.measured``). It is a total: how it is
    spread over the tensors is modelled. The times of the others are modelled altogether.

    Args:
        batch: samples per step; the model's usual number if None. Times go by it as the modelled ones do, also where
            the length of the backward pass was measured, which holds for the usual number.
        speed: operations per second that the device achieves in its matrix products and convolutions. All times are
            then modelled, and none is measured: memory and the update are a V100's, ``BANDWIDTH``, but as much faster
            or slower as this is. ``speed=MODELS[name].speed`` is a V100 in float32.
        backward: seconds of your backward pass, from the moment when the first gradient is ready to the moment when the
            last one is; in the place of the measured ones. All times before the last gradient are scaled by the factor
            that this takes, those of the forward pass as well. The update is not, as it depends on the number of
            parameters only.
        device: where gradients are.

    Raises:
        ConfigError: no such model; a batch, speed or backward pass that is not above 0; both of the latter.

    Example:
        >>> workload = espresso_mpi.planner.model_workload("resnet50")
        >>> len(workload.tensors), workload.nbytes
        (161, 102228128)
    """
    model = _named(name)
    batch = model.batch if batch is None else batch
    schema.convert(batch, Positive, "models: batch")
    _check("speed", speed, math.inf, "operations per second above 0, such as 1.2e13")
    _check("backward", backward, LONGEST, f"seconds above 0 and up to {LONGEST:g}, such as 0.211")
    if speed is not None and backward is not None:
        raise ConfigError(
            f"models: got speed {speed!r} and backward {backward!r}; expected one of the two, as each says how long "
            f"the backward pass is: leave one out"
        )
    times, update = _seconds(model, batch, speed, backward)
    return Workload(_tensors(model, times), device, update, source=_described(model, batch, speed, backward, times))


def _check(what: str, value: float | None, most: float, expected: str) -> None:
    if value is None:
        return
    try:
        fits = 0 < schema.convert(value, Finite, what) <= most
    except ConfigError:
        fits = False
    if not fits:
        raise ConfigError(f"models: {what}: got {schema.shown(value)}; expected {expected}")


def _named(name: str) -> Model:
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(str(name).lower(), MODELS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"models: got {name!r}; expected one of {', '.join(MODELS)}{hint}")


def _seconds(model: Model, batch: int, speed: float | None, backward: float | None) -> tuple[Times, float]:
    """What a step computes, and its update."""
    if speed is not None:
        slower = model.speed / speed
        return model.modelled(batch) * slower, model.update * slower
    times = model.times(batch)
    return times if backward is None else times * (backward / times.backward), model.update


def _tensors(model: Model, times: Times) -> tuple[WorkloadTensor, ...]:
    return tuple(
        WorkloadTensor(name, math.prod(shape), at, "float32", shape)
        for (parameters, _), at in zip(model.step.gradients, times.ready)
        for name, shape in parameters
    )


def _described(model: Model, batch: int, speed: float | None, backward: float | None, times: Times) -> str:
    what, measured = f"{model.name}, batch of {batch} × {model.sample}", model.measured
    length = f"backward pass of {times.backward * 1e3:.4g} ms"
    if speed is not None:
        return f"{what}, {speed / 1e12:.3g} TFLOP/s"
    if backward is not None:
        return f"{what}, {length} as given, spread as modelled"
    if measured is None:
        return f"{what}, {model.speed / 1e12:.3g} TFLOP/s ({model.source})"
    if batch == model.batch:
        return f"{what}, {length} in all ({measured.source}), spread as modelled"
    return f"{what}, {length}: {measured.backward * 1e3:.4g} ms ({measured.source}) by the batch, spread as modelled"


_PERF = "NGC PyTorch in float32 on a V100-SXM2, as measured by github.com/PaddlePaddle/Perf"

_TRACES = "public V100 traces of backward times"

_ALL = (
    Model(
        "vgg16", vision.vgg16, 32, "image of 224 × 224", SGD,
        Published(16 / 83.5e-3, 16, False, "PyTorch 0.3 on a V100, github.com/u39kun/deep-learning-benchmark: 83.5 ms"),
        Measured(0.085, _TRACES),
    ),
    Model("resnet50", vision.resnet50, 32, "image of 224 × 224", SGD, Published(369.63, 128, True, _PERF)),
    Model("resnet101", vision.resnet101, 32, "image of 224 × 224", SGD, "resnet50", Measured(0.120, _TRACES)),
    Model(
        "ugatit", vision.ugatit, 1, "pair of images of 256 × 256", ADAM, "vgg16", Measured(0.434, _TRACES, gap=0.335)
    ),
    Model(
        "bert-base", language.bert_base, 8, "sequence of 128 tokens", ADAM, Published(158.642, 96, True, _PERF),
        Measured(0.066, f"{_TRACES}, of fine-tuning on SQuAD"),
    ),
    Model(
        "bert-large", language.bert_large, 8, "sequence of 128 tokens", ADAM,
        Published(313 / 7.83, 8, False, "NVIDIA DeepLearningExamples, PyTorch BERT on a DGX-1: 313 sequences/s on 8"),
    ),
    Model("gpt2", language.gpt2, 8, "sequence of 80 tokens", ADAM, "bert-base", Measured(0.211, _TRACES)),
    Model("lstm", language.lstm, 32, "sequence of 80 tokens", SGD, "bert-base", Measured(0.071, _TRACES)),
)  # fmt: skip

MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _ALL})
"""Every model by its name."""
