"""Kernels on a stream of the caller's, beside those of the framework that its arrays belong to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from . import device


class Flat(NamedTuple):
    """A flat array on the GPU, as a launch takes it: numba's own arrays take longer to make than to use once.

    Attributes:
        address: where it begins; its memory must outlive the launch on its stream.
        size: number of elements.
        itemsize: bytes of one.
    """

    address: int
    size: int
    itemsize: int


@lru_cache(64)
def _stream(number: int) -> device.OwnStream:
    """One stream for all, which the caller made and orders."""
    from numba import cuda

    stream = cuda.stream() if device.simulated() else cuda.external_stream(number)
    return device.OwnStream(device.Queue(stream, number))


@contextmanager
def on_stream(number: int) -> Iterator[None]:
    """Let launches of this thread go to a stream of the caller's, whose address ``device.stream_of`` returned."""
    with device.leaving_stream():
        device.enter_stream(_stream(number))
        yield
