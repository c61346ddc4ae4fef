"""``signum``: the sign of the momentum, decided by majority vote (Bernstein et al., 2018); 1 bit per element.

``m ← β m + x``, then as ``signsgd`` with m in the place of x. (The paper's ``m ← β m + (1 - β) x`` is 1 - β times this
m and has the same signs.) Momentum makes the signs steadier than those of single gradients; like ``signsgd`` it is no
contraction, so there is no error feedback, and no convergence in general.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba import prange

from .by_address import KernelCall
from .checks import check_number
from .context import Context
from .kernels.cpu import entries, host
from .kernels.cpu import signs as cpu_signs
from .optional import Keeps
from .registry import register
from .signsgd import SignSGD

_MOMENTUM = "momentum"


@register
@dataclass(frozen=True)
class Signum(SignSGD):
    """Signs of the momentum. Payload: ceil(n/64) uint64 of sign bits (1 = negative).

    The momentum is kept in the context from step to step, and in checkpoints. A residual is added to the momentum
    before its sign is taken, and never enters it.

    Args:
        beta: how much of the momentum the next step keeps.
    """

    beta: float = 0.9
    name = "signum"
    examples: ClassVar[Sequence[str]] = ("signum:beta=0.5",)
    keeps: ClassVar[Keeps] = {_MOMENTUM: "average"}

    def __post_init__(self) -> None:
        check_number("signum", "beta", self.beta, 0, 0.9999)

    def encode_traffic(self, n: int) -> int:
        return super().encode_traffic(n) + 8 * n  # the momentum is read and written

    def second_pass(self) -> SignSGD:
        return SignSGD()

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        momentum = context.kept(_MOMENTUM, x.size, x)
        kept = host.EMPTY if residual is None else residual
        _encode(x, kept, momentum, payload.view(np.uint64), np.float32(self.beta))

    def encoder(self, n: int) -> KernelCall:
        return KernelCall(_encode_at, (self.beta,), grain=64, leading=1, state=_MOMENTUM)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import signs as cuda_signs

        momentum = context.kept(_MOMENTUM, x.size, x)
        cuda_signs.encode_signs(x, residual, momentum, payload.view(np.uint64), self.beta)


@host.inline
def _advance(momentum, x, beta):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        momentum[i] = host.sanitise(host.fma(momentum[i], beta, x[i]))


@host.inline
def _advance_both(momentum, kept, x, beta):  # type: ignore[no-untyped-def]
    """As ``_advance``, and ``kept += momentum``, which is added before it is sanitised, as ``x`` would be alone."""
    for i in range(x.size):
        moved = host.fma(momentum[i], beta, x[i])
        momentum[i] = host.sanitise(moved)
        kept[i] = host.sanitise(kept[i] + moved)


@host.Kernel
def _encode(x, residual, momentum, words, beta):  # type: ignore[no-untyped-def]
    for c in prange((x.size + cpu_signs.CHUNK - 1) // cpu_signs.CHUNK):
        start, stop = c * cpu_signs.CHUNK, min(x.size, (c + 1) * cpu_signs.CHUNK)
        signs = words[start // 64 : (stop + 63) // 64]
        values, moved, kept = x[start:stop], momentum[start:stop], residual[start:stop]
        if kept.size:
            _advance_both(moved, kept, values, beta)
            cpu_signs.pack(kept, signs)
            cpu_signs.add(kept, signs, np.float32(-1.0), np.float32(1.0))
        else:
            _advance(moved, values, beta)
            cpu_signs.pack(moved, signs)


_encode_serial = _encode.serial


@entries.Entry
def _encode_at(x, n, payload, residual, state, work, key, add, parameters, first, whole):  # type: ignore[no-untyped-def]
    words, beta = entries.words(payload + first // 8, (n + 63) // 64), np.float32(entries.doubles(parameters, 1)[0])
    kept, momentum = entries.floats_if(residual, n), entries.floats(state, n)
    _encode_serial(entries.floats(x, n), kept, momentum, words, beta)
    return 0
