"""``int4``: symmetric linear quantisation to 4 bits with one float32 scale per block; 4 + 32/block bits per element.

``scale = max|x| / 7`` over the block and ``code = round(x / scale)``, to nearest (ties to even) or stochastically
(unbiased). For Gaussian values and block 128 the squared error relative to ``‖x‖²`` is 0.0138 to nearest and twice
that stochastically. To nearest it is a contraction with ``δ = 1/(1 + (block - 1)/196)``, 0.61; stochastically
``ω = (sqrt(1 + (block - 1)/49) - 1)/2``, 0.45, which is below 1 up to block 392. A block whose magnitudes are all below
1e-30 is sent as zeros.

The codes of gradients in ZeRO++ (Wang et al., 2023); use it with error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families.quantised import IntegerQuantiser
from .registry import register


@register
@dataclass(frozen=True)
class Int4(IntegerQuantiser):
    """Block-scaled int4, two codes per byte: 4·ceil(n/block) bytes of scales and ceil(block/2) for each block of codes.

    In a block of m codes, byte j holds code j in its lower half and code j + ceil(m/2) in its upper half.

    Args:
        block: elements that share a scale.
        rounding: "nearest" or "stochastic".
        scaled: of stochastic rounding: divide the decoded values by 1 + ω, which makes a contraction for any block.
    """

    block: int = 128
    name = "int4"
    top = 7.0
    per = 2
    examples = ("int4:block=51", "int4:rounding=stochastic", "int4:block=1000,rounding=stochastic,scaled=True")
