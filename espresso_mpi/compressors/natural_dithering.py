"""``natural_dithering``: dithering to powers of two (Horváth et al., 2019).

ceil(log2(2·levels + 1)) + 32/block bits per element. Each becomes 0 or ``± norm · 2^-j``, 0 ≤ j < levels, one of its
two neighbours among them, at random so that the mean is right. Unbiased, with variance ω = 1/8 unless elements below
the lowest level say more: (√(1 + (B - 1)ε²) - 1)/2 for the maximum norm, √B·ε - 1 or 1/8 + 2Bε²/9 for the Euclidean
one, where B = block and ε = 2^(1 - levels). On Gaussian values the squared error relative to ``‖x‖²`` is 0.0774 with
the defaults: few bits carry many magnitudes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families.dithered import Levelled
from .registry import register


@register
@dataclass(frozen=True)
class NaturalDithering(Levelled):
    """Stochastic powers of two. Payload: ``width`` uint64 for each 64 elements, then a float32 lowest level a block.

    Args:
        levels: powers of two, the norm the highest; at most 27, so that the lowest is a normal number.
        norm: "max" or "l2".
        block: elements that share a norm; multiples of 64 waste no bits.
        scaled: divide by 1 + ω: biased, a contraction with δ = 1/(1 + ω), for error feedback.
    """

    name = "natural_dithering"
    examples = (
        "natural_dithering:levels=3,norm=l2",
        "natural_dithering:levels=27,block=100",
        "natural_dithering:levels=2,norm=l2,block=2048,scaled=true",
    )
    most = 27
    powers = True
