"""An encode beside a matrix product on another stream: how much each delays the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays import device
from ...compressors import Context, get

_ROUNDS = 5


@dataclass(frozen=True)
class Beside:
    """Seconds of a method's encodes and of matrix products, each alone, and of both together."""

    method: str
    encode_s: float
    product_s: float
    both_s: float

    @property
    def overlapped(self) -> float:
        """The share of the shorter one that the longer one hides; negative if they delay each other."""
        return (self.encode_s + self.product_s - self.both_s) / min(self.encode_s, self.product_s)


def measure(method: str, n: int, side: int) -> Beside:
    """Time encodes of ``n`` elements beside products of ``side`` × ``side`` float32 matrices by CuPy."""
    import cupy

    own, compressor = device.OwnStream(), get(method).at(None)
    a, b = (cupy.random.standard_normal((side, side), cupy.float32) for _ in range(2))
    out, products = cupy.empty_like(a), cupy.cuda.Stream(non_blocking=True)
    with device.leaving_stream():
        device.enter_stream(own)
        x = device.empty(n, np.float32, "gpu")
        device.copy(x, np.random.default_rng(0).standard_normal(n).astype(np.float32))
        residual, payload = device.zeros(n, np.float32, "gpu"), device.zeros(compressor.nbytes(n), np.uint8, "gpu")
        context = Context(key=1, shared=2)

        def encode() -> None:
            compressor.encode(x, payload, residual, context)

        def multiply() -> None:
            with products:
                cupy.matmul(a, b, out=out)

        encode()
        multiply()
        one, other = _seconds(cupy, [encode]), _seconds(cupy, [multiply])
        counts = max(1, round(other / one)), max(1, round(one / other))  # so that both last equally long
        works = [encode] * counts[0] + [multiply] * counts[1]
        alone = _seconds(cupy, [encode] * counts[0]), _seconds(cupy, [multiply] * counts[1])
        return Beside(method, *alone, _seconds(cupy, works[counts[0] :] + works[: counts[0]]))


def _seconds(cupy: Any, works: list[Callable[[], None]]) -> float:
    """The least time of several rounds, until the GPU has done everything."""
    times = []
    for _ in range(_ROUNDS):
        cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        for work in works:
            work()
        cupy.cuda.runtime.deviceSynchronize()
        times.append(time.perf_counter() - start)
    return min(times)
