"""``topk_sampled``: the largest elements, about k = ratio·n of them, by a threshold from a sample; 64·ratio bits each.

All m elements that reach the threshold are sent if k/2 ≤ m ≤ k. If the sample misled, with more or fewer, the k largest
are, as by ``topk``; if fewer elements than that are not zero, all of them. So what is sent is always the largest
magnitudes, in order of index, and a contraction with ``δ = ⌈k/2⌉/n`` is guaranteed. The sample holds at least 1/64 of
the elements (65536 at least; of smaller tensors all, which makes the choice exact), so m is k within a few percent:
its mean is ``k(1 - σ/√(2π))`` with ``σ² ≈ 1/(k·sample/n)``. The error on Gaussian values is that of ``topk`` for it.

The data is read once, in one pass with the sum with the residual. Aji and Heafield, 2017 (there for 0.1 % samples).
It converges only with error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import kept
from .kernels.cpu import sparse
from .registry import register


@register
@dataclass(frozen=True)
class TopKSampled(kept.Counted):
    """Top-k by a sampled threshold. Payload: 8 + 8·k bytes.

    A uint64 m, k uint32 indices in rising order, k float32 values. The slots beyond m are zero. With other ``values``:
    the coded positions, then the payload of the values (``kept``).

    Args:
        ratio: share of the elements that are sent at most, in (0, 1].
        values: "fp32", or "fp16", "int8", "int4", "int2" or "onebit" with coded positions.
    """

    ratio: float = 0.01
    values: str = "fp32"
    name = "topk_sampled"
    examples = ("topk_sampled:ratio=0.3", "topk_sampled:ratio=0.001", "topk_sampled:values=int8")

    def __post_init__(self) -> None:
        self._check_kept()

    def _quota(self, n: int) -> sparse.Quota:
        k = self.count(n)
        return sparse.Quota(most=k, least=-(-k // 2), few=k)
