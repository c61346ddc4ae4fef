"""On which stream of the caller's an array was last used."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from espresso_mpi.arrays import device


def tensor_class(module, base=object):
    return type("Tensor", (base,), {"__module__": module, "device": "cuda:1"})


@pytest.mark.parametrize("stream, expected", [(77, 77), (0, 1)])
def test_a_tensor_of_torch_is_on_its_current_stream(monkeypatch, stream, expected):
    """Also one of a subclass, from whatever module; 1 is the default stream."""
    current = lambda where: SimpleNamespace(cuda_stream={"cuda:1": stream}[where])  # noqa: E731
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(current_stream=current)))
    own = tensor_class("torch")
    assert device.stream_of(own()) == device.stream_of(tensor_class("users.tensors", own)()) == expected


@pytest.mark.parametrize("said, expected", [(None, 1), (2, 2), (1234, 1234)])
def test_other_arrays_name_their_stream(said, expected):
    array = tensor_class("cupy")()
    array.__cuda_array_interface__ = {"stream": said} if said else {}
    assert device.stream_of(array) == expected
