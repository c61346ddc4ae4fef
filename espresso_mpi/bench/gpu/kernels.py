"""The kernels of every method on the GPU and on the CPU: the same bytes, on the same values."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...arrays import device
from ...compressors import Compressor, Context, get

STEPS = 2
"""Training steps, so that residuals and what a method keeps are compared as well."""


@dataclass(frozen=True)
class Difference:
    """One array that differs: which, of what method and size, and in how many elements."""

    method: str
    n: int
    what: str
    elements: int


def compare(wanted: Sequence[str], sizes: Sequence[int]) -> list[Difference]:
    """What differs, over all methods (specs) and sizes (in elements)."""
    return [
        Difference(spec, n, what, count)
        for spec in wanted
        for n in sizes
        for what, count in _differences(get(spec).at(None), n)
    ]


def compare_in_processes(
    wanted: Sequence[str], sizes: Sequence[int], workers: int, tick: Callable[[], None]
) -> list[Difference]:
    """As ``compare``, in several processes, since compiling takes most of the time; ``tick`` after each method."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit this process's use of the GPU
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        runs = [pool.submit(compare, [spec], sizes) for spec in wanted]
        found = []
        for run in runs:
            found += run.result()
            tick()
    return found


def _differences(compressor: Compressor, n: int) -> Iterator[tuple[str, int]]:
    rng = np.random.default_rng(n)
    contexts = [Context(key=5, shared=6, ranks=2) for _ in range(2)]
    residuals = _twins(np.zeros(n, np.float32))
    tolerance = float(getattr(type(compressor), "cuda_tolerance", 0.0))
    for step in range(STEPS):
        values = rng.standard_normal(n).astype(np.float32)
        contexts = [replace(c, key=c.key + 1, shared=c.shared + 1, step=step, summary=None) for c in contexts]
        for what, here, there in _step(compressor, values, residuals, contexts):
            count = _unlike(here, there, 0.0 if what == "payload" and not tolerance else tolerance)
            if count and not (what == "payload" and tolerance):
                yield f"{what} of step {step}", count


def _step(compressor: Compressor, values: np.ndarray, residuals: Any, contexts: Any) -> Iterator[tuple[str, Any, Any]]:
    """Pairs of arrays that should be alike."""
    n, xs = values.size, _twins(values)
    wanted = compressor.summary(n) if n else None
    if wanted is not None:
        summaries = _twins(np.zeros(wanted.size, np.float32))
        for x, residual, context, summary in zip(xs, residuals, contexts, summaries):
            compressor.summarise(x, summary, residual, context)
            context.summary = summary
        yield "summary", *summaries
    payloads = _twins(np.zeros(compressor.nbytes(n), np.uint8))
    for x, residual, context, payload in zip(xs, residuals, contexts, payloads):
        compressor.encode(x, payload, residual, context)
    yield "payload", *payloads
    yield "residual", *residuals
    sums = _twins(values)
    for context, out in zip(contexts, sums):
        on_gpu = device.device_of(out) == "gpu"
        same = _there(payloads[0]) if on_gpu else payloads[0]  # where payloads differ, it would be said twice
        compressor.decode_add(same, out, context)
        compressor.finalize(out)
        compressor.update_from_aggregate(same, n, context)
    yield "sum", *sums


def _twins(values: np.ndarray) -> tuple[np.ndarray, Any]:
    return values.copy(), _there(values)


def _there(values: np.ndarray) -> Any:
    found = device.empty(values.size, values.dtype, "gpu")
    device.copy(found, values)
    return found


def _unlike(here: np.ndarray, there: Any, tolerance: float) -> int:
    """In how many elements two arrays differ, by bits or relative to the largest."""
    got = device.to_host(there)
    if not tolerance or not here.size:
        return int(np.count_nonzero(here.view(np.uint8) != got.view(np.uint8)))
    limit = tolerance * float(np.abs(here).max())
    return int(np.count_nonzero(~(np.abs(got.astype(np.float64) - here) <= limit)))
