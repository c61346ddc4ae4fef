"""Arrays of GPU memory, as far as sessions can tell."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray


class GpuArray:
    """Host memory behind the CUDA array interface, and nothing else that numpy would recognise."""

    def __init__(self, array, strides=None, readonly=False):
        self.host, self.shape, self.dtype = array, array.shape, array.dtype
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, readonly),
            "strides": strides,
            "version": 3,
        }


@pytest.fixture(autouse=True)
def foreign_memory(monkeypatch):
    """What the simulator lacks: views of foreign memory, and the interface on its own arrays."""

    def as_cuda_array(foreign):
        interface = foreign.__cuda_array_interface__
        flat = np.dtype(interface["typestr"])
        size = int(np.prod(interface["shape"])) * flat.itemsize
        memory = (np.ctypeslib.ctypes.c_uint8 * size).from_address(interface["data"][0])
        return FakeCUDAArray(np.frombuffer(memory, flat))

    monkeypatch.setattr(cuda, "as_cuda_array", as_cuda_array, raising=False)
    monkeypatch.setattr(
        FakeCUDAArray,
        "__cuda_array_interface__",
        property(lambda a: GpuArray(a._ary).__cuda_array_interface__),
        raising=False,
    )


def values(rank, step, n, dtype):
    return np.random.default_rng([rank, step]).standard_normal(n).astype(dtype)
