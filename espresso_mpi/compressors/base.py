"""The contract of a compressor: from n float32 values to a flat uint8 payload of a size known beforehand, and back.

A compressor knows no transport and a collective knows no compressor: they meet at bytes. To add one, write one file in
this folder with one class under ``@register``: ``nbytes``, ``_encode_cpu`` and ``_decode_cpu`` are all it must have;
docs/add-compressor.md shows an example. The registry, the law tests and the benchmarks find it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from ..arrays import device
from ..arrays.device import device_of
from ..errors import ConfigError, PayloadError
from .context import Context, Summary
from .schedule import Schedule, settled

LIMIT = 2.0**126
"""The largest magnitude that compressors carry. Larger values, infinity among them, count as this, and NaN as 0: no
payload and no residual ever holds a value that is not finite. (Sessions refuse gradients that are not finite.)"""

Self = TypeVar("Self", bound="Compressor")
Keeps = Mapping[str, Literal["average", "forget"]]


@dataclass(frozen=True)
class Compressor(ABC):
    """A compression method with its parameters; a value without state.

    The arrays of one call are 1-D, contiguous and on one device (numpy arrays on the CPU, numba device arrays on the
    GPU). CPU and CUDA kernels write the same payload bytes. Parameters are dataclass fields with defaults of type int,
    float, bool or str; a number may also be a ``Schedule``, which ``at`` settles.
    """

    name: ClassVar[str]
    examples: ClassVar[Sequence[str]] = ()
    """Specs besides the bare name that the tests and the benchmarks should try."""
    common: ClassVar[bool] = False
    """Whether the payloads of all ranks share positions, a rotation or a summary. They then are summed as they are:
    decoding and encoding them anew on the way would lose as much again."""
    whole: ClassVar[bool] = False
    """Whether a tensor should not be cut into segments, because its payload grows with their number."""
    sparse: ClassVar[bool] = False
    """Whether payloads hold some elements exactly and nothing of the others. ``decode_add`` touches those alone."""
    homogeneous: ClassVar[bool] = True
    """Whether C(2ʲx) = 2ʲC(x)."""
    averages: ClassVar[bool] = True
    """Whether the result stands for the ranks' mean. If it is a vote or a sum over past gradients instead, tensors take
    part whatever their size and the number of ranks: a plain mean would be of another kind."""
    keeps: ClassVar[Keeps] = {}
    """What the method keeps with ``Context.kept``, and what becomes of that on other ranks or regions: of ``average``,
    one value for each element, every rank goes on with the ranks' mean; ``forget`` begins anew. States with anything
    that is not named can be loaded only where they were saved."""

    # --- sizes ---

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Size in bytes of the payload of n elements: exact, and a function of n and the parameters alone."""

    def header(self, n: int) -> int:
        """Bytes at the payload's start that all ranks have in common and that are not summed; a multiple of 16."""
        return 0

    @property
    def element(self) -> str | None:
        """Element type of the payload after its header, if it can be summed over the ranks; None if it cannot.

        float32, float16, bfloat16 (summed in float32) or int8, int16, int32 (sums saturate, and that is counted).
        """
        return None

    @property
    def linear(self) -> bool:
        """Whether the payload of a sum is the elementwise sum of the payloads, which so may ride Allreduce."""
        return self.element is not None

    # --- what it promises: laws that the tests check, and what error feedback may build on ---

    def contraction(self, n: int) -> float:
        """δ > 0 with ``E‖x - C(x)‖² ≤ (1 - δ)‖x‖²`` for every x of n elements; 0 where nothing is guaranteed."""
        return 0.0

    def variance(self, n: int) -> float | None:
        """ω with ``E‖x - C(x)‖² ≤ ω‖x‖²``, for unbiased methods (``E C(x) = x``); None for others."""
        return None

    def gaussian_error(self, n: int) -> float | None:
        """``E‖x - C(x)‖² / ‖x‖²`` for n independent normal values, by analysis; None if it is not known."""
        return None

    def encode_traffic(self, n: int) -> int:
        """The least bytes of memory that encoding with a residual moves: x once, the residual twice, the payload."""
        return 12 * n + self.nbytes(n)

    def decode_traffic(self, n: int) -> int:
        """The least bytes of memory that decode_add must move: the payload, and what it changes twice."""
        return 8 * n + self.nbytes(n)

    # --- parameters that depend on the training step or on the tensor ---

    def at(self: Self, step: int | None) -> Self:
        """This method with every scheduled parameter at its value in ``step``; None: after all schedules."""
        changes = {f.name: settled(v, step) for f in fields(self) if isinstance(v := getattr(self, f.name), Schedule)}
        return replace(self, **changes) if changes else self

    def stages(self: Self) -> list[Self]:
        """This method in each setting that its schedules bring about."""
        scheduled = [v for f in fields(self) if isinstance(v := getattr(self, f.name), Schedule)]
        return [self.at(step) for step in sorted({0, *(step for v in scheduled for step in v.changes())})]

    def shaped(self: Self, shape: tuple[int, ...]) -> Self:
        """This method for tensors of a shape. Methods that see matrices take their row length from it."""
        return self

    def second_pass(self) -> Compressor:
        """What compresses the ranks' mean a second time on its way: payloads of the same format.

        Methods with a momentum leave it out there: the gradients have gone through it already.
        """
        return self

    # --- the work ---

    def summary(self, n: int) -> Summary | None:
        """What the ranks agree on before they encode n elements; None for most methods."""
        return None

    def summarise(self, x: Any, summary: Any, residual: Any = None, context: Context | None = None) -> None:
        """First half of an encode with an agreed summary; ``encode`` with ``context.summary`` is the second.

        Args:
            x, residual: as for ``encode``. The residual holds ``x + residual`` afterwards.
            summary: float32, shape (summary(n).size,); receives what is to be reduced over the ranks.
        """
        context = context or Context()
        expected = self.summary(x.size)
        if expected is None:
            raise PayloadError(f"summarise: {self.name} has no summary; call encode alone")
        _check_array("values", x, np.float32, x.size, device_of(x))
        _check_array("summary", summary, np.float32, expected.size, device_of(x))
        if residual is not None:
            _check_array("residual", residual, np.float32, x.size, device_of(x))
        if x.size:
            method = self._summarise_cpu if device_of(x) == "cpu" else self._summarise_cuda
            method(x, summary, residual, context)

    def encode(self, x: Any, payload: Any, residual: Any = None, context: Context | None = None) -> None:
        """Compress ``x + residual`` into ``payload`` and leave in ``residual`` what the payload does not hold.

        Args:
            x: float32, shape (n,); not changed.
            payload: uint8, shape (nbytes(n),), its address a multiple of 16; every byte is written.
            residual: float32, shape (n,), updated in place; None compresses x alone.
            context: see ``Context``. With ``context.summary``, ``summarise`` was called before with the same arrays.

        Raises:
            PayloadError: an array has the wrong size, type, layout or device.
        """
        context = context or Context()
        self._check(x, payload)
        if residual is not None:
            _check_array("residual", residual, np.float32, x.size, device_of(x))
        if not x.size:
            return
        wanted = self.summary(x.size)
        if wanted is not None and context.summary is None:
            own = context.scratch("own-summary", wanted.size, np.float32, x)
            self.summarise(x, own, residual, context)
            context = replace(context, summary=own)
        method = self._encode_cpu if device_of(x) == "cpu" else self._encode_cuda
        method(x, payload, residual, context)

    def decode(self, payload: Any, out: Any, context: Context | None = None) -> None:
        """Write the n values that ``payload`` stands for into ``out`` (float32, shape (n,)).

        Any bytes decode to finite values or raise.

        Raises:
            PayloadError: an array has the wrong size, type, layout or device, or the payload is damaged.
        """
        self._decode(payload, out, False, context)

    def decode_add(self, payload: Any, out: Any, context: Context | None = None) -> None:
        """Add the n values that ``payload`` stands for to ``out``; otherwise as ``decode``."""
        self._decode(payload, out, True, context)

    def update_from_aggregate(self, payload: Any, n: int, context: Context) -> None:  # noqa: B027 - most methods learn nothing
        """Keep what the next encode wants to know of the payload, on its device, summed over the ranks."""

    def finalize(self, out: Any) -> None:  # noqa: B027 - most results are the mean
        """Change the mean of the decoded values in place, on its device, if the result is another (majority vote)."""

    # --- what a method fills in ---

    @abstractmethod
    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        """See ``encode``; sizes and types are checked, n > 0, the summary is there (if the method has one)."""

    @abstractmethod
    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        """See ``decode`` and ``decode_add``; n > 0."""

    def _summarise_cpu(self, x: np.ndarray, summary: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        raise NotImplementedError(f"{self.name} promises a summary but has no _summarise_cpu")

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        """As ``_encode_cpu`` on the GPU; unless a method has kernels for it, through host memory."""
        _through_the_host(self._encode_cpu, self.name, (x,), (payload, residual), context)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        _through_the_host(lambda p, o, c: self._decode_cpu(p, o, add, c), self.name, (payload,), (out,), context)

    def _summarise_cuda(self, x: Any, summary: Any, residual: Any, context: Context) -> None:
        _through_the_host(self._summarise_cpu, self.name, (x,), (summary, residual), context)

    # --- shared ---

    def _decode(self, payload: Any, out: Any, add: bool, context: Context | None) -> None:
        self._check(out, payload)
        if out.size:
            method = self._decode_cpu if device_of(out) == "cpu" else self._decode_cuda
            method(payload, out, add, context or Context())

    def _check(self, values: Any, payload: Any) -> None:
        where = device_of(values)
        _check_array("values", values, np.float32, values.size, where)
        _check_array("payload", payload, np.uint8, self.nbytes(values.size), where)

    def __str__(self) -> str:
        """The spec that ``get`` reads back: the name and the parameters that are not the default."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (":" + ",".join(f"{key}={value}" for key, value in changed) if changed else "")


def _check_array(what: str, array: Any, dtype: Any, size: int, where: str) -> None:
    got = (np.dtype(array.dtype), array.ndim, array.size, device_of(array))
    if got != (np.dtype(dtype), 1, size, where):
        raise PayloadError(
            f"{what}: got {got[0]} with {got[1]} dimension(s), {got[2]} elements on {got[3]}; expected "
            f"{np.dtype(dtype)} with 1 dimension, {size} elements on {where}; pass a flat array of that size"
        )
    contiguous = array.flags["C_CONTIGUOUS"] if where == "cpu" else array.is_c_contiguous()
    if not contiguous:
        raise PayloadError(
            f"{what}: got a strided array; expected contiguous memory; pass numpy.ascontiguousarray(...)"
        )


def _through_the_host(method: Any, name: str, inputs: Sequence[Any], outputs: Sequence[Any], context: Context) -> None:
    """Run a CPU method on copies of GPU arrays."""
    _warn_host(name)
    there = [*inputs, *outputs]
    here = [None if a is None else a.copy_to_host() for a in there]
    for key in list(context.state):
        context.kept(key, context.state[key].size, np.empty(0, np.float32))  # moves it to the host
    summary = None if context.summary is None else context.summary.copy_to_host()
    x, *rest = here
    method(x, *rest, replace(context, summary=summary))
    for target, source in zip(outputs, here[len(inputs) :]):
        if target is not None:
            device.copy(target, source)


@lru_cache
def _warn_host(name: str) -> None:
    logging.getLogger("espresso_mpi").warning("%s has no GPU kernels: GPU tensors are compressed on the host", name)


# --- checks of parameters ---------------------------------------------------------------------------------------------


def check_positive_int(owner: str, name: str, value: Any, low: int = 1, high: int = 1 << 30) -> None:
    """Raise ConfigError unless ``value``, at both ends if it is a Schedule, is an int in [low, high]."""
    for v in (value.start, value.end) if isinstance(value, Schedule) else (value,):
        if isinstance(v, bool) or not isinstance(v, int) or not low <= v <= high:
            raise ConfigError(f"{owner}: {name}={value}; expected a whole number from {low} to {high}")


def check_number(owner: str, name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    """Raise ConfigError unless ``value``, at both ends if it is a Schedule, is in [low, high]; ``above``: above low."""
    for v in (value.start, value.end) if isinstance(value, Schedule) else (value,):
        number = isinstance(v, (int, float)) and not isinstance(v, bool)
        if not number or not low <= v <= high or (above and v == low):
            raise ConfigError(
                f"{owner}: {name}={value}; expected a number {'above' if above else 'from'} {low:g} to {high:g}"
            )


def check_choice(owner: str, name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{owner}: {name}={value!r}; expected one of {', '.join(allowed)}")
