"""What a compressor may say or do besides encode and decode: one class for each purpose.

``Compressor`` derives from all of them. Each has a neutral default, which is right for a method that says nothing: so
callers ask any compressor without a test of its type, and a method overrides only what applies to it. Every docstring
says when that is, and who asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np

from ..arrays.device import device_of
from ..errors import PayloadError
from .by_address import KernelCall
from .checks import check_array
from .context import Context, Journey, Summary
from .schedule import ParameterSchedule, settled, settled_power
from .staging import through_the_host

Keeps = Mapping[str, Literal["average", "forget"]]


class ErrorBounds:
    """How large the error is. Override it as far as the mathematics of the method is known.

    Error feedback needs ``contraction``. The planner's error budget and the benchmarks ask ``gaussian_error``. The law
    tests check every promise.
    """

    sparse: ClassVar[bool] = False
    """Whether payloads hold some elements exactly and nothing of the others. ``decode_add`` touches those alone."""
    homogeneous: ClassVar[bool] = True
    """Whether C(2ʲx) = 2ʲC(x)."""

    def contraction(self, n: int) -> float:
        """δ > 0 with ``E‖x - C(x)‖² ≤ (1 - δ)‖x‖²`` for every x of n elements; 0 where nothing is guaranteed."""
        return 0.0

    def variance(self, n: int) -> float | None:
        """ω with ``E‖x - C(x)‖² ≤ ω‖x‖²``, for unbiased methods (``E C(x) = x``); None for others."""
        return None

    def gaussian_error(self, n: int) -> float | None:
        """``E‖x - C(x)‖² / ‖x‖²`` for n independent normal values, by analysis; None if it is not known."""
        return None


class Traffic:
    """Bytes of memory that the kernels must move. Override it if they read or write something more, or less.

    The benchmarks compare the time of kernels with it. The planner's synthetic clusters derive times from it.
    """

    def encode_traffic(self: _Sized, n: int) -> int:
        """The least bytes of memory that encoding with a residual moves: x once, the residual twice, the payload."""
        return 12 * n + self.nbytes(n)

    def decode_traffic(self: _Sized, n: int) -> int:
        """The least bytes of memory that decode_add must move: the payload, and what it changes twice."""
        return 8 * n + self.nbytes(n)


class Summed:
    """Payloads that are summed without decoding. Override ``element`` if those of several ranks can be added.

    The collectives ask, and the planner, which then considers routes with an Allreduce or Reduce_scatter of payloads.
    """

    common: ClassVar[bool] = False
    """Whether the payloads of all ranks share positions, a rotation or a summary. They then are summed as they are:
    decoding and encoding them anew on the way would lose as much again."""

    @property
    def element(self) -> str | None:
        """Element type of the payload after its header, if it can be summed over the ranks; None if it cannot.

        float32, float16, bfloat16 (summed in float32) or int8, int16, int32 (sums saturate, and that is counted).
        """
        return None

    def header(self, n: int) -> int:
        """Bytes at the payload's start that all ranks have in common and that are not summed; a multiple of 16."""
        return 0

    @property
    def linear(self) -> bool:
        """Whether the payload of a sum is the elementwise sum of the payloads, which Allreduce so can sum."""
        return self.element is not None


class AgreedSummary:
    """What the ranks reduce and agree on before they encode, such as the largest norm of each block.

    Override ``summary`` and ``_summarise_cpu`` if the payloads of all ranks must have a scale, positions or a factor in
    common that depends on the values. The collectives and ``encode`` ask.
    """

    def summary(self, n: int) -> Summary | None:
        """Size and operator of what the ranks agree on before they encode n elements; None for most methods."""
        return None

    def summarise(self: _Method, x: Any, summary: Any, residual: Any = None, context: Context | None = None) -> None:
        """First half of an encode with an agreed summary; ``encode`` with ``context.summary`` is the second.

        Args:
            x, residual: as for ``encode``. The residual holds ``x + residual`` afterwards.
            summary: float32, shape (summary(n).size,); receives what is to be reduced over the ranks.

        Raises:
            PayloadError: an array has the wrong size, type, layout or device, or the method has no summary.
        """
        context = context or Context()
        expected = self.summary(x.size)
        if expected is None:
            raise PayloadError(f"summarise: {self.name} has no summary; call encode alone")
        check_array("values", x, np.float32, x.size, device_of(x))
        check_array("summary", summary, np.float32, expected.size, device_of(x))
        if residual is not None:
            check_array("residual", residual, np.float32, x.size, device_of(x))
        if x.size:
            method = self._summarise_cpu if device_of(x) == "cpu" else self._summarise_cuda
            method(x, summary, residual, context)

    def _summarise_cpu(
        self: _Method, x: np.ndarray, summary: np.ndarray, residual: np.ndarray | None, context: Context
    ) -> None:
        """See ``summarise``; sizes and types are checked, n > 0."""
        raise NotImplementedError(f"{self.name} promises a summary but has no _summarise_cpu")

    def _with_own_summary(self: _Method, x: Any, residual: Any, context: Context) -> Context:
        """The context of an encode whose summary is that of these values alone."""
        wanted = self.summary(x.size)
        assert wanted is not None
        own = context.scratch("own-summary", wanted.size, np.float32, x)
        self.summarise(x, own, residual, context)
        return replace(context, summary=own)


