"""Kernels that compiled code calls by address: part by part they write what the method writes at once."""

import ctypes
from itertools import pairwise

import numpy as np
import pytest

from espresso_mpi.compressors import Context, get, names
from espresso_mpi.compressors.by_address import KernelCall
from espresso_mpi.compressors.dgc import Dgc
from espresso_mpi.compressors.kernels.cpu import kept_entries, samples
from espresso_mpi.compressors.powersgd import PowerSGD
from espresso_mpi.compressors.qsgd import QSGD
from espresso_mpi.compressors.signsgd import SignSGD
from espresso_mpi.compressors.topk import TopK
from espresso_mpi.compressors.topk_sampled import TopKSampled

N, KEY, SHARED = 5003, 0x0123456789ABCDEF, 0x7EDCBA9876543210
SPARSE = ("topk", "topk_sampled", "topk_in_chunks", "threshold", "dgc", "dct_topk")
SUMMED = ("powersgd", "powersgd:rank=6,cols=50", "acpsgd", "acpsgd:rank=6,cols=50", "randomk", "randomk:scaled=true",
          "thc", "thc:element=int16,levels=100,block=64", "topk_chunked",
          "topk_chunked:ratio=0.1,chunk=48,values=float16", "count_sketch",
          "count_sketch:ratio=0.2,rows=3,columns=0.1")  # fmt: skip
"""Methods whose payloads are summed, with or without a summary that the ranks agree on."""
AT_ONCE = (*SPARSE, "bound", *{spec.partition(":")[0] for spec in SUMMED})
"""Methods whose payload is made at once."""
METHODS = (
    *(name for name in names() if get(name).encoder(N) is not None and name not in SUMMED),
    "onebit:block=192", "int8:block=100,rounding=stochastic", "int2:block=65", "bf16:rounding=stochastic",
    "qsgd:levels=200,block=100", "natural:block=100", "onebit_sgd:block=192", "topk:values=int4",
    "dgc:ratio=0.1,values=int8", "threshold:value=1.5,values=fp16", "topk_in_chunks:chunk=100,k=7,values=onebit",
    "drive:block=64,scale=unbiased", "eden:bits=4,block=128", "dct_topk:chunk=32,k=3,values=int4", "bound:bits=4",
    "dgc:clip=3.0", "dgc:ratio=0.1,values=int4,clip=200.0",
)  # fmt: skip
DECODED = tuple(method for method in (*METHODS, *SUMMED) if get(method).decoder(N) is not None)
SCALES = {"fp16": 60000, "threshold:value=1.5,values=fp16": 60000, "onebit_sgd": 1e37}
"""By which normal values are multiplied, so that some are cut."""
SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 11)
RANKS, SHARE = 3, 0.5
"""What kernels get that need the context."""
GUARD = 64
"""Bytes behind memory that a kernel gets, which it must leave alone."""


def guarded(nbytes):
    """Memory with a guard behind it, and the guard."""
    memory = np.full(nbytes + GUARD, 0xA5, np.uint8)
    return memory[:nbytes], memory[nbytes:]


def call(kernel, x, payload, residual, adding, first, last, state=None, listed=(), memory=None):
    """One part.

    Args:
        listed: the arrays of which the kernel gets the addresses.
        memory: scratch memory and its guard, of parts that follow each other.
    """
    passed = [RANKS, SHARE, *kernel.passed] if kernel.needs_context else kernel.passed
    parameters = np.array([one if isinstance(one, int | float) else one.address for one in passed], np.float64)
    kept, held = (0 if array is None else array[first:].ctypes.data for array in (residual, state))
    addresses = np.array([array.ctypes.data for array in listed], np.int64)
    assert kernel.listed == bool(listed)
    held = addresses.ctypes.data if listed else held
    work, guard = memory or guarded(kernel.scratch)
    run, place, numbers = SIGNATURE(kernel.entry.address), x[first:].ctypes.data, parameters.ctypes.data
    scratch, size, key = work.ctypes.data, last - first, SHARED if kernel.shares else KEY
    cut = run(place, size, payload.ctypes.data, kept, held, scratch, key, adding, numbers, first, x.size)
    assert (guard == 0xA5).all()
    return cut


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
    x = rng.standard_normal(N, dtype=np.float32) * np.float32(SCALES.get(method, 1))
    residuals = [rng.standard_normal(N).astype(np.float32)] * 2 if feedback else [None, None]
    expected, found = (np.zeros(compressor.nbytes(N), np.uint8) for _ in range(2))
    residuals = [kept if kept is None else kept.copy() for kept in residuals]
    context, kernel = Context(key=KEY, ranks=RANKS, share=SHARE), compressor.encoder(N)
    state = rng.standard_normal(N).astype(np.float32) if kernel.state else None
    context.state = {kernel.state: state.copy()} if kernel.state else {}
    compressor.encode(x, expected, residuals[0], context)
    cut = sum(call(kernel, x, found, residuals[1], 0, a, b, state) for a, b in parts(kernel.grain))
    if kernel.state:
        np.testing.assert_array_equal(state, context.state[kernel.state])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(residuals[1], residuals[0])
    assert cut == context.cut and (cut > 0) == (method in SCALES)
    assert (kernel.grain == 0) == (compressor.name in AT_ONCE)


