"""Arrays of other frameworks, each skipped where the framework is not installed."""

from __future__ import annotations

import numpy as np
import pytest

from espresso_mpi.errors import GradientError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


@pytest.mark.parametrize("compressor", ["none", "onebit", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_torch_tensors_in_place(world, open_session, dtype, compressor):
    torch = pytest.importorskip("torch")
    tensor = torch.full((40, 50), float(world.rank), dtype=getattr(torch, dtype))
    pointer = tensor.data_ptr()
    grads = {"w": tensor}
    assert open_session(compressor=compressor).sync(grads)["w"] is tensor
    assert tensor.data_ptr() == pointer
    assert torch.allclose(tensor.float(), torch.full((40, 50), (world.size - 1) / 2), atol=1e-2)


def test_torch_gradients_of_a_model(world, open_session):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    model(torch.full((5, 20), float(world.rank + 1))).sum().backward()
    expected = [torch.from_numpy(np.mean(world.allgather(p.grad.numpy().copy()), axis=0)) for p in model.parameters()]
    open_session().sync([p.grad for p in model.parameters()])
    assert all(torch.allclose(p.grad, e, rtol=1e-5) for p, e in zip(model.parameters(), expected))


@pytest.mark.parametrize(
    "make", ["ones(5).expand(4, 5)", "ones(8).to_sparse()", "ones(4, dtype=torch.int32)", "ones(4, device='meta')"]
)
def test_torch_tensors_that_cannot_be_synchronised(world, open_session, make):
    torch = pytest.importorskip("torch")
    with pytest.raises(GradientError, match="expected"):
        open_session().sync(eval(f"torch.{make}", {"torch": torch}))


@pytest.mark.parametrize("compressor", ["none", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_come_back_new(world, open_session, dtype, compressor):
    jax = pytest.importorskip("jax")
    array = jax.numpy.full((3, 100), float(world.rank), dtype=dtype)
    mutable = np.full(7, float(world.rank), np.float32)
    result = open_session(compressor=compressor).sync({"w": array, "rest": (mutable, None)})
    assert isinstance(result["w"], jax.Array) and result["w"].dtype == array.dtype and result["w"].shape == array.shape
    assert np.allclose(np.asarray(result["w"], np.float32), (world.size - 1) / 2, atol=1e-2)
    assert np.all(np.asarray(array, np.float32) == world.rank), "the immutable input was written to"
    assert result["rest"][0] is mutable and result["rest"][1] is None


def test_ml_dtypes_bfloat16(world, open_session):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    grad = np.full(100, world.rank, ml_dtypes.bfloat16)
    open_session().sync(grad)
    assert np.allclose(grad.astype(np.float32), (world.size - 1) / 2, atol=1e-2)


class Foreign:
    """An array that offers nothing but DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_dlpack_in_place(world, open_session):
    memory = np.full(33, world.rank, np.float32)
    open_session().sync([Foreign(memory)])
    assert np.allclose(memory, (world.size - 1) / 2)


def test_bfloat16_rounds_to_nearest_even(world, open_session):
    """Against numpy in float64: the mean of bfloat16 values, rounded once."""
    bits = np.random.default_rng(world.rank).integers(0x3F00, 0x4100, 500).astype(np.uint16)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    grad = bits.view(ml_dtypes.bfloat16).copy()
    exact = np.mean([g.astype(np.float64) for g in world.allgather(grad.copy())], axis=0)
    open_session(route="flat").sync(grad)
    nearest = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert np.count_nonzero(grad != nearest) <= 1, "only a float32 rounding that crosses a tie may differ"
