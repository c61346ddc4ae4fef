"""``bf16``: bfloat16, the upper half of a float32; 16 bits per element.

Rounded to nearest even (relative error at most 1/257) or stochastically (unbiased, ``ω = 2**-16``), never cut off: that
would shrink values by 0.28 % on average. For Gaussian values the squared error relative to ``‖x‖²`` is 2.76e-6 to
nearest and twice that stochastically. It has the range of float32, so nothing needs scaling.

Payloads may be summed, in float32 with a rounding to bfloat16 at each hop. Where gradients fit into half precision
``fp16`` is eight times finer at the same size.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_choice
from .families.cast import Cast
from .kernels.cpu.casts import BRAIN, STOCHASTIC, rounding_error
from .registry import register

# For values 1 + t, unit u = 2**-7, the relative variance is t(u - t)/(1 + t)²: at most u²/4/(1 + u), at t = u/(2 + u).
_OMEGA = 2.0**-16 / (1 + 2.0**-7)


@register
@dataclass(frozen=True)
class Bf16(Cast):
    """Cast to bfloat16. Payload: n little-endian elements, 2·n bytes.

    Args:
        rounding: "nearest" or "stochastic".
    """

    rounding: str = "nearest"
    name = "bf16"
    to = "bfloat16"
    examples = ("bf16:rounding=stochastic",)

    def __post_init__(self) -> None:
        check_choice("bf16", "rounding", self.rounding, ("nearest", "stochastic"))

    @property
    def rule(self) -> int:
        return STOCHASTIC if self.rounding == "stochastic" else BRAIN

    def contraction(self, n: int) -> float:
        return 1 - (_OMEGA if self.rounding == "stochastic" else 1 / 257**2)

    def variance(self, n: int) -> float | None:
        return _OMEGA if self.rounding == "stochastic" else None

    def gaussian_error(self, n: int) -> float:
        return rounding_error(7, -126) * (2 if self.rounding == "stochastic" else 1)