def listed_of(kernel, state, summary):
    """The arrays that a kernel gets, in order."""
    for name, size in kernel.states:
        state.setdefault(name, np.zeros(size, np.float32))
        assert state[name].size == size
    assert kernel.summary in (0, summary.size)
    return [*([summary] if kernel.summary else []), *(state[name] for name, _ in kernel.states)]


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("method", SUMMED)
def test_payloads_that_are_summed(method, feedback):
    """Three steps: a summary, an encode and an update. What is summed is twice what this rank has."""
    compressor, rng = get(method), np.random.default_rng(5)
    agreed, summary = compressor.summary(N), np.empty(0, np.float32)
    residuals = np.zeros((2, N), np.float32) if feedback else [None, None]
    states, kernel = [{}, {}], compressor.encoder(N)
    assert kernel.grain == 0
    for _ in range(3):
        x = rng.standard_normal(N, dtype=np.float32)
        x[:2] = 1e38, np.float32(1e-40)
        context = Context(key=KEY, shared=SHARED, state=states[0], ranks=RANKS, share=SHARE)
        expected, (found, guard) = np.zeros(compressor.nbytes(N), np.uint8), guarded(compressor.nbytes(N))
        if agreed is not None:
            summaries = np.empty((2, agreed.size), np.float32)
            compressor.summarise(x, summaries[0], residuals[0], context)
            makes = compressor.summariser(N)
            listed, memory = listed_of(makes, states[1], summaries[1]), guarded(makes.scratch)
            for a, b in parts(makes.grain):
                call(makes, x, found, residuals[1], 0, a, b, listed=listed, memory=memory)
            np.testing.assert_array_equal(summaries[1], summaries[0])
            context.summary = summary = summaries[0] * np.float32(2)
        compressor.encode(x, expected, residuals[0], context)
        call(kernel, x, found, residuals[1], 0, 0, N, listed=listed_of(kernel, states[1], summary))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(residuals[1], residuals[0])
        assert (guard == 0xA5).all()
        assert (compressor.updater(N) is not None) == compressor.updates
        if compressor.updates:
            compressor.update_from_aggregate(expected, N, context)
            listed = listed_of(compressor.updater(N), states[1], summary)
            call(compressor.updater(N), x, found, None, 0, 0, N, listed=listed)
        for name, kept in states[0].items():
            np.testing.assert_array_equal(states[1][name], kept)


@pytest.mark.parametrize("method", DECODED)
def test_parts_are_decoded_to_the_whole(method):
    compressor, kernel = get(method), get(method).decoder(N)
    x, payload = np.random.default_rng(5).standard_normal(N, dtype=np.float32), np.zeros(compressor.nbytes(N), np.uint8)
    compressor.encode(x, payload, None, Context(key=KEY, shared=SHARED))
    decoded, by_parts = np.empty(N, np.float32), np.empty(N, np.float32)
    for decode, adding in ((compressor.decode, 0), (compressor.decode_add, 1)):
        decode(payload, decoded)
        for a, b in parts(kernel.grain):
            call(kernel, by_parts, payload, None, adding, a, b)
        np.testing.assert_array_equal(by_parts, decoded)


@pytest.mark.parametrize("method", ["signsgd", "signum"])
def test_a_vote_is_finalized(method):
    x = np.random.default_rng(5).standard_normal(N, dtype=np.float32)
    x[:3] = 0, -0.0, np.nan
    voted, kernel = x.copy(), get(method).finalizer(N)
    get(method).finalize(x)
    for a, b in parts(kernel.grain):
        call(kernel, voted, np.empty(0, np.uint8), None, 0, a, b)
    np.testing.assert_array_equal(voted, x)
    assert set(x) == {-1, 1}


