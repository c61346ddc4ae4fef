"""``qsgd``: linear dithering (QSGD, Alistarh et al., 2017); ceil(log2(2·levels + 1)) + 32/block bits per element.

Each element becomes ``sgn(x) · norm · k / levels`` with the norm of its block and k = levels · |x| / norm rounded up or
down at random so that the mean is right. Unbiased, with variance ω ≤ √B/s - 1 (s ≤ √B/2) or B/(4s²) for the Euclidean
norm and (√(1 + (B - 1)/s²) - 1)/2 for the maximum norm, where B = block and s = levels. On Gaussian values the squared
error relative to ``‖x‖²`` is 8.03, 0.436, 0.00132 for s = 1, 7, 127 with the Euclidean norm and B = 128, and 1.89,
0.0450, 1.37e-4 with the maximum norm and B = 2048.

The Euclidean norm is the paper's: most levels then are 0, for the sake of a code of variable length. Here all take as
many bits, and the maximum, never larger, gives the smaller error.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families.dithered import Levelled
from .registry import register


@register
@dataclass(frozen=True)
class QSGD(Levelled):
    """Stochastic levels of the block's norm. Payload: ``width`` uint64 for each 64 elements, a float32 step per block.

    Error feedback needs ω < 1, as with the defaults (0.45), or ``scaled``: unscaled with ω ≥ 1 it diverges.

    Args:
        levels: s, the levels above zero.
        norm: "max" or "l2".
        block: elements that share a norm; multiples of 64 waste no bits.
        scaled: divide by 1 + ω: biased, a contraction with δ = 1/(1 + ω), for error feedback.
    """

    name = "qsgd"
    examples = (
        "qsgd:levels=1,norm=l2",
        "qsgd:levels=127,block=2048",
        "qsgd:levels=300,norm=l2,block=100",
        "qsgd:levels=1,block=2048,scaled=true",
    )
    most = (1 << 15) - 1
