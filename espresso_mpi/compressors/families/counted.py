"""What the methods share that send a counted number of elements: their class."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base import Compressor
from ..context import Context
from ..kernels.cpu.sparse import count, decode_counted, scattered_traffic


class Counted(Compressor):
    """What methods share whose payload says how many elements it holds.

    Payload: 8 + 8·k bytes: a uint64 m, k uint32 indices in rising order, k float32 values. Slots beyond m are zero.
    """

    ratio: float
    sparse = True

    def count(self, n: int) -> int:
        """How many of n elements are sent at most."""
        return count(n, self.ratio)

    def nbytes(self, n: int) -> int:
        return 8 + 8 * self.count(n) if n else 0

    def decode_traffic(self, n: int) -> int:
        return scattered_traffic(n, self.count(n)) + self.nbytes(n)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        decode_counted(payload, out, add)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from ..kernels.cuda import sparse as cuda_sparse

        cuda_sparse.decode(payload, out, add)
