"""``int8``: symmetric linear quantisation to 8 bits with one float32 scale per block; 8 + 32/block bits per element.

``scale = max|x| / 127`` over the block and ``code = round(x / scale)``, to nearest (ties to even) or stochastically
(unbiased). For Gaussian values and block 256 the squared error relative to ``‖x‖²`` is 4.86e-5 to nearest and twice
that stochastically. To nearest it is a contraction with ``δ = 1/(1 + (block - 1)/(4·127²))``, 0.996; stochastically
``ω = (sqrt(1 + (block - 1)/127²) - 1)/2``, 0.004. A block whose magnitudes are all below 1e-30 is sent as zeros.

Where 8 bits are enough, which is nearly everywhere, this is the quantiser to use: no other costs less time.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families.quantised import IntegerQuantiser
from .registry import register


@register
@dataclass(frozen=True)
class Int8(IntegerQuantiser):
    """Block-scaled int8. Payload: ceil(n/block) float32 scales, then n int8 codes: 4·ceil(n/block) + n bytes.

    Args:
        block: elements that share a scale.
        rounding: "nearest" or "stochastic".
        scaled: of stochastic rounding: divide the decoded values by 1 + ω, which makes a contraction for any block.
    """

    block: int = 256
    name = "int8"
    top = 127.0
    examples = ("int8:block=100", "int8:rounding=stochastic", "int8:block=200000,rounding=stochastic,scaled=True")
