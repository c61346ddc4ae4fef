"""Tensors of torch that come again: what is read is always the tensor that is passed, whatever was at its place."""

import itertools

import numpy as np
import pytest

from espresso_mpi.arrays.buffers import adopt
from espresso_mpi.arrays.same_memory import of_any
from espresso_mpi.engine import guard
from espresso_mpi.errors import GradientError

torch = pytest.importorskip("torch")


def is_it(tensor):
    """Whether an adopted tensor is this one: its memory, shape, type and values in C order."""
    gradient, bits = adopt("x", tensor), tensor.element_size()
    values = tensor.detach().contiguous().view(torch.uint8).numpy()
    assert gradient.spec.shape == tuple(tensor.shape)
    assert gradient.spec.dtype == str(tensor.dtype).removeprefix("torch.")
    assert gradient.array.itemsize == bits and gradient.array.tobytes() == values.tobytes()
    assert gradient.start in (0, tensor.data_ptr()) and gradient.steady == (gradient.start > 0)
    return gradient.steady


def test_what_is_at_the_same_address_is_read_anew():
    tensor = torch.arange(24.0)
    first = tensor.data_ptr()
    assert is_it(tensor)
    for other in (tensor.view(4, 6), tensor.view(torch.int32).view(torch.float32), tensor[:7], tensor.detach()):
        assert other.data_ptr() == first and is_it(other)
    for odd in (tensor[::2], tensor.view(4, 6).t(), tensor.view(4, 6)[:, :3]):
        assert not is_it(odd)
    tensor.set_(torch.arange(5.0))  # the same object with other memory
    assert is_it(tensor)
    place = np.zeros(40, np.float32)
    for n in (40, 10, 40, 7, 3):  # one after another at the same place, as where memory is freed and given to another
        place[:n] = n
        fresh = torch.from_numpy(place[:n])
        assert fresh.data_ptr() == place.ctypes.data and is_it(fresh)
        assert is_it(fresh.view(torch.bfloat16)) and is_it(fresh.view(torch.half))
        del fresh


def test_memory_does_not_change_its_place_while_it_is_in_flight():
    tensor = torch.ones(8)
    gradient = adopt("x", tensor)
    with pytest.raises(RuntimeError, match="resiz"):
        tensor.resize_(1 << 20)
    assert gradient.array.sum() == 8


def test_what_is_no_plain_memory_takes_the_ordinary_way():
    weights = torch.ones(3, requires_grad=True)
    odd = [weights, torch.ones(3, 2).t()[:2], torch.ones(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(),
           torch.ones(2, device="meta"), torch.nn.Parameter(torch.ones(2))]  # fmt: skip
    assert [of_any(tensor) for tensor in odd] == [None] * len(odd)
    assert adopt("x", weights).array.tolist() == [1, 1, 1]
    part = np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float32)
    assert not part.flags.aligned and not adopt("x", torch.from_numpy(part)).steady


def test_tensors_that_share_memory_are_found():
    whole = torch.zeros(2000)
    parts = list(whole.split(100))
    gradients = [adopt(str(n), part) for n, part in enumerate(parts)]
    spans = guard.spans(gradients, "sync")
    assert isinstance(spans, guard.Owned)
    assert all(one.stop == following.start for one, following in itertools.pairwise(spans.spans()))
    for more in (whole[150:160], whole.detach()):
        with pytest.raises(GradientError, match="share memory"):
            guard.spans([*gradients, adopt("more", more)], "sync")
    mixed = [*gradients[1:], adopt("numpy", whole.numpy()[:100]), adopt("nothing", None)]
    assert isinstance(guard.spans(mixed, "sync"), guard.Owned)
