"""What a training step gives to synchronise, and when: its tensors in the order of the backward pass.

A workload is recorded from training or made from a model's architecture (``models``). The planner needs nothing else
of a model. It is a value and a JSON file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from espresso_mpi.errors import ConfigError
from espresso_mpi.files import schema
from espresso_mpi.files.schema import MOST_ELEMENTS, Count, Elements, Moment, Relative
from espresso_mpi.types import ITEMSIZE, DeviceKind, TensorSpec

KIND = schema.Kind(
    "espresso_mpi workload", 1, "Session.record_workload or espresso_mpi.planner.workloads.models.model_workload"
)

MOST_BYTES = 1 << 28
"""Of a file: a tensor has some 200 bytes there, so a million of them; plans are made for fewer (``plan.MOST``)."""

MOST_AXES = 64
"""Of a shape: as numpy allows."""


@dataclass(frozen=True)
class WorkloadTensor:
    """One tensor of a step.

    Attributes:
        size: elements, above 0; all of a workload together at most ``schema.MOST_ELEMENTS``.
        ready: seconds from the begin of the step until its gradient is there.
        dtype: element type.
        shape: () where it is not known; else its product is the size.
        barred: specs of compressors that it may not travel by, because they would harm the training (docs/auto.md).

    Raises:
        ConfigError: a value is not of this kind.

    Example:
        >>> espresso_mpi.planner.WorkloadTensor("w", 1000, ready=0.01).nbytes
        4000
    """

    name: str
    size: Elements
    ready: Moment
    dtype: str = "float32"
    shape: Annotated[tuple[Count, ...], Meta(max_length=MOST_AXES)] = ()
    barred: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"workload: tensor {schema.shown(self.name)}"
        schema.check(self, where)
        if self.dtype not in ITEMSIZE:
            expected = " or ".join(map(repr, ITEMSIZE))
            raise ConfigError(f"{where}: dtype: got {schema.shown(self.dtype)}; expected {expected}")
        if self.shape and math.prod(self.shape) != self.size:
            raise ConfigError(
                f"{where}: size {self.size} with shape {list(self.shape)}; expected {math.prod(self.shape)} elements, "
                f"or no shape"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed gradient."""
        return self.size * ITEMSIZE[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """The tensor as JSON values."""
        plain: dict[str, Any] = schema.plain(self)
        return plain

    @classmethod
    def joined(cls, name: str, members: Sequence[WorkloadTensor]) -> WorkloadTensor:
        """A buffer of several tensors of one type, there when the last is; what one may not travel by, it may not."""
        barred = tuple(dict.fromkeys(text for tensor in members for text in tensor.barred))
        ready = max(tensor.ready for tensor in members)
        return cls(name, sum(tensor.size for tensor in members), ready, members[0].dtype, barred=barred)


@dataclass(frozen=True)
class Workload:
    """The tensors of a training step, and what else takes time in it.

    Attributes:
        tensors: in the order of the backward pass, so ready times never fall; at least one, and no name twice.
        device: where gradients are, and what computes them.
        update: seconds from the arrival of the last mean gradient to the end of the step.
        spread: of the step times that were measured: interquartile range / median.
        source: where it comes from, in words.

    Raises:
        ConfigError: a value is not of this kind.

    Example:
        >>> from espresso_mpi.planner import Workload, WorkloadTensor
        >>> workload = Workload((WorkloadTensor("head", 1000, 0.01), WorkloadTensor("body", 9000, 0.03)), update=0.002)
        >>> workload.nbytes, workload.seconds
        (40000, 0.032)
    """

    tensors: tuple[WorkloadTensor, ...]
    device: DeviceKind = "cpu"
    update: Moment = 0.0
    spread: Relative = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        schema.check(self, "workload")
        self._check_tensors()

    def _check_tensors(self) -> None:
        if not self.tensors:
            raise ConfigError("workload: got no tensors; expected at least one")
        elements = sum(tensor.size for tensor in self.tensors)
        if elements > MOST_ELEMENTS:
            raise ConfigError(
                f"workload: got tensors of {elements} elements together; expected at most {MOST_ELEMENTS}, 4 TiB as "
                f"float32: size counts elements of what one rank synchronises in one step"
            )
        seen: set[str] = set()
        for previous, tensor in zip((None, *self.tensors), self.tensors):
            if tensor.name in seen:
                raise ConfigError(f"workload: tensor {tensor.name!r} stands in it twice; expected names of their own")
            seen.add(tensor.name)
            if previous is not None and tensor.ready < previous.ready:
                raise ConfigError(
                    f"workload: tensor {tensor.name!r} is ready after {tensor.ready:g} s, before {previous.name!r} "
                    f"after {previous.ready:g} s; expected ready times that never fall: sort the tensors by them"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def without_bars(self) -> Workload:
        """The same with every compressor allowed for every tensor."""
        if not any(tensor.barred for tensor in self.tensors):
            return self
        return replace(self, tensors=tuple(replace(tensor, barred=()) for tensor in self.tensors))

    @property
    def backward(self) -> np.ndarray:
        """Seconds of computation before each tensor since the one before it, the first since the begin of the step.

        float64, shape (tensors,).
        """
        return np.diff([tensor.ready for tensor in self.tensors], prepend=0.0)

    @property
    def seconds(self) -> float:
        """Seconds of a step in which synchronising takes no time."""
        return self.tensors[-1].ready + self.update

    @classmethod
    def of_steps(
        cls,
        specs: Sequence[TensorSpec],
        ready: np.ndarray,
        steps: np.ndarray,
        update: np.ndarray,
        device: DeviceKind,
        source: str,
    ) -> Workload:
        """The workload of one rank from measured steps: medians, and the tensors sorted by their median ready time.

        Args:
            specs: the tensors; those without elements are left out, as there is nothing to synchronise.
            ready: seconds from the begin of the step, shape (steps, tensors).
            steps: seconds of whole dense steps, shape (steps,); their spread is kept.
            update: seconds from the last arrival to the end of the step, shape (steps,).

        Raises:
            ConfigError: shapes do not fit together, or a time is negative or not finite.
        """
        ready, steps, update = (np.asarray(times, np.float64) for times in (ready, steps, update))
        _check_measured(len(specs), ready, steps, update)
        medians = [float(t) for t in np.median(ready, axis=0)]
        known = [(spec, at) for spec, at in zip(specs, medians) if spec.dtype is not None and spec.size]
        tensors = tuple(
            WorkloadTensor(spec.name, spec.size, at, spec.dtype or "", spec.shape)
            for spec, at in sorted(known, key=lambda pair: pair[1])  # stable: equal times keep the caller's order
        )
        low, middle, high = np.quantile(steps, (0.25, 0.5, 0.75))
        spread = float((high - low) / middle) if middle else 0.0
        return cls(tensors, device, float(np.median(update)), spread, source)

    def to_json(self) -> dict[str, Any]:
        """The workload as JSON values, with its version."""
        return {**KIND.header(), **schema.plain(self)}

    @classmethod
    def from_json(cls, document: Any) -> Workload:
        """The workload in JSON values.

        Raises:
            ConfigError: they describe none, or of another version.
        """
        found: Workload = schema.convert(KIND.content(document), cls, "workload")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file.

        Raises:
            ConfigError: it cannot be written.
        """
        schema.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Workload:
        """Read a file that ``save`` wrote.

        Raises:
            ConfigError: it cannot be read, is no workload, or one of another version.
        """
        return schema.load(path, cls.from_json, MOST_BYTES, how=KIND.how)


def _check_measured(tensors: int, ready: np.ndarray, steps: np.ndarray, update: np.ndarray) -> None:
    count = len(steps) if steps.ndim == 1 else 0
    for what, times, shape in (
        ("ready", ready, (count, tensors)), ("steps", steps, (count,)), ("update", update, (count,))
    ):  # fmt: skip
        if times.shape != shape or not count:
            raise ConfigError(
                f"workload: {what} has shape {times.shape}, with {steps.shape} steps and {tensors} tensors; expected "
                f"{'(steps, tensors)' if what == 'ready' else '(steps,)'} with at least one step"
            )
        if not np.all(np.isfinite(times)) or np.any(times < 0):
            raise ConfigError(f"workload: {what} holds a time that is negative or not finite; expected seconds")
