"""``onebit``: scaled sign (EF-SignSGD, Karimireddy et al., 2019), one scale per block; 1 + 32/block bits per element.

Each element becomes ``mean|x| · sign(x)`` with the mean over its block and sign(0) = +. A contraction with
``δ = ‖x‖₁²/(d‖x‖²)``, at least 1/block: for Gaussian values the squared error relative to ``‖x‖²`` is 1 - 2/π =
0.3634. It converges only with error feedback. Where the magnitudes of a block sum to more than float32 holds, its scale
is smaller than their mean, and they are counted as cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import prange

from .by_address import KernelCall
from .context import Context
from .families import signed
from .kernels.cpu import entries, host
from .kernels.cpu import signs as cpu_signs
from .limit import LIMIT
from .registry import register


@register
@dataclass(frozen=True)
class OneBit(signed.Scaled):
    """Scaled sign. Payload: ceil(n/64) uint64 of sign bits (1 = negative), then ceil(n/block) float32 scales.

    Args:
        block: elements that share a scale; a multiple of 64.
    """

    name = "onebit"
    sides = 1
    examples: ClassVar[Sequence[str]] = ("onebit:block=64", "onebit:block=192")

    def gaussian_error(self, n: int) -> float | None:
        """Exact: a block of d elements loses (d - 1)(1 - 2/π)."""
        return (1 - 2 / math.pi) * (1 - self.blocks(n) / max(n, 1))

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        words, scales, _ = self._split(payload, x.size)
        context.cut = int(_encode(x, host.EMPTY if residual is None else residual, words, scales, self.block))

    def encoder(self, n: int) -> KernelCall:
        return KernelCall(_encode_at, (self.block,), grain=self.block, leading=1)


@host.Kernel
def _encode(x, residual, words, scales, block):  # type: ignore[no-untyped-def]
    """Returns how many values are of blocks whose scale is smaller than their mean."""
    cut = 0
    for b in prange(scales.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        signs = words[start // 64 : (stop + 63) // 64]
        values, kept = x[start:stop], residual[start:stop]
        if kept.size:
            host.add_into(kept, values)
            values = kept
        total = host.abs_sum(values)
        if not total <= np.float32(LIMIT):  # only then can there be a value beyond LIMIT, or a NaN
            values = cpu_signs.sanitised(values, kept.size > 0)
            total = host.abs_sum(values)
        cut += stop - start if total > cpu_signs.LARGEST else 0
        total = min(total, cpu_signs.LARGEST)
        scale = total / np.float32(stop - start)
        scales[b] = scale
        cpu_signs.pack(values, signs)
        if kept.size:
            cpu_signs.add(kept, signs, -scale, scale)
    return cut


_encode_serial = _encode.serial


@entries.Entry
def _encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    block = np.int64(entries.doubles(parameters, 1)[0])
    words, scales, _ = cpu_signs.parts_at(payload, n, block, first, whole, 1)
    return _encode_serial(entries.floats(x, n), entries.floats_if(residual, n), words, scales, block)
