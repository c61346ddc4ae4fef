"""The contract of a compressor: from n float32 values to a flat uint8 payload of a size known beforehand, and back.

A compressor knows no transport and a collective knows no compressor: they meet at bytes. To add one, write one file in
this folder with one class under ``@register``: ``nbytes``, ``_encode_cpu`` and ``_decode_cpu`` are all it must have;
docs/add-compressor.md shows an example. The registry, the law tests and the benchmarks find it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from ..arrays.device import device_of
from .checks import check_array
from .context import Context
from .optional import (
    AgreedSummary,
    Bounded,
    ByAddress,
    ErrorBounds,
    GpuKernels,
    KeptState,
    Result,
    Scheduled,
    Shaped,
    Summed,
    Traffic,
)


@dataclass(frozen=True)
class Compressor(
    ErrorBounds,
    Traffic,
    Summed,
    AgreedSummary,
    KeptState,
    Scheduled,
    Shaped,
    Result,
    Bounded,
    ByAddress,
    GpuKernels,
    ABC,
):
    """A compression method with its parameters; a value without state.

    A method fills in ``name``, ``nbytes``, ``_encode_cpu`` and ``_decode_cpu``. Everything else that callers ask has a
    neutral default in one of the base classes (``optional``); a method overrides what applies to it.

    The arrays of one call are 1-D, contiguous and on one device (numpy arrays on the CPU, numba device arrays on the
    GPU). Parameters are dataclass fields with defaults of type int, float, bool or str.

    Example:
        >>> from espresso_mpi import compressors
        >>> fp16, x = compressors.get("fp16"), np.full(4, 0.1, np.float32)
        >>> payload, residual = np.empty(fp16.nbytes(4), np.uint8), np.zeros(4, np.float32)
        >>> fp16.encode(x, payload, residual)
        >>> out = np.empty(4, np.float32)
        >>> fp16.decode(payload, out)
        >>> bool(np.all(out + residual == x))
        True
    """

    name: ClassVar[str]
    examples: ClassVar[Sequence[str]] = ()
    """Specs besides the bare name that the tests and the benchmarks should try."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Size in bytes of the payload of n elements: exact, and a function of n and the parameters alone."""

    @abstractmethod
    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        """See ``encode``; sizes and types are checked, n > 0, the summary is there (if the method has one)."""

    @abstractmethod
    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        """See ``decode`` and, if ``add`` is set, ``decode_add``; n > 0."""

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
            check_array("residual", residual, np.float32, x.size, device_of(x))
        if not x.size:
            return
        if context.summary is None and self.summary(x.size) is not None:
            context = self._with_own_summary(x, residual, context)
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

    def second_pass(self) -> Compressor:
        """What compresses the ranks' mean again on its way: payloads of the same format, but without a momentum."""
        return self

    def _decode(self, payload: Any, out: Any, add: bool, context: Context | None) -> None:
        self._check(out, payload)
        if out.size:
            method = self._decode_cpu if device_of(out) == "cpu" else self._decode_cuda
            method(payload, out, add, context or Context())

    def _check(self, values: Any, payload: Any) -> None:
        where = device_of(values)
        check_array("values", values, np.float32, values.size, where)
        check_array("payload", payload, np.uint8, self.nbytes(values.size), where)

    def __str__(self) -> str:
        """The spec that ``get`` reads back: the name and the parameters that are not the default."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (":" + ",".join(f"{key}={value}" for key, value in changed) if changed else "")
