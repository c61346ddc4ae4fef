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
from typing import Any

import numpy as np

from . import kept
from .context import Context
from .kernels.cpu import samples, sparse
from .registry import register


@register
@dataclass(frozen=True)
class TopKSampled(kept.Kept):
    """Top-k by a sampled threshold. Payload: 8 + 8·k bytes.

    A uint64 m, k uint32 indices in rising order, k float32 values. The slots beyond m are zero. With other ``values``:
    the coded positions, then the payload of the values (``kept``).

    Args:
        ratio: share of the elements that are sent at most, in (0, 1].
        values: "fp32", or "fp16", "int8", "int4", "int2" or "onebit" with coded positions.
    """

    ratio: float = 0.01
    values: str = "fp32"
    counted = True
    name = "topk_sampled"
    examples = ("topk_sampled:ratio=0.3", "topk_sampled:ratio=0.001", "topk_sampled:values=int8")

    def __post_init__(self) -> None:
        self._check_kept()

    def contraction(self, n: int) -> float:
        return self._contraction(n, self._quota(n).least) if n else 1.0

    def gaussian_error(self, n: int) -> float | None:
        if not n:
            return None
        return self._gaussian_error(n, sparse.sampled_error(n, self.count(n)), self.count(n) / n)

    def _choose_cpu(self, x: np.ndarray, plain: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        quota, rank = self._quota(x.size), samples.aim(x.size, self.count(x.size))
        sparse.encode_counted(x, residual, None, quota, None, rank, plain, context)

    def _choose_cuda(self, x: Any, plain: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import sparse as cuda_sparse

        quota, rank = self._quota(x.size), samples.aim(x.size, self.count(x.size))
        cuda_sparse.encode(x, residual, None, quota, None, rank, plain, context)

    def _quota(self, n: int) -> sparse.Quota:
        k = self.count(n)
        return sparse.Quota(most=k, least=-(-k // 2), few=k)