class KeptState:
    """What a method keeps from step to step with ``Context.kept``, such as a momentum or a factor.

    Override ``keeps`` if checkpoints shall be loaded on other ranks, and ``update_from_aggregate`` if something of the
    summed payload is to be kept. Checkpoints and the collectives ask. With a momentum, override
    ``Compressor.second_pass`` as well.
    """

    keeps: ClassVar[Keeps] = {}
    """What the method keeps with ``Context.kept``, and what becomes of that on other ranks or regions: of ``average``,
    one value for each element, every rank goes on with the ranks' mean; ``forget`` begins anew. States with anything
    that is not named can be loaded only where they were saved."""

    @property
    def averages_over_time(self) -> bool:
        """Whether it keeps a momentum, so that a gradient counts in later steps as well."""
        return "average" in self.keeps.values()

    @property
    def updates(self) -> bool:
        """Whether ``update_from_aggregate`` keeps anything."""
        return type(self).update_from_aggregate is not KeptState.update_from_aggregate

    def update_from_aggregate(self, payload: Any, n: int, context: Context) -> None:
        """Keep what the next encode wants to know of the payload, on its device, summed over the ranks."""


@dataclass(frozen=True)
class Scheduled:
    """Parameters that are a ``ParameterSchedule``. Every number may be one, and these methods work for all.

    Override ``at`` only if values between those of the ends need care, such as rounding to a multiple of 64. It returns
    the method itself where nothing changes. Sessions and the planner ask.
    """

    powers_of_two: ClassVar[Sequence[str]] = ()
    """Names of parameters that are powers of two in every step."""

    def at(self: SomeScheduled, step: int | None) -> SomeScheduled:
        """This method with every scheduled parameter at its value in ``step``; None: after all schedules."""
        changes = {
            name: (settled_power if name in self.powers_of_two else settled)(schedule, step)
            for name, schedule in self._schedules.items()
        }
        return replace(self, **changes) if changes else self

    def stages(self: SomeScheduled) -> list[SomeScheduled]:
        """This method in each setting that its schedules bring about."""
        changes = {step for schedule in self._schedules.values() for step in schedule.changes()}
        return [self.at(step) for step in sorted({0, *changes})]

    @cached_property
    def _schedules(self) -> Mapping[str, ParameterSchedule]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, ParameterSchedule)}


class Shaped:
    """The shape of the tensor. Override it if the method sees a matrix or otherwise more than a flat array.

    The engine, the profiler and ``plan="auto"`` ask ``shaped``; the engine and the planner ask ``whole`` where they cut
    tensors.
    """

    whole: ClassVar[bool] = False
    """Whether a tensor should not be cut into segments, because its payload grows with their number."""

    def shaped(self: SomeShaped, shape: tuple[int, ...]) -> SomeShaped:
        """This method for tensors of a shape. Methods that see matrices take their row length from it."""
        return self


class Result:
    """What a synchronisation returns. Override it if that is not the mean of the decoded values, such as a vote.

    The collectives ask ``finalize``; sessions and ``plan="auto"`` ask ``averages``.
    """

    averages: ClassVar[bool] = True
    """Whether the result stands for the ranks' mean. If it is a vote or a sum over past gradients instead, tensors take
    part whatever their size and the number of ranks: a plain mean would be of another kind."""

    @property
    def finalizes(self) -> bool:
        """Whether ``finalize`` changes the mean."""
        return type(self).finalize is not Result.finalize

    def finalize(self, out: Any) -> None:
        """Change the mean of the decoded values in place, on its device, if the result is another (majority vote)."""


class Bounded:
    """A bound on the error of every element of the result, whatever the route. Override all three, or nothing.

    The engine asks each rank before anything is sent. A refusal is a ``BoundError`` on every rank. Tensors of such
    methods share no buffer with others: neighbours would come together that are none.
    """

    bounded: ClassVar[bool] = False
    """Whether the method has a bound."""

    def largest_error(self, spread: float, largest: float, journey: Journey) -> float:
        """The most by which an element of the result can differ from the exact one; infinity without a bound.

        Args:
            spread: largest difference of neighbours on any rank; largest: largest magnitude.
        """
        return math.inf

    def refusal(self, x: Any, journey: Journey, context: Context) -> str:
        """Why the result could be beyond the bound with these float32 values on one rank; nothing if it cannot be."""
        return ""


