"""``topk``: the k = ratio·n elements of largest magnitude, exactly; 64·ratio bits an element.

A contraction with ``δ = k/n``; for Gaussian values the squared error relative to ``‖x‖²`` is ``1 - 2(tφ(t) + Φ̄(t))``,
``t = Φ⁻¹(1 - ratio/2)``: 0.9155 at 1 %. Equal magnitudes are taken in order of their index, so the choice is unique on
any device. It converges only with error feedback (Stich et al., 2018).

On the CPU the search reads the data once at full speed: a sample gives a threshold a little below the k-th magnitude,
everything above it is marked, and the exact choice is made among those few. A sample that misleads costs another pass
with a lower threshold, never a wrong choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .base import Compressor
from .checks import check_number
from .context import Context
from .kernels.cpu import samples, sparse
from .registry import register


@register
@dataclass(frozen=True)
class TopK(Compressor):
    """Exact top-k by magnitude. Payload: k uint32 indices in rising order, then their k float32 values: 8·k bytes.

    Args:
        ratio: share of the elements that are sent, in (0, 1]; at least one element is.
    """

    ratio: float = 0.01
    name = "topk"
    examples = ("topk:ratio=0.3", "topk:ratio=1.0")
    sparse = True

    def __post_init__(self) -> None:
        check_number("topk", "ratio", self.ratio, 0, 1, above=True)

    def count(self, n: int) -> int:
        """How many of n elements are sent."""
        return sparse.count(n, self.ratio)

    def nbytes(self, n: int) -> int:
        return 8 * self.count(n)

    def contraction(self, n: int) -> float:
        return self.count(n) / n if n else 1.0

    def gaussian_error(self, n: int) -> float | None:
        return sparse.gaussian_error(self.count(n) / n) if n else None

    def decode_traffic(self, n: int) -> int:
        return sparse.scattered_traffic(n, self.count(n)) + self.nbytes(n)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        indices, values = self._split(payload, x.size)
        k = indices.size
        rule = sparse.Rule(most=k, least=k, few=k, smallest=0)
        sparse.encode(x, residual, None, rule, None, samples.aim_above(x.size, k), indices, values, context)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        indices, values = self._split(payload, out.size)
        sparse.decode(indices, values, out, add)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import topk as cuda_topk

        cuda_topk.encode(x, residual, *self._split(payload, x.size))

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import topk as cuda_topk

        cuda_topk.decode(*self._split(payload, out.size), out, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as (uint32 indices, float32 values) views."""
        head = 4 * self.count(n)
        return payload[:head].view(np.uint32), payload[head:].view(np.float32)