@pytest.mark.parametrize("method", [method for method in METHODS if get(method).encoder(N).leading])
def test_leading_bytes_are_final_as_soon_as_their_elements_are_encoded(method):
    kernel = get(method).encoder(N)
    x, whole, part = np.random.default_rng(6).standard_normal(N, dtype=np.float32), *np.zeros((2, 4 * N), np.uint8)
    states = np.zeros((2, N), np.float32)
    call(kernel, x, whole, None, 0, 0, N, states[0])
    for a, b in parts(kernel.grain):
        call(kernel, x, part, None, 0, a, b, states[1])
        final = b * kernel.leading // 8
        np.testing.assert_array_equal(part[:final], whole[:final])


@pytest.mark.parametrize("ties", [False, True], ids=["different", "many equal"])
@pytest.mark.parametrize("method", ["topk", "threshold:value=2.0,values=int4", "dgc:mu=0.5"])
def test_a_choice_by_a_sample(method, ties):
    """More elements than a sample has; with many equal ones it misleads."""
    n, compressor = 3 * 65536 + 1003, get(method)
    x = np.random.default_rng(7).standard_normal(n, dtype=np.float32)
    x = np.rint(x) if ties else x
    residuals, states = np.zeros((2, n), np.float32), np.zeros((2, n), np.float32)
    expected, (found, guard) = np.zeros(compressor.nbytes(n), np.uint8), guarded(compressor.nbytes(n))
    kernel, context = compressor.encoder(n), Context()
    context.state = {"momentum": states[0]} if kernel.state else {}
    for _ in range(2):
        compressor.encode(x, expected, residuals[0], context)
        call(kernel, x, found, residuals[1], 0, 0, n, states[1] if kernel.state else None)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(residuals[1], residuals[0])
        np.testing.assert_array_equal(states[1], states[0])
    assert (guard == 0xA5).all()


@pytest.mark.parametrize("method", [m for m in DECODED if m.partition(":")[0] in AT_ONCE])
def test_damaged_payloads_write_to_nothing_else(method):
    compressor, rng = get(method), np.random.default_rng(8)
    kernel, memory, expected = compressor.decoder(N), np.empty(N + GUARD, np.float32), np.zeros(N, np.float32)
    for fill in (*range(4), 255):
        payload = rng.integers(0, 256, compressor.nbytes(N)).astype(np.uint8)
        payload = np.full_like(payload, 255) if fill == 255 else payload
        memory[:] = 7
        compressor.decode(payload, expected)
        call(kernel, memory[:N], payload, None, 0, 0, N)
        np.testing.assert_array_equal(memory[:N], expected)
        assert np.isfinite(expected).all() and (memory[N:] == 7).all()


def test_numbers_of_a_choice_have_places():
    assert len(kept_entries.choice_of(100, get("dgc")._quota(100), 0, samples.deciding(100, 3))) == kept_entries.CHOICE


def test_what_a_kernel_calls_needs_nothing_but_parameters():
    with pytest.raises(ValueError, match="expected a kernel that needs nothing but parameters"):
        KernelCall(kept_entries.decode_at, calls=(get("int8:rounding=stochastic").encoder(N),))
    for needs in ({"state": "a", "states": (("b", 1),)}, {"draws": True, "shares": True}):
        with pytest.raises(ValueError, match="expected one state or a list of addresses, and one key"):
            KernelCall(kept_entries.decode_at, **needs)


@pytest.mark.parametrize(
    ("base", "hook", "kernel"),
    [
        (TopK, "_encode_cpu", "encoder"), (TopK, "_choose_cpu", "encoder"), (TopK, "_decode_cpu", "decoder"),
        (TopKSampled, "_momentum_cpu", "encoder"), (Dgc, "_momentum_cpu", "encoder"),
        (SignSGD, "_encode_cpu", "encoder"), (SignSGD, "finalize", "finalizer"), (QSGD, "_decode_cpu", "decoder"),
        (PowerSGD, "_summarise_cpu", "summariser"), (PowerSGD, "update_from_aggregate", "updater"),
    ],
)  # fmt: skip
def test_a_subclass_that_works_in_another_way_has_no_kernel_for_it(base, hook, kernel):
    changed = type("Changed", (base,), {hook: lambda self, *given: None})
    mixed = type("Mixed", (changed, base), {})
    assert getattr(changed(), kernel)(N) is None and getattr(mixed(), kernel)(N) is None
    assert getattr(type("Same", (base,), {})(), kernel)(N) is not None
