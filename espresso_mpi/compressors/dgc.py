"""``dgc``: deep gradient compression (Lin et al., 2018): sampled top-k of a sum of momenta; 64·ratio bits per element.

``u = mu·u + x`` and ``v += u``, where v is the residual. The elements of v that reach a threshold are sent, and u and v
become zero there: so momentum goes on only where nothing was sent ("momentum factor masking"). u takes the place of the
optimizer's momentum: give the optimizer none, or set ``mu=0``. Without a residual the largest elements of u are sent.

The threshold comes from a sample of at least 1/64 of the elements (65536 at least). All m elements that reach it are
sent if 0.8·k ≤ m ≤ k for k = ratio·n. If there are more, the k largest of them are; if there are fewer, the threshold
sinks (with ranks four times as large in the sample, to 0 after at most ten rounds) until the k largest are known. If
fewer elements than that are not zero, all of them go. What is sent is always the largest of v, in order of index: a
contraction with ``δ = ⌈0.8·k⌉/n`` of ``v + u``. On Gaussian values in the first step, when u = x, the error is that of
``topk`` for the mean of m, ``k(1 - σ/√(2π))`` with ``σ² ≈ 1/(k·sample/n)``.

The paper's warm-up is a schedule: ``dgc:ratio=0.25~0.001@400`` sends 25, 6.3, 1.6 and 0.4 % for a hundred steps each
and then 0.1 %. Its local clipping is ``clip``: the gradient's norm on each of N ranks is held at clip/√N,
and at its share of that in the parts that a tensor is cut into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from . import kept
from .checks import check_number
from .context import Context
from .kernels.cpu import clipping, kept_entries, sparse
from .limit import LIMIT
from .optional import Keeps
from .registry import register


@register
@dataclass(frozen=True)
class Dgc(kept.Counted):
    """Deep gradient compression. Payload: 8 + 8·k bytes.

    A uint64 m, k uint32 indices in rising order, k float32 values. The slots beyond m are zero. With other ``values``:
    the coded positions, then the payload of the values (``kept``).

    Args:
        ratio: share of the elements that are sent at most, in (0, 1].
        mu: the momentum, from 0 to 0.999.
        clip: the largest norm of the gradient on all ranks together, for one tensor; 0 does not clip.
        values: "fp32", or "fp16", "int8", "int4", "int2" or "onebit" with coded positions.
    """

    ratio: float = 0.001
    mu: float = 0.9
    clip: float = 0.0
    values: str = "fp32"
    name = "dgc"
    averages = False
    keeps: ClassVar[Keeps] = {"momentum": "average"}
    examples = ("dgc:ratio=0.25~0.001@400", "dgc:ratio=0.1,mu=0.5", "dgc:ratio=0.1,values=int4")

    def __post_init__(self) -> None:
        self._check_kept()
        check_number("dgc", "mu", self.mu, 0, 0.999)
        check_number("dgc", "clip", self.clip, 0, LIMIT)
        object.__setattr__(self, "homogeneous", self.clip == 0)

    def gaussian_error(self, n: int) -> float | None:
        return None if self.clip else super().gaussian_error(n)

    def encode_traffic(self, n: int) -> int:
        """With a residual and the momentum, each twice."""
        return 20 * n + self.nbytes(n)

    def second_pass(self) -> Dgc:
        return replace(self, mu=0.0, clip=0.0)

    def _momentum_cpu(self, x: np.ndarray, context: Context) -> sparse.Momentum:
        factor = clipping.clip_factor(x, _limit(self, context), context) if self.clip else 1.0
        return sparse.Momentum(context.kept("momentum", x.size, x), self.mu, factor)

    def _momentum_cuda(self, x: Any, context: Context) -> Any:
        from .kernels.cuda import sparse as cuda_sparse

        factor = cuda_sparse.clip_factor(x, _limit(self, context), context) if self.clip else None
        return cuda_sparse.Momentum(context.kept("momentum", x.size, x), self.mu, factor)

    def _choice(self, n: int) -> kept.Choice | None:
        choice = self._sampled_choice(n, self.mu, "momentum")
        if not self.clip:
            return choice
        scratch = max(choice.scratch, 8 * clipping.sums_of(n))
        return choice._replace(entry=kept_entries.encode_clipped_at, scratch=scratch, prefix=(self.clip,))

    def _quota(self, n: int) -> sparse.Quota:
        k = self.count(n)
        return sparse.Quota(most=k, least=-(-4 * k // 5), few=k)


def _limit(method: Dgc, context: Context) -> float:
    """The largest norm of a part on one rank."""
    return method.clip * math.sqrt(context.share / context.ranks)
