"""What ``fp16`` and ``bf16`` share: their class."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from ..base import Compressor
from ..by_address import KernelCall
from ..context import Context
from ..kernels.cpu import host
from ..kernels.cpu.casts import HALF, LARGEST, STOCHASTIC, decode, decode_at, encode, encode_at


class Cast(Compressor):
    """What the casts have in common."""

    to: ClassVar[str]
    divides = True

    def nbytes(self, n: int) -> int:
        return 2 * n

    @property
    def element(self) -> str:
        return self.to

    @property
    @abstractmethod
    def rule(self) -> int:
        """HALF, BRAIN or STOCHASTIC."""

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        kept = host.EMPTY if residual is None else residual
        context.cut = int(encode(x, kept, payload.view(np.uint16), self.rule, *host.key_words(context.key)))

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        decode(out, payload.view(np.uint16), self.rule == HALF, np.float32(LARGEST[self.to]), add)

    def encoder(self, n: int) -> KernelCall:
        return KernelCall(encode_at, (self.rule,), draws=self.rule == STOCHASTIC, grain=1, leading=16)

    def decoder(self, n: int) -> KernelCall:
        return KernelCall(decode_at, (self.rule == HALF, float(np.float32(LARGEST[self.to]))), grain=1)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from ..kernels.cuda import casts as cuda_casts

        context.cut = cuda_casts.encode(x, residual, payload, self.rule, *host.key_words(context.key))

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from ..kernels.cuda import casts as cuda_casts

        cuda_casts.decode(payload, out, self.rule == HALF, add, context.divisor)
