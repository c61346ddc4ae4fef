"""``bound``: no element of the result is off by more than a bound; bits + 0.5 bits per element, for smooth data.

For users of simulations, who need a guarantee for every element instead of feedback. Neighbours' differences are sent
as whole numbers of a step that is as small as they allow (``kernels.cpu.deltas``). The more alike neighbours are, the
fewer ``bits`` keep the bound. Each rank checks its values before anything is sent. If the result could be beyond the
bound, that is a ``BoundError`` on every rank, which names the bits that would do. Nothing is cut.

With D the largest difference of neighbours and M the largest magnitude of any rank, ρ = 1/(2**(bits - 1) - 3), and P
encodes along the route, the error of the mean is at most ``D/2·((1 + ρ)ᴾ - 1)`` and what float32 rounds: see
docs/compressors.md for the proof. Prediction by the neighbour and blocks of fixed width are those of cuSZp (Huang et
al., 2023); collectives within a bound, those of ZCCL (Huang et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .base import Compressor
from .by_address import KernelCall
from .checks import check_number, check_positive_int
from .context import Context, Journey
from .kernels.cpu import deltas, host
from .limit import LIMIT
from .registry import register

_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Relative error of a result that is rounded to the type of the tensor, beside that of float32."""

_SMALLEST = {"float16": 2.0**-25}
"""Absolute error of such a result, below the range of normal numbers."""


@register
@dataclass(frozen=True)
class Bound(Compressor):
    """A bound for every element. Payload: 16 + ceil(n/64)·(4 + 8·bits) bytes.

    The step as float32 and twelve zeros. For each block of 64 elements, its first value as float32 and the codes: the
    number of steps from one element to the next plus 2**(bits - 1) - 1, from the lowest bit upward.

    Args:
        abs: the largest error of an element of the result, if it is above 0; then ``rel`` does not count.
        rel: the largest error as a share of the largest magnitude on any rank, in (0, 1]. Each rank asks for it with
            its own values, so a rank whose values are all small needs the bits that they need.
        bits: of a difference of neighbours, 4 to 16. With 13, rel=0.001 holds for any values where nodes are equal.
    """

    abs: float = 0.0
    rel: float = 1e-3
    bits: int = 13
    name = "bound"
    examples = ("bound:rel=0.5,bits=4",)
    bounded = True

    def __post_init__(self) -> None:
        check_number("bound", "abs", self.abs, 0, LIMIT)
        check_number("bound", "rel", self.rel, 0, 1, above=True)
        check_positive_int("bound", "bits", self.bits, 4, 16)

    def nbytes(self, n: int) -> int:
        return 4 * deltas.words(n, self.bits) if n else 0

    # --- the bound ---

    def largest_error(self, spread: float, largest: float, journey: Journey) -> float:
        rho, passes = 1 / ((1 << (self.bits - 1)) - 3), journey.encodes
        growth = (1 + rho) ** passes
        rounding = 2.0**-24 * (journey.ranks + 6 * passes + 4) * growth * largest + 64 * passes * deltas.TINY
        inside = journey.excess * (spread / 2 * (growth - 1) + rounding)
        result = (inside + _ROUNDING.get(journey.dtype, 0.0) * (largest + inside)) * (1 + 1e-9)
        return journey.ranks * result if journey.total else result + _SMALLEST.get(journey.dtype, 0.0)

    def refusal(self, x: Any, journey: Journey, context: Context) -> str:
        spread, largest = self._extent(x, context)
        for method in self.stages():
            problem = method._problem(spread, largest, journey)
            if problem:
                return problem
        return ""

    def _problem(self, spread: float, largest: float, journey: Journey) -> str:
        """Why values of this extent cannot be sent; nothing if they can."""
        if not np.isfinite(largest):
            return "NaN or infinite values"
        allowed = self.abs or self.rel * largest
        if self.largest_error(spread, largest, journey) <= allowed or largest == 0:
            return ""
        bound = f"abs={self.abs:g}" if self.abs else f"rel={self.rel:g} ({allowed:.3g})"
        found = f"neighbours differ by up to {spread:.4g}, magnitudes reach {largest:.4g}: the error may reach "
        found += f"{self.largest_error(spread, largest, journey):.3g} on a route that encodes {journey.encodes} "
        found += f"time(s) over {journey.ranks} ranks, beyond {bound}; expected "
        for bits in range(self.bits + 1, 17):
            if replace(self, bits=bits).largest_error(spread, largest, journey) <= allowed:
                return found + f"smoother values, a larger bound, or bits={bits} in place of bits={self.bits}"
        return found + f"a larger bound (with bits=16 the error may reach {self._least(spread, largest, journey):.3g})"

    def _least(self, spread: float, largest: float, journey: Journey) -> float:
        return replace(self, bits=16).largest_error(spread, largest, journey)

    # --- the work ---

    def _extent(self, x: Any, context: Context) -> tuple[float, float]:
        if isinstance(x, np.ndarray):
            return deltas.extent(x, context)
        from .kernels.cuda import deltas as cuda_deltas

        return cuda_deltas.extent(x)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        kept, words = host.EMPTY if residual is None else residual, payload.view(np.uint32)
        deltas.encode(x, kept, words, deltas.tops_of(x, context), self.bits)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        deltas.decode(out, payload.view(np.uint32), self.bits, add)

    def encoder(self, n: int) -> KernelCall:
        return KernelCall(deltas.encode_at, (self.bits,), scratch=4 * deltas.room(n))

    def decoder(self, n: int) -> KernelCall:
        return KernelCall(deltas.decode_at, (self.bits,))

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import deltas as cuda_deltas

        cuda_deltas.encode(x, x if residual is None else residual, payload, self.bits, residual is not None)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import deltas as cuda_deltas

        cuda_deltas.decode(out, payload, self.bits, add)
