"""What the sign methods share: their class, and the end of a vote."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from espresso_mpi.arrays import device
from espresso_mpi.errors import ConfigError

from ..base import Compressor
from ..checks import check_positive_int
from ..kernels.cpu.signs import ends, vote
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


def finalize(out: Any) -> None:
    """Turn the mean of the ranks' signs into its sign, the vote of the majority; a draw counts as positive."""
    if device.device_of(out) == "cpu":
        vote(out)
    else:
        from ..kernels.cuda import signs as cuda_signs

        cuda_signs.vote(out)
