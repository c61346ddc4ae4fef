"""Adopting arrays and rebuilding containers, without MPI."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest

from espresso_mpi.arrays.buffers import _Flat, _gpu_of, adopt, flatten, rebuild
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
    with pytest.raises(GradientError, match=r"w: got elements of type int64.*use that x, which gets the mean"):
        adopt("w", np.ones(3, np.int64))
    with pytest.raises(GradientError, match=r"w: got a read-only array.*use that x, which gets the mean"):
        adopt("w", np.broadcast_to(np.float32(1), 3))


# --- strided memory ---------------------------------------------------------------------------------------------------

STRIDED = {
    "transposed": lambda x: x.T,
    "fortran": lambda x: np.asfortranarray(x),
    "every other column": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1],
    "corner": lambda x: x[2:, 3:],
    "one row is no stride": lambda x: x[:1, ::3],
    "swapped": lambda x: x.reshape(2, 3, 8).transpose(0, 2, 1),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("how", STRIDED)
def test_strided_memory_gets_the_result(how, dtype):
    whole = np.arange(48, dtype=dtype).reshape(6, 8)
    view = STRIDED[how](whole)
    before, rest = view.copy(), whole.copy()
    gradient = adopt("x", view)
    assert gradient.spec.shape == view.shape
    assert np.array_equal(gradient.array.view(dtype), before.ravel()), (
        "in C order of the elements, whatever the strides"
    )
    gradient.array[...] = (before.ravel() * 2).view(gradient.array.dtype)
    assert np.array_equal(whole, rest), "not before the call has ended"
    assert rebuild(view, [gradient]) is view
    assert np.array_equal(view, before * 2)
    view[...] = before
    assert np.array_equal(whole, rest), "what is between the elements is somebody else's"


@pytest.mark.parametrize("strides", [(0, 4), (4, 4), (4, 8), (8, 8)])
def test_elements_that_share_a_place_are_refused(strides):
    with pytest.raises(GradientError, match=r"w: got an expanded or overlapping array.*use that y"):
        adopt("w", np.lib.stride_tricks.as_strided(np.ones(64, np.float32), (3, 2), strides))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_layouts(dtype):
    torch = pytest.importorskip("torch")
    image = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(getattr(torch, dtype))
    tensor = image.clone(memory_format=torch.channels_last)
    gradient = adopt("x", tensor)
    assert np.array_equal(gradient.array, adopt("x", image).array)
    gradient.array[...] = 0
    assert rebuild(tensor, [gradient]) is tensor and not tensor.any() and not tensor.is_contiguous()
    for wrong, words in [
        (torch.ones(3).expand(4, 3), "expanded.*x.clone.*use that y"),
        (torch.ones(3).to_sparse(), r"sparse_coo.*sparse=False.*p.grad = p.grad.to_dense"),
        (torch.ones(3, device="meta"), r"meta.*x.copy_\(y\)"),
        (torch.ones(3, dtype=torch.int64), r"int64.*use that y, which gets the mean"),
    ]:
        with pytest.raises(GradientError, match=words):
            adopt("w", wrong)


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
