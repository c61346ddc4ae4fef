"""Compares what CUDA kernels write with what the CPU kernels write, bit for bit; on a GPU or on the simulator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import cuda

from espresso_mpi.collectives import reduction
from espresso_mpi.compressors import get

KEY = 0x0123_4567_89AB_CDEF
SPECS = (
    "fp16",
    "int8",
    "int8:block=100",
    "int8:rounding=stochastic",
    "onebit:block=64",
    "onebit",
    "topk:ratio=0.05",
    "topk:ratio=1.0",
)


def inputs(n: int) -> Iterator[tuple[str, np.ndarray]]:
    """Named float32 arrays of n elements."""
    gaussian = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    one_hot = np.zeros(n, np.float32)
    one_hot[n // 2 : n // 2 + 1] = -3
    yield "gaussian", gaussian
    yield "constant", np.full(n, -1.5, np.float32)
    yield "zero", np.zeros(n, np.float32)
    yield "one-hot", one_hot
    yield "denormal", gaussian * np.float32(1e-40)
    yield "huge", np.tanh(gaussian) * np.float32(1e38)


def compressor_problems(spec: str, n: int) -> Iterator[str]:
    """What differs between the CPU and the GPU for one compressor at one size."""
    for name, x in inputs(n):
        yield from _encode_problems(f"{spec}, n = {n}, {name}", spec, x, x[::-1] * np.float32(0.3))
        if name in ("gaussian", "constant"):
            yield from _encode_problems(f"{spec}, n = {n}, {name}, no residual", spec, x, None)


def _encode_problems(what: str, spec: str, x: np.ndarray, residual: np.ndarray | None) -> Iterator[str]:
    compressor = get(spec)
    payload = np.full(compressor.nbytes(x.size), 0xA5, np.uint8)
    on_gpu = cuda.to_device(payload)
    residual_gpu = None if residual is None else cuda.to_device(residual)
    compressor.encode(x, payload, residual, KEY)
    compressor.encode(cuda.to_device(x), on_gpu, residual_gpu, KEY)
    yield from _problem(f"{what}: payload", payload, on_gpu)
    if residual is not None:
        yield from _problem(f"{what}: residual", residual, residual_gpu)
    for method in ("decode", "decode_add"):
        out = x.copy()
        out_gpu = cuda.to_device(x)
        getattr(compressor, method)(payload, out)
        getattr(compressor, method)(on_gpu, out_gpu)
        yield from _problem(f"{what}: {method}", out, out_gpu)


def collective_problems(n: int) -> Iterator[str]:
    """What differs between the CPU and the GPU in ``reduction`` at one size."""
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        rows = np.stack([_as_dtype(np.random.default_rng(r).standard_normal(n), dtype) for r in range(5)])
        for own, divisor in ((0, 4.0), (2, 5.0), (4, 3.0)):
            out, out_gpu = rows[own].copy(), cuda.to_device(rows[own])
            reduction.mean_rows(out, rows, own, divisor, dtype)
            reduction.mean_rows(out_gpu, cuda.to_device(rows), own, divisor, dtype)
            yield from _problem(f"mean_rows, {dtype}, n = {n}, own = {own}", out, out_gpu)
        yield from _convert_problems(rows[0], dtype)
        yield from _count_problems(rows[0], dtype)
    for divisor in (4.0, 3.0):
        x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        x_gpu = cuda.to_device(x)
        reduction.divide(x, divisor)
        reduction.divide(x_gpu, divisor)
        yield from _problem(f"divide by {divisor}, n = {n}", x, x_gpu)


def _convert_problems(x: np.ndarray, dtype: str) -> Iterator[str]:
    if dtype == "float32":
        return
    wide = np.empty(x.size, np.float32)
    wide_gpu = cuda.to_device(wide)
    reduction.convert(wide, x, dtype)
    reduction.convert(wide_gpu, cuda.to_device(x), dtype)
    yield from _problem(f"convert from {dtype}, n = {x.size}", wide, wide_gpu)
    values = np.random.default_rng(x.size).standard_normal(x.size).astype(np.float32)
    narrow = np.zeros_like(x)
    narrow_gpu = cuda.to_device(narrow)
    reduction.convert(narrow, values, dtype)
    reduction.convert(narrow_gpu, cuda.to_device(values), dtype)
    yield from _problem(f"convert to {dtype}, n = {x.size}", narrow, narrow_gpu)


def _count_problems(x: np.ndarray, dtype: str) -> Iterator[str]:
    bad = x.copy()
    if dtype in ("float16", "bfloat16"):
        bad[::3] = 0x7C00 if dtype == "float16" else 0xFF80
        bad[1::5] = 0xFFFF
    else:
        bad[::3], bad[1::5] = np.inf, np.nan
    if dtype == "float64":
        bad[2::7] = 1e300
    for as_float32 in (False, True):
        expected = reduction.count_non_finite(bad, dtype, as_float32)
        got = reduction.count_non_finite(cuda.to_device(bad), dtype, as_float32)
        if got != expected:
            yield f"count_non_finite, {dtype}, n = {x.size}, as_float32 = {as_float32}: {got}, not {expected}"


def _as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values in a type, 16-bit ones as bits; bfloat16 by cutting."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype).view(np.uint16) if dtype == "float16" else values.astype(dtype)


def _problem(what: str, expected: np.ndarray, on_gpu: object) -> Iterator[str]:
    """One line if the bytes differ."""
    got = on_gpu.copy_to_host()  # type: ignore[attr-defined]
    same = expected.view(np.uint8) == got.view(np.uint8)
    if not same.all():
        at = np.flatnonzero(~same)[0] // expected.itemsize
        yield f"{what}: {np.count_nonzero(~same)} bytes differ, first at [{at}]: {got[at]!r}, not {expected[at]!r}"
