"""``fp16``: IEEE half precision, rounded to nearest even; 16 bits per element.

Relative error at most 2**-11 in the normal range, 2**-14 to 65504; for Gaussian values the squared error relative to
``‖x‖²`` is 4.3e-8. Values beyond the largest half, 65504, are sent as 65504; with a residual the excess is kept there
and sent in later steps, so nothing overflows to infinity. Values below 2**-25 are sent as 0 and gather in the residual.

Payloads may be summed, in float32 with a rounding to half at each hop. The plain choice to halve the traffic where
gradients are scaled to its range; ``bf16`` needs no scaling and is eight times coarser.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families.cast import Cast
from .kernels.cpu.casts import HALF, rounding_error
from .registry import register


@register
@dataclass(frozen=True)
class Fp16(Cast):
    """Cast to float16. Payload: n little-endian halves, 2·n bytes."""

    name = "fp16"
    to = "float16"
    rule = HALF

    def contraction(self, n: int) -> float:
        # No δ holds for every x: elements below 2**-25 are not sent. But no element's error exceeds the element, nor
        # 2**-25 down there, so a residual stays bounded; the number says that there may be one, and no more.
        return 2.0**-24

    def gaussian_error(self, n: int) -> float:
        return rounding_error(10, -14)
