"""``fp8_e5m2``: 8-bit floats with 2 bits of mantissa and one float32 scale per block; 8 + 32/block bits per element.

``scale = max|x| / 57344`` over the block and ``code = x / scale`` rounded to the nearest E5M2 (ties to even; OCP 8-bit
Floating Point Specification, 2023; Micikevicius et al., 2022), subnormal ones included. The relative error is at most
1/9 down to 2**-29 of the block's largest magnitude, so ``δ = 1 - 1/81``. A block whose magnitudes are all below 1e-30
is sent as zeros.

For blocks whose magnitudes span more than the 2**14 that ``fp8_e4m3`` covers with half the error.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families.quantised import Float8Quantiser
from .registry import register


@register
@dataclass(frozen=True)
class Fp8E5M2(Float8Quantiser):
    """Block-scaled E5M2. Payload: ceil(n/block) float32 scales, then n codes: 4·ceil(n/block) + n bytes.

    Args:
        block: elements that share a scale.
    """

    block: int = 256
    name = "fp8_e5m2"
    top = 57344.0
    mantissa = 2
    lowest = -14
    examples = ("fp8_e5m2:block=100",)
