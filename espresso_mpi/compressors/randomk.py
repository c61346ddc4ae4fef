"""``randomk``: k = ratio·n positions that all ranks draw alike from one seed, values only; 32·ratio bits per element.

As every rank sends the same positions, payloads are summed as they are by an Allreduce of k numbers whatever the
number of ranks. Drawn without replacement, each position with probability k/n exactly: a contraction with ``δ = k/n``
in expectation over the draw, and ``E‖x - C(x)‖² = (1 - k/n)‖x‖²`` for every x. With ``scaled`` the decoded values are
multiplied by n/k: unbiased with ``ω = n/k - 1``, for use without error feedback (Wangni et al., 2018; Stich et al.,
2018).

To use where the wire is slow and the kernels must cost next to nothing; at equal bits every choice by magnitude loses
less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from .base import Compressor
from .by_address import KernelCall
from .checks import check_number
from .context import Context
from .kernels.cpu import entries, host
from .kernels.cpu import linear_sparse as sparse
from .kernels.cpu import sparse as cpu_sparse
from .registry import register


@register
@dataclass(frozen=True)
class RandomK(Compressor):
    """Random-k. Payload: the uint64 seed and 8 zero bytes, then k float32 values: 16 + 4·k bytes.

    The positions are drawn as ``cpu.linear_sparse`` says. Values are in the order of the draw.

    Args:
        ratio: share of the elements that are sent, in (0, 1]; at least one element is.
        scaled: multiply decoded values by n/k, which makes the method unbiased and unfit for error feedback.
    """

    ratio: float = 0.01
    scaled: bool = False
    name = "randomk"
    examples = ("randomk:ratio=0.3", "randomk:ratio=0.1,scaled=true", "randomk:ratio=1.0")
    common = True
    sparse = True

    def __post_init__(self) -> None:
        check_number("randomk", "ratio", self.ratio, 0, 1, above=True)

    def count(self, n: int) -> int:
        """How many of n elements are sent."""
        return cpu_sparse.count(n, self.ratio)

    def nbytes(self, n: int) -> int:
        return self.header(n) + 4 * self.count(n)

    def header(self, n: int) -> int:
        return 16 if n else 0

    @property
    def element(self) -> str:
        return "float32"

    def contraction(self, n: int) -> float:
        share = self.count(n) / n
        return max(0.0, 2 - 1 / share) if self.scaled else share

    def variance(self, n: int) -> float | None:
        return n / self.count(n) - 1 if self.scaled else None

    def gaussian_error(self, n: int) -> float:
        return n / self.count(n) - 1 if self.scaled else 1 - self.count(n) / n

    def decode_traffic(self, n: int) -> int:
        return cpu_sparse.scattered_traffic(n, self.count(n)) + self.nbytes(n)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        head, values = payload[:16].view(np.uint64), payload[16:].view(np.float32)
        seed = sparse.seed_of(context)
        head[0], head[1] = seed, 0
        _encode(x, host.EMPTY if residual is None else residual, values, seed, self._factor(x.size))

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        seed, values = payload[:16].view(np.uint64)[0], payload[16:].view(np.float32)
        _decode(out, values, seed, self._factor(out.size), add)

    def encoder(self, n: int) -> KernelCall | None:
        return KernelCall(_encode_at, self._numbers(n), shares=True) if n else None

    def decoder(self, n: int) -> KernelCall | None:
        return KernelCall(_decode_at, self._numbers(n)) if n else None

    def _numbers(self, n: int) -> tuple[float, ...]:
        return float(self.count(n)), float(self._factor(n))

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import randomk as cuda_randomk

        head, values = payload[:16].view(np.uint32), payload[16:].view(np.float32)
        cuda_randomk.encode(x, residual, head, values, context.shared, self._factor(x.size))

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import randomk as cuda_randomk

        head, values = payload[:16].view(np.uint32), payload[16:].view(np.float32)
        cuda_randomk.decode(out, head, values, self._factor(out.size), add)

    def _factor(self, n: int) -> np.float32:
        """What decoded values are multiplied by."""
        return np.float32(n / self.count(n) if self.scaled else 1)


@host.inline
def _spans(a, b, start, n):  # type: ignore[no-untyped-def]
    """The at most two stretches of memory that the circle's elements from a to b occupy."""
    c, d = a + start, b + start
    return min(c, n), min(d, n), max(c - n, 0), max(d - n, 0)


@host.inline
def _chunk(chunk, each, n, k, start, low, high):  # type: ignore[no-untyped-def]
    """The ends of a chunk of the circle; what is drawn there, and the first place and number of its values."""
    a, b = chunk * each, min(n, (chunk + 1) * each)
    where = sparse.room(each, n, k)
    first, count = sparse.drawn(where, a, b, n, k, start, low, high)
    return a, b, where, first, count


@host.Kernel
def _encode(x, residual, values, seed, factor):  # type: ignore[no-untyped-def]
    n, k = x.size, values.size
    start, low, high = sparse.plan(seed, n)
    each = sparse.chunk_of(n, k)
    for chunk in prange((n + each - 1) // each):
        a, b, where, first, count = _chunk(chunk, each, n, k, start, low, high)
        if residual.size:
            c, d, e, f = _spans(a, b, start, n)
            host.sanitised_sum(residual[c:d], x[c:d])
            host.sanitised_sum(residual[e:f], x[e:f])
            for j in range(count):
                value = residual[where[j]]
                values[first + j] = value
                residual[where[j]] = value - host.sanitise(value * factor)
        else:
            for j in range(count):
                values[first + j] = host.sanitise(x[where[j]])


@host.Kernel
def _decode(out, values, seed, factor, add):  # type: ignore[no-untyped-def]
    n, k = out.size, values.size
    start, low, high = sparse.plan(seed, n)
    each = sparse.chunk_of(n, k)
    for chunk in prange((n + each - 1) // each):
        a, b, where, first, count = _chunk(chunk, each, n, k, start, low, high)
        if not add:
            c, d, e, f = _spans(a, b, start, n)
            out[c:d] = np.float32(0)
            out[e:f] = np.float32(0)
        for j in range(count):
            value = host.sanitise(values[first + j] * factor)
            out[where[j]] = out[where[j]] + value if add else value


# --- by address -------------------------------------------------------------------------------------------------------

_encode_serial, _decode_serial = _encode.serial, _decode.serial


@host.inline
def _payload_at(payload, parameters):  # type: ignore[no-untyped-def]
    """The words of the header, the values, and what decoded ones are multiplied by."""
    numbers = entries.doubles(parameters, 2)
    return entries.words(payload, 2), entries.floats(payload + 16, np.int64(numbers[0])), np.float32(numbers[1])


@entries.Entry
def _encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    head, values, factor = _payload_at(payload, parameters)
    head[0], head[1] = np.uint64(key), np.uint64(0)
    _encode_serial(entries.floats(x, n), entries.floats_if(residual, n), values, np.uint64(key), factor)
    return 0


@entries.Entry
def _decode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    head, values, factor = _payload_at(payload, parameters)
    _decode_serial(entries.floats(x, n), values, head[0], factor, add != 0)
    return 0
