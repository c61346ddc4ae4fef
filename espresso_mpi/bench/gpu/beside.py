"""Encodes beside matrix products on another stream: how much each delays the other."""

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
    """Seconds of a method's encodes and of matrix products: each alone, and until each has ended beside the other."""

    method: str
    encode_s: float
    product_s: float
    encode_beside_s: float
    product_beside_s: float

    @property
    def both_s(self) -> float:
        """Until both have ended."""
        return max(self.encode_beside_s, self.product_beside_s)

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
        alone = _seconds(cupy, [encode] * counts[0]), _seconds(cupy, [multiply] * counts[1])
        together = [_together(cupy, [multiply] * counts[1], [encode] * counts[0], products.ptr) for _ in range(_ROUNDS)]
        return Beside(method, *alone, *min(together, key=max))


def _together(
    cupy: Any, products: list[Callable[[], None]], encodes: list[Callable[[], None]], stream: int
) -> tuple[float, float]:
    """Seconds until the encodes have ended, and until the products have, which are queued first, on ``stream``."""
    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    for work in (*products, *encodes):
        work()
    ends, encoded, multiplied = dict[str, float](), device.Mark(), device.Arrival([stream])
    encoded.set()
    passed = {"encodes": encoded.passed, "products": multiplied.passed}
    while len(ends) < len(passed):
        for name in passed.keys() - ends.keys():
            if passed[name]():
                ends[name] = time.perf_counter() - start
    return ends["encodes"], ends["products"]


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
