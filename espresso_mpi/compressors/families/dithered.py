"""What ``qsgd``, ``natural_dithering`` and ``terngrad`` share: their class."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..base import Compressor
from ..by_address import KernelCall
from ..checks import check_choice, check_positive_int
from ..context import Context
from ..kernels.cpu import host
from ..kernels.cpu.dithering import DECODERS, ENCODERS, decode, encode, is_narrow, kind, largest_step
from ..kernels.cpu.quantiser import L2, MAX, Quantiser


class Dithering(Compressor):
    """A method that is a ``Quantiser``. Payload: ``width`` uint64 per group, then one float32 step per block."""

    @property
    @abstractmethod
    def quantiser(self) -> Quantiser:
        """The rule of rounding that the parameters name."""

    def nbytes(self, n: int) -> int:
        q = self.quantiser
        return 8 * q.width * q.groups(n) + 4 * -(-n // q.block)

    def contraction(self, n: int) -> float:
        return self.quantiser.contraction(n)

    def variance(self, n: int) -> float | None:
        return self.quantiser.variance(n)

    def gaussian_error(self, n: int) -> float | None:
        return self.quantiser.gaussian_error(n)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        q = self.quantiser
        words, steps = self._split(payload, x.size)
        kept = host.EMPTY if residual is None else residual
        low, high = host.key_words(context.key)
        encode(x, kept, words, steps, kind(q.width), q.block, q.width, q.powers, *self._rule(x.size), low, high)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        q = self.quantiser
        words, steps = self._split(payload, out.size)
        decode(out, words, steps, kind(q.width), q.block, q.width, q.powers, np.int32(q.levels), largest_step(q), add)

    def _rule(self, n: int) -> tuple[Any, ...]:
        """How n elements are rounded."""
        q = self.quantiser
        return np.int32(q.levels), q.norm, np.float32(q.clip), np.float32(q.top), np.float32(q.shrink(n))

    def encoder(self, n: int) -> KernelCall:
        q = self.quantiser
        numbers = (q.block, q.width, q.powers, *map(float, self._rule(n)))
        return KernelCall(ENCODERS[is_narrow(q.width)], numbers, draws=True, grain=q.block)

    def decoder(self, n: int) -> KernelCall:
        q = self.quantiser
        numbers = (q.block, q.width, q.powers, q.levels, float(largest_step(q)))
        return KernelCall(DECODERS[is_narrow(q.width)], numbers, grain=q.block)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from ..kernels.cuda import dithering as cuda_dithering

        words, steps = self._split(payload, x.size)
        cuda_dithering.encode(x, residual, words.view(np.uint32), steps, self.quantiser, context.key)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from ..kernels.cuda import dithering as cuda_dithering

        words, steps = self._split(payload, out.size)
        cuda_dithering.decode(words.view(np.uint32), steps, out, self.quantiser, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as (uint64 words, float32 steps) views."""
        head = 8 * self.quantiser.width * self.quantiser.groups(n)
        return payload[:head].view(np.uint64), payload[head:].view(np.float32)


_NORMS = {"max": MAX, "l2": L2}


@dataclass(frozen=True)
class Levelled(Dithering):
    """Dithering to levels below the norm of a block.

    Args:
        levels: the levels above zero.
        norm: "max" or "l2".
        block: elements that share a norm; multiples of 64 waste no bits.
        scaled: divide by 1 + ω: biased, a contraction with δ = 1/(1 + ω), for error feedback.
    """

    levels: int = 7
    norm: str = "max"
    block: int = 128
    scaled: bool = False
    most: ClassVar[int]
    """The largest number of levels."""
    powers: ClassVar[bool] = False
    """Whether levels are powers of two; else they are evenly spaced."""

    def __post_init__(self) -> None:
        check_positive_int(self.name, "levels", self.levels, high=self.most)
        check_choice(self.name, "norm", self.norm, tuple(_NORMS))
        check_positive_int(self.name, "block", self.block)

    @property
    def quantiser(self) -> Quantiser:
        return Quantiser(self.block, self.levels, powers=self.powers, norm=_NORMS[self.norm], scaled=self.scaled)
