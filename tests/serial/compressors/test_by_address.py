"""Kernels that compiled code calls by address: part by part they write what the method writes at once."""

import ctypes
from itertools import pairwise

import numpy as np
import pytest

from espresso_mpi.compressors import Context, get, names

N, KEY = 5003, 0x0123456789ABCDEF
METHODS = (
    *(name for name in names() if get(name).encoder(N) is not None),
    "onebit:block=192", "int8:block=100,rounding=stochastic", "int2:block=65", "bf16:rounding=stochastic",
    "qsgd:levels=200,block=100", "natural:block=100", "onebit_sgd:block=192", "topk:values=int4",
    "dgc:ratio=0.1,values=int8", "threshold:value=1.5,values=fp16", "topk_in_chunks:chunk=100,k=7,values=onebit",
)  # fmt: skip
SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 10)


def call(kernel, x, payload, residual, adding, first, last, state=None):
    """One part."""
    parameters = np.array(kernel.passed, np.float64)
    kept, held = (0 if array is None else array[first:].ctypes.data for array in (residual, state))
    run = SIGNATURE(kernel.entry.address)
    size, place = last - first, x[first:].ctypes.data
    return run(place, size, payload.ctypes.data, kept, held, KEY, adding, parameters.ctypes.data, first, x.size)


def parts(grain):
    """Parts of different lengths, as many grains as fit; the whole if it may not be cut."""
    if not grain:
        return [(0, N)]
    edges = [0, *(min(N, grain * count) for count in (1, 2, 4, 7, 12)), N]
    return [(a, b) for a, b in pairwise(edges) if a < b]


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_parts_make_the_whole(method, feedback):
    compressor, rng = get(method), np.random.default_rng(5)
    x = rng.standard_normal(N, dtype=np.float32) * np.float32(60000 if method == "fp16" else 1)
    residuals = [rng.standard_normal(N).astype(np.float32)] * 2 if feedback else [None, None]
    expected, found = (np.zeros(compressor.nbytes(N), np.uint8) for _ in range(2))
    residuals = [kept if kept is None else kept.copy() for kept in residuals]
    context, kernel = Context(key=KEY), compressor.encoder(N)
    state = rng.standard_normal(N).astype(np.float32) if kernel.keeps else None
    context.state = {kernel.keeps: state.copy()} if kernel.keeps else {}
    compressor.encode(x, expected, residuals[0], context)
    cut = sum(call(kernel, x, found, residuals[1], 0, a, b, state) for a, b in parts(kernel.grain))
    if kernel.keeps:
        np.testing.assert_array_equal(state, context.state[kernel.keeps])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(residuals[1], residuals[0])
    assert cut == context.cut

    decoded, by_parts, kernel = np.empty(N, np.float32), np.empty(N, np.float32), compressor.decoder(N)
    for decode, adding in ((compressor.decode, 0), (compressor.decode_add, 1)):
        decode(expected, decoded, context)
        for a, b in parts(kernel.grain):
            call(kernel, by_parts, expected, None, adding, a, b)
        np.testing.assert_array_equal(by_parts, decoded)


@pytest.mark.parametrize("method", METHODS)
def test_leading_bytes_are_final_as_soon_as_their_elements_are_encoded(method):
    kernel = get(method).encoder(N)
    x, whole, part = np.random.default_rng(6).standard_normal(N, dtype=np.float32), *np.zeros((2, 4 * N), np.uint8)
    states = np.zeros((2, N), np.float32)
    call(kernel, x, whole, None, 0, 0, N, states[0])
    for a, b in parts(kernel.grain):
        call(kernel, x, part, None, 0, a, b, states[1])
        final = b * kernel.leading // 8
        np.testing.assert_array_equal(part[:final], whole[:final])
