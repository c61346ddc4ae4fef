"""What ``int8``, ``int4``, ``int2`` and the two ``fp8`` methods share: their classes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from espresso_mpi.errors import ConfigError

from ..base import Compressor
from ..by_address import KernelCall
from ..checks import check_choice, check_positive_int
from ..context import Context
from ..kernels.cpu import host
from ..kernels.cpu.block_errors import float8_error, integer_error, nearest_loss, stochastic_variance
from ..kernels.cpu.blocks import (
    FLOAT8,
    NEAREST,
    STOCHASTIC,
    decode,
    decode_at,
    decode_packed,
    encode,
    encode_at,
    encode_packed,
    uint32,
)
from ..limit import LIMIT


@dataclass(frozen=True)
class BlockQuantiser(Compressor):
    """What the methods of the family have in common."""

    divides = True
    block: int = 256
    top: ClassVar[float]
    """The largest code."""
    per: ClassVar[int] = 1
    """Codes in a byte."""
    form: ClassVar[tuple[int, int]] = (0, 0)
    """Of 8-bit floats: bits that float32's mantissa has more, and the bits of the smallest normal value as float32."""

    def __post_init__(self) -> None:
        check_positive_int(self.name, "block", self.block)

    def nbytes(self, n: int) -> int:
        whole, rest = divmod(n, self.block)
        return 4 * -(-n // self.block) + whole * -(-self.block // self.per) + -(-rest // self.per)

    @property
    @abstractmethod
    def rule(self) -> int:
        """NEAREST, STOCHASTIC or FLOAT8."""

    def shrink(self, n: int) -> float:
        """What the decoded values are multiplied by."""
        return 1.0

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        scales, codes = self._split(payload, x.size)
        how, key = self._encoding(x.size), host.key_words(context.key)
        args = (x, host.EMPTY if residual is None else residual, scales, codes, self.block, how, *key)
        encode(*args) if self.per == 1 else encode_packed(*args, self.per)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        scales, codes = self._split(payload, out.size)
        args = (out, scales, codes, self.block, self._decoding(), add)
        decode(*args) if self.per == 1 else decode_packed(*args, self.per)

    def encoder(self, n: int) -> KernelCall:
        parameters = (self.block, self.per, *map(float, self._encoding(n)))
        return KernelCall(encode_at, parameters, self.rule == STOCHASTIC, self.block)

    def decoder(self, n: int) -> KernelCall:
        return KernelCall(decode_at, (self.block, self.per, *map(float, self._decoding())), grain=self.block)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from ..kernels.cuda import blocks as cuda_blocks

        how, key = self._encoding(x.size), host.key_words(context.key)
        cuda_blocks.encode(x, residual, *self._split(payload, x.size), self.block, self.per, how, *key)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from ..kernels.cuda import blocks as cuda_blocks

        parts, how = self._split(payload, out.size), self._decoding()
        cuda_blocks.decode(out, *parts, self.block, self.per, how, add, context.divisor)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as (float32 scales, int8 codes) views."""
        head = 4 * -(-n // self.block)
        return payload[:head].view(np.float32), payload[head:].view(np.int8)

    def _encoding(self, n: int) -> tuple[Any, ...]:
        """How kernels round: rule, largest code, what scales are multiplied by, form of 8-bit floats."""
        return self.rule, np.float32(self.top), np.float32(self.shrink(n)), *uint32(self.form)

    def _decoding(self) -> tuple[Any, ...]:
        """How kernels read codes: whether they are 8-bit floats, the largest scale, form of 8-bit floats."""
        return self.rule == FLOAT8, np.float32(LIMIT) / np.float32(self.top), *uint32(self.form)


@dataclass(frozen=True)
class IntegerQuantiser(BlockQuantiser):
    """Symmetric integers from -top to top."""

    rounding: str = "nearest"
    scaled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "rounding", self.rounding, ("nearest", "stochastic"))
        if self.scaled and self.rounding != "stochastic":
            raise ConfigError(f"{self.name}: scaled=True; expected rounding=stochastic with it, whose error it damps")

    @property
    def rule(self) -> int:
        return STOCHASTIC if self.rounding == "stochastic" else NEAREST

    def shrink(self, n: int) -> float:
        return 1 / (1 + self._omega(n)) if self.scaled else 1.0

    def contraction(self, n: int) -> float:
        if self.rounding == "nearest":
            return 1 - nearest_loss(min(n, self.block), 1 / self.top)
        return self.shrink(n) if self.scaled else max(0.0, 1 - self._omega(n))

    def variance(self, n: int) -> float | None:
        return None if self.rounding == "nearest" or self.scaled else self._omega(n)

    def gaussian_error(self, n: int) -> float:
        error, a = integer_error(min(n, self.block), self.top, self.rounding), self.shrink(n)
        return (1 - a) ** 2 + a**2 * error

    def _omega(self, n: int) -> float:
        return stochastic_variance(min(n, self.block), self.top)


@dataclass(frozen=True)
class Float8Quantiser(BlockQuantiser):
    """8-bit floats of the Open Compute Project: sign, exponent, ``mantissa`` bits."""

    mantissa: ClassVar[int]
    lowest: ClassVar[int]
    """Exponent of the smallest normal value."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.form = (23 - cls.mantissa, (127 + cls.lowest) << 23)

    @property
    def rule(self) -> int:
        return FLOAT8

    def contraction(self, n: int) -> float:
        # Half a unit in the last place, relative to the value half a unit above a power of two.
        relative = 1 / (2.0 ** (self.mantissa + 1) + 1)
        return 1 - nearest_loss(min(n, self.block), 2.0 ** (self.lowest - self.mantissa) / self.top, relative**2)

    def gaussian_error(self, n: int) -> float:
        return float8_error(min(n, self.block), self.top, self.mantissa, self.lowest)
