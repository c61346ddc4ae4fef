"""``fp8_e4m3``: 8-bit floats with 3 bits of mantissa and one float32 scale per block; 8 + 32/block bits per element.

``scale = max|x| / 448`` over the block and ``code = x / scale`` rounded to the nearest E4M3 (ties to even; OCP 8-bit
Floating Point Specification, 2023; Micikevicius et al., 2022), subnormal ones included. The relative error is at most
1/17 down to 2**-14 of the block's largest magnitude, so ``δ = 1 - 1/289``. A block whose magnitudes are all below 1e-30
is sent as zeros.

Against ``int8``: errors follow each value and not the block's largest, at 14 times the mean square for Gaussian values.
Better where magnitudes differ by orders within a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families.quantised import Float8Quantiser
from .registry import register


@register
@dataclass(frozen=True)
class Fp8E4M3(Float8Quantiser):
    """Block-scaled E4M3. Payload: ceil(n/block) float32 scales, then n codes: 4·ceil(n/block) + n bytes.

    Args:
        block: elements that share a scale.
    """

    block: int = 256
    name = "fp8_e4m3"
    top = 448.0
    mantissa = 3
    lowest = -6
    examples = ("fp8_e4m3:block=100",)
