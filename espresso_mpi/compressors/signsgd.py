"""``signsgd``: the sign alone, decided by majority vote (Bernstein et al., 2018); 1 bit per element.

Each element becomes +1 or -1, with sign(0) = +, and the result of a synchronisation is the sign of the ranks' mean: the
step's length is the learning rate's affair. No contraction: no error feedback, and no convergence in general (it fails
for noise that is skewed or differs between the ranks). For unit normal values the squared error relative to ``‖x‖²`` is
2 - 2 √(2/π) = 0.4042. Use ``onebit`` unless the vote itself is wanted, for its bound on what one rank can do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from .base import Compressor
from .by_address import KernelCall
from .context import Context
from .families import signed
from .kernels.cpu import entries, host
from .kernels.cpu import signs as cpu_signs
from .registry import register


@register
@dataclass(frozen=True)
class SignSGD(Compressor):
    """Signs without a scale. Payload: ceil(n/64) uint64 of sign bits (1 = negative)."""

    name = "signsgd"
    averages = False
    divides = True
    homogeneous = False

    def nbytes(self, n: int) -> int:
        return cpu_signs.word_bytes(n)

    def gaussian_error(self, n: int) -> float | None:
        return 2 - 2 * math.sqrt(2 / math.pi)

    def finalize(self, out: Any) -> None:
        signed.finalize(out)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        _encode(x, host.EMPTY if residual is None else residual, payload.view(np.uint64))

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        cpu_signs.decode(out, payload.view(np.uint64), cpu_signs.NONE, cpu_signs.NONE, cpu_signs.CHUNK, add)

    def encoder(self, n: int) -> KernelCall:
        return KernelCall(_encode_at, grain=64, leading=1)

    def decoder(self, n: int) -> KernelCall:
        return KernelCall(cpu_signs.decode_at, (cpu_signs.CHUNK, 0), grain=64)

    def finalizer(self, n: int) -> KernelCall:
        return KernelCall(cpu_signs.vote_at, grain=1)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import signs as cuda_signs

        cuda_signs.encode_signs(x, residual, None, payload.view(np.uint64), 0.0)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import signs as cuda_signs

        cuda_signs.decode(payload.view(np.uint64), None, None, out, cpu_signs.CHUNK, add, context.divisor)


@host.Kernel
def _encode(x, residual, words):  # type: ignore[no-untyped-def]
    for c in prange((x.size + cpu_signs.CHUNK - 1) // cpu_signs.CHUNK):
        start, stop = c * cpu_signs.CHUNK, min(x.size, (c + 1) * cpu_signs.CHUNK)
        signs = words[start // 64 : (stop + 63) // 64]
        values, kept = x[start:stop], residual[start:stop]
        if kept.size:
            host.sanitised_sum(kept, values)
            cpu_signs.pack(kept, signs)
            cpu_signs.add(kept, signs, np.float32(-1.0), np.float32(1.0))
        else:
            cpu_signs.pack(values, signs)


_encode_serial = _encode.serial


@entries.Entry
def _encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    words = entries.words(payload + first // 8, (n + 63) // 64)
    _encode_serial(entries.floats(x, n), entries.floats_if(residual, n), words)
    return 0
