"""As much of CuPy as ``bench.gpu.ranks`` uses, on a simulated device: the host computes its products at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from async_gpu import AsyncGpu
from gpu_arrays import GpuArray


class Array(GpuArray):
    """An array of CuPy; what changes it is queued on the current stream."""

    def __init__(self, cupy: FakeCupy, values: np.ndarray) -> None:
        super().__init__(values)
        self._cupy = cupy
        self.__cuda_array_interface__["stream"] = cupy.current

    @property
    def T(self) -> Array:  # noqa: N802 - its name in CuPy
        return Array(self._cupy, self.host.T.copy())

    def __mul__(self, factor: float) -> Array:
        self._cupy.gpu.of_caller(self._cupy.current).run()
        return Array(self._cupy, self.host * factor)

    def __getitem__(self, place: int) -> Any:
        return self.host[place]

    def fill(self, value: float) -> None:
        self.__cuda_array_interface__["stream"] = self._cupy.current
        self._cupy.gpu.of_caller(self._cupy.current).add("caller", lambda: self.host.fill(value))


class FakeCupy:
    """The module."""

    float32 = np.float32

    def __init__(self, gpu: AsyncGpu) -> None:
        self.gpu, self.current, streams = gpu, 1, iter(range(7, 1000))
        outer = self

        class Stream:
            def __init__(self, non_blocking: bool = False) -> None:
                self.ptr = next(streams)

            def __enter__(self) -> None:
                self._before, outer.current = outer.current, self.ptr

            def __exit__(self, *error: object) -> None:
                outer.current = self._before

            def synchronize(self) -> None:
                gpu.of_caller(self.ptr).run()

        runtime = SimpleNamespace(deviceSynchronize=gpu.run, getDeviceCount=lambda: 1)
        chosen = SimpleNamespace(use=lambda: None)
        self.cuda = SimpleNamespace(Stream=Stream, runtime=runtime, Device=lambda number: chosen)
        self.random = SimpleNamespace(standard_normal=self._normal)

    def _normal(self, shape: Any, dtype: Any) -> Array:
        return Array(self, np.random.default_rng(0).standard_normal(shape).astype(dtype))

    def asarray(self, values: np.ndarray) -> Array:
        return Array(self, values.copy())

    def asnumpy(self, array: Array) -> np.ndarray:
        return array.host.copy()

    def zeros(self, n: int, dtype: Any) -> Array:
        return Array(self, np.zeros(n, dtype))

    def ones(self, n: int, dtype: Any) -> Array:
        return Array(self, np.ones(n, dtype))

    def empty_like(self, array: Array) -> Array:
        return Array(self, np.empty_like(array.host))

    def matmul(self, a: Array, b: Array, out: Array | None = None) -> Array:
        made = Array(self, a.host @ b.host) if out is None else out
        made.host[...] = a.host @ b.host
        return made
