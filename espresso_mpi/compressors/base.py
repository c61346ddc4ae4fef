"""The contract of a compressor: from n float32 values to a flat uint8 payload of a size known beforehand, and back.

A compressor knows no transport and a collective knows no compressor: they meet at bytes. To add one, write one file in
this folder with one class under ``@register``; its CUDA kernels stand beside it in ``_cuda_<name>.py``, which is
imported when a GPU array appears. The registry, the contract tests and the benchmarks find it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from ..device import device_of
from ..errors import ConfigError, PayloadError


@dataclass(frozen=True)
class Compressor(ABC):
    """A compression method with its parameters; a value without state.

    The arrays of one call are 1-D, contiguous and on one device (numpy arrays on the CPU, numba device arrays on the
    GPU). CPU and CUDA kernels write the same payload bytes.
    """

    name: ClassVar[str]
    linear: ClassVar[bool] = False
    """Whether the elementwise sum of payloads is the payload of the sum, so that payloads may ride Allreduce."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Size in bytes of the payload of n elements: exact, and a function of n and the parameters alone."""

    def encode(self, x: Any, payload: Any, residual: Any = None, key: int = 0) -> None:
        """Compress ``x + residual`` into ``payload`` and leave in ``residual`` what the payload does not hold.

        Args:
            x: float32, shape (n,); finite values.
            payload: uint8, shape (nbytes(n),), its address a multiple of 8; every byte is written.
            residual: float32, shape (n,), updated in place; None compresses x alone.
            key: 64-bit seed of the counter-based generator of stochastic methods, made from (seed, tensor, step,
                rank). The same key gives the same bytes on any device and number of threads.

        Raises:
            PayloadError: an array has the wrong size, type, layout or device.
        """
        self._check(x, payload)
        if residual is not None:
            _check_array("residual", residual, np.float32, x.size, device_of(x))
        if x.size:
            self._encode(x, payload, residual, key)

    def decode(self, payload: Any, out: Any) -> None:
        """Write the n values that ``payload`` stands for into ``out`` (float32, shape (n,)).

        Raises:
            PayloadError: an array has the wrong size, type, layout or device.
        """
        self._check(out, payload)
        if out.size:
            self._decode(payload, out, add=False)

    def decode_add(self, payload: Any, out: Any) -> None:
        """Add the n values that ``payload`` stands for to ``out``; otherwise as ``decode``."""
        self._check(out, payload)
        if out.size:
            self._decode(payload, out, add=True)

    def _encode(self, x: Any, payload: Any, residual: Any, key: int) -> None:
        kernels = self._encode_cpu if device_of(x) == "cpu" else self._encode_cuda
        kernels(x, payload, residual, key)

    def _decode(self, payload: Any, out: Any, add: bool) -> None:
        kernels = self._decode_cpu if device_of(out) == "cpu" else self._decode_cuda
        kernels(payload, out, add)

    @abstractmethod
    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, key: int) -> None: ...

    @abstractmethod
    def _encode_cuda(self, x: Any, payload: Any, residual: Any, key: int) -> None: ...

    @abstractmethod
    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None: ...

    @abstractmethod
    def _decode_cuda(self, payload: Any, out: Any, add: bool) -> None: ...

    def _check(self, values: Any, payload: Any) -> None:
        device = device_of(values)
        _check_array("values", values, np.float32, values.size, device)
        _check_array("payload", payload, np.uint8, self.nbytes(values.size), device)

    def __str__(self) -> str:
        """The spelling that ``get`` reads back: the name and the parameters that are not the default."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (":" + ",".join(f"{key}={value}" for key, value in changed) if changed else "")


def _check_array(what: str, array: Any, dtype: Any, size: int, device: str) -> None:
    got = (np.dtype(array.dtype), array.ndim, array.size, device_of(array))
    if got != (np.dtype(dtype), 1, size, device):
        raise PayloadError(
            f"{what}: got {got[0]} with {got[1]} dimension(s), {got[2]} elements on {got[3]}; expected "
            f"{np.dtype(dtype)} with 1 dimension, {size} elements on {device}; pass a flat array of that size"
        )
    contiguous = array.flags["C_CONTIGUOUS"] if device == "cpu" else array.is_c_contiguous()
    if not contiguous:
        raise PayloadError(
            f"{what}: got a strided array; expected contiguous memory; pass numpy.ascontiguousarray(...)"
        )


def check_positive_int(owner: str, name: str, value: Any, low: int = 1, high: int = 1 << 30) -> None:
    """Raise ConfigError unless ``value`` is an int in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{owner}: {name}={value!r}; expected a whole number from {low} to {high}")
