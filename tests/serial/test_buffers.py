"""Adopting arrays and rebuilding containers, without MPI."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest

from espresso_mpi.buffers import _Flat, _gpu_of, adopt, flatten
from espresso_mpi.errors import GradientError


def test_names_are_the_keys_on_the_way():
    a = np.ones(1, np.float32)
    names = [name for name, _ in flatten({"fc": {"w": a, "b": a}, "rest": [a, (a, None)], 3: a})]
    assert names == ["fc.w", "fc.b", "rest.0", "rest.1.0", "rest.1.1", "3"]
    assert flatten(a)[0][0] == "grads"
    assert [name for name, _ in flatten(namedtuple("P", "x y")(a, a))] == ["0", "1"]


def test_names_that_clash_are_refused():
    a = np.ones(1, np.float32)
    with pytest.raises(GradientError, match=r"a\.b"):
        flatten({"a.b": a, "a": {"b": a}})


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 1, 3)])
def test_adoption_shares_memory(shape):
    x = np.zeros(shape, np.float64)
    gradient = adopt("x", x)
    assert gradient.spec.shape == shape and gradient.spec.dtype == "float64" and gradient.spec.device == "cpu"
    gradient.array[...] = 7
    assert np.all(x == 7)


def test_half_types_come_as_bits():
    x = np.ones(4, np.float16)
    gradient = adopt("x", x)
    assert gradient.array.dtype == np.uint16 and gradient.spec.dtype == "float16"


def test_the_message_says_what_to_do():
    with pytest.raises(GradientError, match=r"w: got a strided array.*ascontiguousarray"):
        adopt("w", np.ones((3, 3), np.float32)[:, 1])
    with pytest.raises(GradientError, match=r"w: got elements of type int64.*astype"):
        adopt("w", np.ones(3, np.int64))


class OnGpu:
    """What CuPy and torch tell of an array; ``device`` as DLPack has it: kind and number."""

    def __init__(self, *device):
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (4096, False),
            "strides": (12, 4),
            "version": 3,
            "stream": 7,
        }
        if device:
            self.__dlpack_device__ = lambda: device


def test_the_gpu_of_an_array():
    assert _gpu_of(OnGpu(2, 3)) == 3
    assert _gpu_of(OnGpu(13, 0)) is None  # managed memory
    assert _gpu_of(OnGpu()) is None
    context = SimpleNamespace(device=SimpleNamespace(id=5))
    assert _gpu_of(SimpleNamespace(gpu_data=SimpleNamespace(context=context))) == 5


def test_a_flat_view_names_no_stream_of_the_owner():
    interface = _Flat(OnGpu(2, 0), 6, "<f4").__cuda_array_interface__
    assert interface["shape"] == (6,)
    assert interface["strides"] is None
    assert interface["stream"] is None
    assert interface["data"] == (4096, False)
