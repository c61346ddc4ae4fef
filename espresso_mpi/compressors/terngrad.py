"""``terngrad``: ternary values (Wen et al., 2017); 2 + 32/block bits per element.

Each element becomes ``M · sgn(x) · b`` with b = 1 at the probability |x|/M, else 0, and M the largest magnitude of its
block, after the block was clipped at ``clip`` root mean squares. Unbiased without clipping, with variance
ω = (√block - 1)/2; clipping at 2.5 biases a little and halves the error: 1.0095 of ``‖x‖²`` on Gaussian values.

The paper takes one M for each layer: a block that is at least as large as the tensor does so, at the price of one
thread, and of a worse ω. It clips at standard deviations, which leave nothing of a constant gradient; the mean of a
gradient is next to nothing otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_number, check_positive_int
from .families.dithered import Dithering
from .kernels.cpu.quantiser import CLIP, MAX, Quantiser
from .registry import register


@register
@dataclass(frozen=True)
class TernGrad(Dithering):
    """Stochastic ternary values. Payload: 2 uint64 for each 64 elements, then a float32 M for each block.

    Args:
        block: elements that share M; multiples of 64 waste no bits.
        clip: where to clip, in root mean squares of the block; 0 does not.
        scaled: divide by 1 + ω, which makes it a contraction, for error feedback; unscaled that diverges.
    """

    block: int = 2048
    clip: float = 2.5
    scaled: bool = False
    name = "terngrad"
    examples = ("terngrad:clip=0.0", "terngrad:block=100,clip=2.0", "terngrad:scaled=true")

    def __post_init__(self) -> None:
        check_positive_int("terngrad", "block", self.block)
        check_number("terngrad", "clip", self.clip, 0, 1000)

    @property
    def quantiser(self) -> Quantiser:
        return Quantiser(self.block, 1, norm=CLIP if self.clip else MAX, clip=self.clip, scaled=self.scaled)
