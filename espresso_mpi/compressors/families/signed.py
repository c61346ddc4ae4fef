"""What the sign methods share: their class, and the end of a vote."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from espresso_mpi.arrays import device
from espresso_mpi.errors import ConfigError

from ..base import Compressor
from ..by_address import KernelCall
from ..checks import check_positive_int
from ..context import Context
from ..kernels.cpu.signs import NONE, decode, decode_at, ends, vote, word_bytes
from ..schedule import ParameterSchedule

Self = TypeVar("Self", bound="Blocked")


@dataclass(frozen=True)
class Blocked(Compressor, ABC):
    """A sign method whose elements share their magnitudes by blocks.

    Args:
        block: elements of a block; a multiple of 64, to which the values of a schedule are rounded down.
    """

    block: int = 2048

    def __post_init__(self) -> None:
        check_positive_int(self.name, "block", self.block, low=64)
        if any(value % 64 for value in ends(self.block)):
            raise ConfigError(f"{self.name}: block={self.block}; expected a multiple of 64")

    def at(self: Self, step: int | None) -> Self:
        if not isinstance(self.block, ParameterSchedule):
            return self
        return replace(self, block=int(self.block.end if step is None else self.block.at(step)) // 64 * 64)

    def blocks(self, n: int) -> int:
        """How many blocks n elements make."""
        return -(-n // self.block)

    def contraction(self, n: int) -> float:
        """``‖x‖₁²/(d‖x‖²)`` of a block of d elements is at least 1/d: with equality where one alone is not 0."""
        return 1 / min(self.block, max(n, 1))


@dataclass(frozen=True)
class Scaled(Blocked):
    """A sign method that sends float32 magnitudes of every block.

    Payload: ceil(n/64) uint64 of sign bits (1 = negative), then a float32 of each block, or two: those of all blocks
    for elements that are not negative, then those for negative ones.
    """

    divides = True
    sides: ClassVar[int]
    """Magnitudes of a block: 1, or 2."""

    def nbytes(self, n: int) -> int:
        return word_bytes(n) + 4 * self.sides * self.blocks(n)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        words, highs, lows = self._split(payload, out.size)
        decode(out, words, highs, NONE if lows is None else lows, self.block, add)

    def decoder(self, n: int) -> KernelCall:
        return KernelCall(decode_at, (self.block, self.sides), grain=self.block)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from ..kernels.cuda import signs as cuda_signs

        context.cut = cuda_signs.encode(x, residual, *self._split(payload, x.size), self.block)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from ..kernels.cuda import signs as cuda_signs

        cuda_signs.decode(*self._split(payload, out.size), out, self.block, add, context.divisor)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any, Any]:
        """The payload's parts as (uint64 sign words, float32 magnitudes, those of negative elements or None) views."""
        head, blocks = word_bytes(n), self.blocks(n)
        found = payload[head:].view(np.float32)
        return payload[:head].view(np.uint64), found[:blocks], found[blocks:] if self.sides == 2 else None


def finalize(out: Any) -> None:
    """Turn the mean of the ranks' signs into its sign, the vote of the majority; a draw counts as positive."""
    if device.device_of(out) == "cpu":
        vote(out)
    else:
        from ..kernels.cuda import signs as cuda_signs

        cuda_signs.vote(out)
