"""``int2``: the signs of large elements with one float32 scale per block; 2 + 32/block bits per element.

``scale = max|x|`` over the block; codes are -1, 0 and 1, to nearest (0 below half the scale) or stochastically
(unbiased: TernGrad's rule, Wen et al., 2017, block by block). To nearest it is a contraction with
``δ = 1/(1 + (block - 1)/4)``; stochastically ``ω = (sqrt(block) - 1)/2``, which is below 1 up to block 8: use
``scaled`` with error feedback. A block whose magnitudes are all below 1e-30 is sent as zeros.

The coarsest of the family: only with error feedback, or stochastically where unbiased matters more than small.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families.quantised import IntegerQuantiser
from .registry import register


@register
@dataclass(frozen=True)
class Int2(IntegerQuantiser):
    """Block-scaled int2, four codes per byte: 4·ceil(n/block) bytes of scales and ceil(block/4) for each block of
    codes.

    In a block of m codes, byte j holds codes j, j + s, j + 2s, j + 3s from its lowest bits upward, where s = ceil(m/4).

    Args:
        block: elements that share a scale.
        rounding: "nearest" or "stochastic".
        scaled: of stochastic rounding: divide the decoded values by 1 + ω, which makes a contraction for any block.
    """

    block: int = 64
    name = "int2"
    top = 1.0
    per = 4
    examples = ("int2:block=30", "int2:rounding=stochastic", "int2:rounding=stochastic,scaled=True")
