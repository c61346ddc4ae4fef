"""``topk``: the k = ratio·n elements of largest magnitude, exactly; 64·ratio bits an element.

A contraction with ``δ = k/n``; for Gaussian values the squared error relative to ``‖x‖²`` is
``1 - 2(tφ(t) + Φ̄(t))``, ``t = Φ⁻¹(1 - ratio/2)``: 0.9155 at 1 %. Equal magnitudes are taken in order of their index, so
the choice is unique on any device. It converges only with error feedback (Stich et al., 2018).

On the CPU the search reads the data once at full speed: a strided sample gives a threshold a little below the k-th
magnitude, everything above it is collected, and the exact choice is made among those few. A sample that misleads costs
another pass with a lower threshold, never a wrong choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from ..errors import ConfigError
from . import _cpu
from .base import Compressor
from .registry import register

_CHUNK = 8192
_SAMPLE = 8192


@register
@dataclass(frozen=True)
class TopK(Compressor):
    """Exact top-k by magnitude. Payload: k uint32 indices in rising order, then their k float32 values: 8·k bytes.

    Args:
        ratio: share of the elements that are sent, in (0, 1]; at least one element is.
    """

    ratio: float = 0.01
    name = "topk"

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, (int, float)) or not 0 < self.ratio <= 1:
            raise ConfigError(f"topk: ratio={self.ratio!r}; expected a number above 0 and at most 1")

    def count(self, n: int) -> int:
        """How many of n elements are sent."""
        return min(n, max(1, round(self.ratio * n)))

    def nbytes(self, n: int) -> int:
        return 8 * self.count(n)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, key: int) -> None:
        indices, values = self._split(payload, x.size)
        if residual is not None:
            _add(residual, x)
        source = x if residual is None else residual
        candidates = _candidates(source, indices.size)
        _choose(source, candidates, indices, values)
        if residual is not None:
            residual[indices] = 0

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        indices, values = self._split(payload, out.size)
        if not add:
            out.fill(0)
        _scatter_add(out, indices, values)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, key: int) -> None:
        from . import _cuda_topk

        _cuda_topk.encode(x, residual, *self._split(payload, x.size))

    def _decode_cuda(self, payload: Any, out: Any, add: bool) -> None:
        from . import _cuda_topk

        _cuda_topk.decode(*self._split(payload, out.size), out, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as (uint32 indices, float32 values) views."""
        head = 4 * self.count(n)
        return payload[:head].view(np.uint32), payload[head:].view(np.float32)


def _candidates(x: np.ndarray, k: int) -> np.ndarray:
    """Indices, in rising order, of a superset of the k largest magnitudes that is not much larger."""
    threshold = _sampled_threshold(x, k)
    counts = np.empty(-(-x.size // _CHUNK), np.int64)
    while True:
        _count(x, counts, threshold)
        total = int(counts.sum())
        if total >= k:
            break
        threshold = np.uint32(threshold // 2 if threshold > 1 << 23 else 0)
    found = np.empty(total, np.uint32)
    _collect(x, found, np.cumsum(counts) - counts, threshold)
    return found


def _sampled_threshold(x: np.ndarray, k: int) -> np.uint32:
    """Magnitude bits that a few more than k elements should reach, from a strided sample."""
    sample = x[:: max(1, x.size // _SAMPLE)].view(np.uint32) & np.uint32(0x7FFFFFFF)
    expected = sample.size * k / x.size
    # Four standard deviations of the count in a random sample make a second pass rare.
    rank = int(expected + 4 * np.sqrt(expected) + 4)
    if rank >= sample.size:
        return np.uint32(0)
    return np.uint32(np.partition(sample, sample.size - rank)[sample.size - rank])


@_cpu.Kernel
def _add(residual, x):  # type: ignore[no-untyped-def]
    for chunk in prange((x.size + _CHUNK - 1) // _CHUNK):
        a, b = chunk * _CHUNK, min(x.size, (chunk + 1) * _CHUNK)
        _cpu.add_into(residual[a:b], x[a:b])


@_cpu.inline
def _count_block(x, threshold):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(x.size):
        total += np.uint32(_cpu.float_bits(x[i]) & np.uint32(0x7FFFFFFF)) >= threshold
    return total


@_cpu.Kernel
def _count(x, counts, threshold):  # type: ignore[no-untyped-def]
    for chunk in prange(counts.size):
        counts[chunk] = _count_block(x[chunk * _CHUNK : min(x.size, (chunk + 1) * _CHUNK)], threshold)


@_cpu.inline
def _collect_block(x, start, found, at, threshold):  # type: ignore[no-untyped-def]
    whole = x.size // 64
    for w in range(whole):
        mask = _cpu.magnitude_mask(x, 64 * w, threshold)
        while mask:
            found[at] = start + 64 * w + _cpu.trailing_zeros(mask)
            at += 1
            mask &= mask - np.uint64(1)
    for i in range(64 * whole, x.size):
        if np.uint32(_cpu.float_bits(x[i]) & np.uint32(0x7FFFFFFF)) >= threshold:
            found[at] = start + i
            at += 1


@_cpu.Kernel
def _collect(x, found, offsets, threshold):  # type: ignore[no-untyped-def]
    for chunk in prange(offsets.size):
        start = chunk * _CHUNK
        _collect_block(x[start : min(x.size, start + _CHUNK)], start, found, offsets[chunk], threshold)


def _choose(x: np.ndarray, candidates: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
    """Write the k largest of the candidates, in rising index order; ties go to the smaller index."""
    k = indices.size
    magnitudes = x[candidates].view(np.uint32) & np.uint32(0x7FFFFFFF)
    smallest = np.partition(magnitudes, candidates.size - k)[candidates.size - k]
    _fill(x, candidates, magnitudes, smallest, indices, values)


@_cpu.inline
def _fill(x, candidates, magnitudes, smallest, indices, values):  # type: ignore[no-untyped-def]
    larger = 0
    for i in range(candidates.size):
        larger += magnitudes[i] > smallest
    ties = indices.size - larger
    at = 0
    for i in range(candidates.size):
        equal = magnitudes[i] == smallest
        if magnitudes[i] > smallest or (equal and ties > 0):
            ties -= equal
            indices[at] = candidates[i]
            values[at] = x[candidates[i]]
            at += 1


@_cpu.inline
def _scatter_add(out, indices, values):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        if indices[i] < out.size:  # a corrupted payload must not write outside the array
            out[indices[i]] += values[i]
