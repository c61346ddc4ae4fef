"""``topk``: the k = ratio·n elements of largest magnitude, exactly; 64·ratio bits per element.

A contraction with ``δ = k/n``; for Gaussian values the squared error relative to ``‖x‖²`` is ``1 - 2(tφ(t) + Φ̄(t))``,
``t = Φ⁻¹(1 - ratio/2)``: 0.9155 at 1 %. Equal magnitudes are taken in order of their index, so the choice is unique on
any device. It converges only with error feedback (Stich et al., 2018).

On the CPU the search reads the data once at full speed: a sample gives a threshold a little below the k-th magnitude,
everything above it is noted while it is in the first cache, and the exact choice is made among those few. A sample that
misleads costs another pass with a lower threshold, never a wrong choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import kept
from .context import Context
from .kernels.cpu import samples, sparse
from .registry import register


@register
@dataclass(frozen=True)
class TopK(kept.Sampled):
    """Exact top-k by magnitude. Payload: k uint32 indices in rising order, then their k float32 values: 8·k bytes.

    With other ``values``: the coded positions, then the payload of the values (``kept``).

    Args:
        ratio: share of the elements that are sent, in (0, 1]; at least one element is.
        values: "fp32", or "fp16", "int8", "int4", "int2" or "onebit" with coded positions.
    """

    ratio: float = 0.01
    values: str = "fp32"
    name = "topk"
    examples = ("topk:ratio=0.3", "topk:ratio=1.0", "topk:values=int4", "topk:ratio=0.3,values=onebit")

    def __post_init__(self) -> None:
        self._check_kept()

    def contraction(self, n: int) -> float:
        return self._contraction(n, self.count(n))

    def gaussian_error(self, n: int) -> float | None:
        share = self.count(n) / n if n else 1.0
        return self._gaussian_error(n, sparse.gaussian_error(share), share) if n else None

    def _quota(self, n: int) -> sparse.Quota:
        k = self.count(n)
        return sparse.Quota(most=k, least=k, few=k, smallest=0)

    def _sample(self, n: int) -> samples.Sample:
        return samples.searching(n, self.count(n))

    def _choose_cuda(self, x: Any, plain: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import topk as cuda_topk

        _, indices, values = self._split(plain)
        cuda_topk.encode(x, residual, indices, values)