class ByAddress:
    """Kernels that the compiled executor calls by their address, without Python.

    Override them where ``_encode_cpu``, ``_decode_cpu`` and the like are one kernel each. They must write the same
    bits. The executor asks; what is None runs in Python. A subclass that overrides one of these methods, and not that
    of its kernel, has none for it.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        without_kernel(cls, "_encode_cpu", "encoder", ByAddress.encoder)
        without_kernel(cls, "_decode_cpu", "decoder", ByAddress.decoder)
        without_kernel(cls, "finalize", "finalizer", ByAddress.finalizer)
        without_kernel(cls, "_summarise_cpu", "summariser", ByAddress.summariser)
        without_kernel(cls, "update_from_aggregate", "updater", ByAddress.updater)

    def encoder(self, n: int) -> KernelCall | None:
        """What encodes n elements as ``_encode_cpu`` does, on one thread; None: there is no such kernel."""
        return None

    def decoder(self, n: int) -> KernelCall | None:
        """What decodes n elements as ``_decode_cpu`` does, on one thread; None: there is no such kernel."""
        return None

    def finalizer(self, n: int) -> KernelCall | None:
        """What changes n elements as ``finalize`` does, each by itself: its grain is 1, and it gets nothing but them.

        None: there is no such kernel, and Python decodes as well.
        """
        return None

    def summariser(self, n: int) -> KernelCall | None:
        """What summarises n elements as ``_summarise_cpu`` does, on one thread.

        Its payload is where the encoder of the same elements will write; what it writes there stays.
        None: there is no such kernel, and Python encodes as well.
        """
        return None

    def updater(self, n: int) -> KernelCall | None:
        """What does as ``update_from_aggregate`` with a payload of n elements; None: there is no such kernel."""
        return None


def without_kernel(cls: type, work: str, kernel: str, none: Any) -> None:
    """Give a class ``none`` as its ``kernel`` if it does the work in another way than the class that has the kernel."""
    if _owner(cls, work) < _owner(cls, kernel):
        setattr(cls, kernel, none)


def _owner(cls: type, name: str) -> int:
    """How far up its bases a class finds an attribute."""
    return next((number for number, one in enumerate(cls.__mro__) if name in vars(one)), len(cls.__mro__))


class GpuKernels:
    """The work on GPU arrays. By default they pass through host memory, and the log says so.

    Override ``_encode_cuda`` and ``_decode_cuda`` if the method has kernels, and ``_summarise_cuda`` if it has a
    summary. They take numba device arrays and write the bytes that the CPU methods write. ``encode``, ``decode`` and
    ``summarise`` ask.
    """

    divides: ClassVar[bool] = False
    """Whether ``_decode_cuda`` also divides, by ``context.divisor``, what it has written or added to: a launch less.
    A subclass with another ``_decode_cuda`` says so anew."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_decode_cuda" in vars(cls) and "divides" not in vars(cls):
            cls.divides = False

    def _encode_cuda(self: _Method, x: Any, payload: Any, residual: Any, context: Context) -> None:
        """As ``_encode_cpu``."""
        through_the_host(self._encode_cpu, self.name, (x,), (payload, residual), context)

    def _decode_cuda(self: _Method, payload: Any, out: Any, add: bool, context: Context) -> None:
        """As ``_decode_cpu``."""
        through_the_host(lambda p, o, c: self._decode_cpu(p, o, add, c), self.name, (payload,), (out,), context)

    def _summarise_cuda(self: _Method, x: Any, summary: Any, residual: Any, context: Context) -> None:
        """As ``_summarise_cpu``."""
        through_the_host(self._summarise_cpu, self.name, (x,), (summary, residual), context)


# --- for the type checker ---------------------------------------------------------------------------------------------

SomeScheduled = TypeVar("SomeScheduled", bound=Scheduled)
SomeShaped = TypeVar("SomeShaped", bound=Shaped)


class _Sized(Protocol):
    """What ``Traffic`` uses of the rest of the contract."""

    def nbytes(self, n: int) -> int: ...


class _Method(Protocol):
    """What ``AgreedSummary`` and ``GpuKernels`` use of the rest of the contract."""

    name: ClassVar[str]

    def summary(self, n: int) -> Summary | None: ...
    def summarise(self, x: Any, summary: Any, residual: Any = None, context: Context | None = None) -> None: ...
    def _summarise_cpu(self, x: Any, summary: Any, residual: Any, context: Context) -> None: ...
    def _summarise_cuda(self, x: Any, summary: Any, residual: Any, context: Context) -> None: ...
    def _encode_cpu(self, x: Any, payload: Any, residual: Any, context: Context) -> None: ...
    def _decode_cpu(self, payload: Any, out: Any, add: bool, context: Context) -> None: ...
