"""``threshold``: the elements with ``|x| ≥ value``, ratio·n of them at most; 64·ratio bits per element.

If more reach the value, the k = ratio·n largest go (equal ones in order of index) and the rest stays in the residual.
If none does, the single largest goes: so ``δ = 1/n`` is guaranteed, without which error feedback would not be allowed.
What is left is bounded by ``‖e‖² < n·value²`` as long as the capacity suffices, however large x is: an absolute
compressor, which with error feedback converges as fast as any that sends as much (Sahu et al., 2021). As the bound does
not move with x, neither does the method: C(2ʲx) is not 2ʲC(x).

For Gaussian values the squared error relative to ``‖x‖²`` is ``1 - 2(tφ(t) + Φ̄(t))`` with t the value, or the
magnitude that a share ``ratio`` reaches if that is larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from . import kept
from .checks import check_number
from .kernels.cpu import samples, sparse
from .limit import LIMIT
from .registry import register

_TINIEST = float(np.finfo(np.float32).smallest_subnormal)


@register
@dataclass(frozen=True)
class Threshold(kept.Counted):
    """What reaches a value. Payload: 8 + 8·k bytes.

    A uint64 m, k uint32 indices in rising order, k float32 values. The slots beyond m are zero. With other ``values``:
    the coded positions, then the payload of the values (``kept``).

    Args:
        value: the magnitude to reach, above 0; rounded to float32.
        ratio: share of the elements that are sent at most, in (0, 1].
        values: "fp32", or "fp16", "int8", "int4", "int2" or "onebit" with coded positions.
    """

    value: float = 0.01
    ratio: float = 0.01
    values: str = "fp32"
    name = "threshold"
    examples = ("threshold:value=2.0,ratio=0.1", "threshold:value=0.5,ratio=1.0", "threshold:values=fp16")
    homogeneous = False

    def __post_init__(self) -> None:
        check_number("threshold", "value", self.value, _TINIEST, LIMIT)
        self._check_kept()

    def gaussian_error(self, n: int) -> float | None:
        if not n:
            return None
        reach = 2 * NormalDist().cdf(-self.value)
        share = min(max(reach, 1 / n), self.count(n) / n)
        return self._gaussian_error(n, sparse.gaussian_error(share), share)

    def _quota(self, n: int) -> sparse.Quota:
        return sparse.Quota(most=self.count(n), least=1, few=1)

    def _sample(self, n: int) -> samples.Sample:
        return samples.searching(n, self.count(n))

    def _key(self) -> int:
        return int(np.float32(self.value).view(np.uint32))
