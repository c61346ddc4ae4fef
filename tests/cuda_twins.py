"""Compares what CUDA kernels write with what the CPU kernels write, bit for bit; on a GPU or on the simulator.

A compressor whose two sides cannot agree to the bit says so: ``cuda_tolerance``, a class variable, is the difference
allowed, relative to the largest magnitude in the array. Its payloads are then compared by what they decode to.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import law_tools
import numpy as np
from numba import cuda

from espresso_mpi.arrays import device
from espresso_mpi.arrays.caller_streams import Flat
from espresso_mpi.collectives.data import reduction
from espresso_mpi.collectives.data.layout import Topology
from espresso_mpi.collectives.ranges import limits
from espresso_mpi.compressors import Compressor, Context, get
from espresso_mpi.compressors.kernels.cuda import gpu
from espresso_mpi.errors import PayloadError
from espresso_mpi.optim import cuda_updates, updates
from espresso_mpi.optim.tensors import NumPy

KINDS = ("steps", "constant", "zero", "one-hot", "denormal", "large", "many scales", "huge", "NaN and Inf")
FEWER = ((33, "many scales"), (65, "steps"), (65, "NaN and Inf"), (130, "gaussian"))
FEW = (
    (0, "gaussian"),
    (1, "gaussian"),
    (1, "NaN and Inf"),
    *FEWER,
    (64, "constant"),
    (65, "zero"),
    (65, "one-hot"),
    (65, "denormal"),
    (65, "huge"),
    (520, "gaussian"),
)
"""Sizes and inputs for the simulator, which needs 10 ms and more for a launch: for a method and for its examples."""


# --- compressors ------------------------------------------------------------------------------------------------------


def compressor_problems(spec: str, cases: Iterable[tuple[int, str]] = FEW) -> Iterator[str]:
    """What differs between the CPU and the GPU for one compressor, on inputs of some sizes and kinds."""
    twins = _Twins(get(spec).at(None))
    for n, kind in cases:
        x = law_tools.INPUTS["gaussian" if kind == "steps" else kind](n)
        residual = law_tools.gaussian(n, 1) * np.float32(0.3)
        found = [*twins.steps(x, residual, count=2 if kind == "steps" else 1)]
        if kind == "steps":
            found += [*twins.steps(x, None, count=1), *twins.damaged(n)]
        for problem in found:
            yield f"{spec}, n = {n}, {kind}: {problem}"


_WITH_POSITIONS = (
    *("topk", "topk_chunked", "topk_sampled", "threshold", "dgc", "count_sketch"),
    *("topk_in_chunks", "dct_topk"),
)


_LAUNCHES = {
    "acpsgd": (0, 7, 1),
    "bound": (0, 5, 1),
    "count_sketch": (2, 11, 1),
    "dct_topk": (0, 9, 5),
    "dgc": (0, 19, 1),
    "powersgd": (2, 5, 1),
    "randomk": (0, 2, 1),
    "thc": (1, 1, 1),
    "threshold": (0, 12, 1),
    "topk": (0, 8, 1),
    "topk_chunked": (1, 10, 1),
    "topk_sampled": (0, 19, 1),
}
"""Launches of a summary, of an encode and of ``decode_add``, whatever the size; (0, 1, 1): all other methods."""

_launched: list[str] = []


def _counted(call: Any) -> Any:
    def counted(kernel: Any, *given: Any) -> None:
        _launched.append(kernel.name)
        call(kernel, *given)

    return counted


gpu.Kernel.__call__ = _counted(gpu.Kernel.__call__)  # type: ignore[method-assign]


class _Twins:
    """One compressor on both devices."""

    def __init__(self, compressor: Compressor) -> None:
        self._c = compressor
        usual = str(compressor) == str(get(compressor.name))  # others may code values and positions as well
        most = _LAUNCHES.get(compressor.name, (0, 1, 1)) if usual else 3 * (math.inf,)
        self._most = dict(zip(("summarise", "encode", "decode_add"), most))
        self._tolerance: float = getattr(type(compressor), "cuda_tolerance", 0.0)

    def steps(self, x: np.ndarray, residual: np.ndarray | None, count: int) -> Iterator[str]:
        """A few training steps, with what is kept between them."""
        host, device = (Context(law_tools.KEY, law_tools.SHARED, ranks=3) for _ in range(2))
        on_gpu = None if residual is None else cuda.to_device(residual)
        for step in range(count):
            host, device = (
                replace(each, shared=each.shared + step, step=step, summary=None) for each in (host, device)
            )
            for problem in self._step(x, residual, on_gpu, host, device):
                yield f"{problem}, in step {step}" + ("" if residual is not None else ", without residual")
            x = x[::-1].copy()

    def _step(self, x: np.ndarray, residual: Any, on_gpu: Any, host: Context, device: Context) -> Iterator[str]:
        c, x_gpu = self._c, cuda.to_device(x)
        wanted = c.summary(x.size) if x.size else None
        if wanted is not None:
            host.summary, summary = (np.full(wanted.size, 7, np.float32) for _ in range(2))
            device.summary = cuda.to_device(summary)
            c.summarise(x, host.summary, residual, host)
            yield from self._launches("summarise", x_gpu, device.summary, on_gpu, device)
            yield from self._differ("summary", host.summary, device.summary)
            host.summary *= np.float32(1.5)  # as other ranks might have contributed
            device.summary = cuda.to_device(host.summary)
        payload = np.full(c.nbytes(x.size), 0xA5, np.uint8)
        payload_gpu = cuda.to_device(payload)
        c.encode(x, payload, residual, host)
        yield from self._launches("encode", x_gpu, payload_gpu, on_gpu, device)
        if host.cut != device.cut:
            yield f"the CPU counts {host.cut} values as cut, the GPU {device.cut}"
        yield from self._payloads_differ(payload, payload_gpu, x.size, host)
        if residual is not None:
            yield from self._differ("residual", residual, on_gpu)
        yield from self._decodes("decode" if host.step % 2 else "decode_add", payload, x, host)
        c.update_from_aggregate(payload, x.size, host)
        c.update_from_aggregate(cuda.to_device(payload), x.size, device)
        yield from self._states_differ(host, device)

    def _launches(self, method: str, *args: Any) -> Iterator[str]:
        """Call a method on the GPU; says if it launches more kernels than it has to."""
        _launched.clear()
        getattr(self._c, method)(*args)
        yield from self._too_many(method)

    def _too_many(self, method: str) -> Iterator[str]:
        if len(_launched) > self._most.get(method, math.inf):
            yield f"{method}: {len(_launched)} launches, at most {self._most[method]}: {_launched}"

    def _decodes(self, method: str, payload: np.ndarray, before: np.ndarray, context: Context) -> Iterator[str]:
        """``decode`` or ``decode_add``, and ``finalize``, of the same bytes; divided, where the kernel does that."""
        out = np.nan_to_num(before, posinf=1, neginf=-1)
        out_gpu, payload_gpu = cuda.to_device(out), cuda.to_device(payload)
        contexts = [Context(0, context.shared, context.step) for _ in range(2)]
        contexts[1].divisor = 3.0 if self._c.divides else 1.0
        said = _said(getattr(self._c, method), payload, out, contexts[0])
        _launched.clear()
        said_gpu = _said(getattr(self._c, method), payload_gpu, out_gpu, contexts[1])
        yield from self._too_many(method)
        if said != said_gpu:
            yield f"{method}: the CPU raises {said or 'nothing'}, the GPU {said_gpu or 'nothing'}"
        if said or said_gpu:
            return
        reduction.divide(out, contexts[1].divisor)
        yield from self._differ(method, out, out_gpu)
        self._c.finalize(out)
        self._c.finalize(out_gpu)
        yield from self._differ("finalize", out, out_gpu)

    def damaged(self, n: int) -> Iterator[str]:
        """Payloads that no encoder wrote.

        Some of them name positions twice. On a GPU it is then open which of the two values is added, so their elements
        are not compared there.
        """
        if not device.simulated() and type(self._c).name in _WITH_POSITIONS:
            return
        size, rng = self._c.nbytes(n), np.random.default_rng(n)
        special = rng.choice(law_tools.SPECIAL_WORDS, -(-size // 4)).view(np.uint8)[:size].copy()
        for method, payload in {"decode": rng.integers(0, 256, size, np.uint8), "decode_add": special}.items():
            for problem in self._decodes(method, payload, law_tools.gaussian(n), Context(shared=law_tools.SHARED)):
                yield f"a damaged payload: {problem}"

    def _payloads_differ(self, expected: np.ndarray, got: Any, n: int, context: Context) -> Iterator[str]:
        if not self._tolerance:
            yield from _differ("payload", expected, got)
            return
        seen = [law_tools.decode(self._c, payload, n, context) for payload in (expected, got.copy_to_host())]
        yield from self._differ("what the payload decodes to", *seen)

    def _states_differ(self, host: Context, device: Context) -> Iterator[str]:
        if set(host.state) != set(device.state):
            yield f"state: the CPU keeps {sorted(host.state)}, the GPU {sorted(device.state)}"
            return
        for name, array in host.state.items():
            yield from self._differ(f"state {name}", array, device.state[name])

    def _differ(self, what: str, expected: np.ndarray, got: Any) -> Iterator[str]:
        return _differ(what, expected, got, self._tolerance)


def _said(method: Any, *args: Any) -> str:
    """The type of the error that a call raises, if it does."""
    try:
        method(*args)
    except PayloadError as error:
        return type(error).__name__
    return ""


# --- collectives ------------------------------------------------------------------------------------------------------


def collective_problems(n: int) -> Iterator[str]:
    """What differs between the CPU and the GPU in ``reduction`` at one size."""
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        rows = np.stack([_as_dtype(np.random.default_rng(r).standard_normal(n), dtype) for r in range(5)])
        for own, divisor in ((0, 4.0), (2, 5.0), (4, 3.0)):
            out, out_gpu = rows[own].copy(), cuda.to_device(rows[own])
            reduction.mean_rows(out, rows, own, divisor, dtype)
            reduction.mean_rows(out_gpu, cuda.to_device(rows), own, divisor, dtype)
            yield from _differ(f"mean_rows, {dtype}, n = {n}, own = {own}", out, out_gpu)
        yield from _convert_problems(rows[0], dtype)
        yield from _count_problems(rows[0], dtype)
    yield from _rule_problems(n)
    for divisor in (4.0, 3.0):
        x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        x_gpu = cuda.to_device(x)
        reduction.divide(x, divisor)
        reduction.divide(x_gpu, divisor)
        yield from _differ(f"divide by {divisor}, n = {n}", x, x_gpu)


def _rule_problems(n: int) -> Iterator[str]:
    """Maxima, sums of integers that leave their range, and blends."""
    rng = np.random.default_rng(n)
    cases = [(reduction.ReduceOp("max"), "float32", rng.standard_normal((5, n)).astype(np.float32))]
    for dtype in ("int8", "int16", "int32"):
        limits = np.iinfo(dtype)
        cases.append(
            (reduction.ReduceOp("sum"), dtype, rng.integers(limits.min, limits.max, (5, n), dtype, endpoint=True))
        )
    halves = rng.uniform(-60000, 60000, (5, n)).astype(np.float16).view(np.uint16)
    cases += [(reduction.ReduceOp("sum", divisor), "float16", halves) for divisor in (1.0, 1.5)]
    for rule, dtype, rows in cases:
        out, out_gpu = rows[2].copy(), cuda.to_device(rows[2])
        counts = [
            reduction.reduce_rows(target, source, 2, rule, dtype)
            for target, source in ((out, rows), (out_gpu, cuda.to_device(rows)))
        ]
        if counts[0] != counts[1]:
            yield f"reduce_rows, {dtype}, n = {n}: the CPU counts {counts[0]} saturated, the GPU {counts[1]}"
        yield from _differ(f"reduce_rows, {rule.operator} of {dtype}, n = {n}", out, out_gpu)
    x, out = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    out_gpu = cuda.to_device(out)
    reduction.blend(out, 0.3, 0.7, x)
    reduction.blend(out_gpu, 0.3, 0.7, cuda.to_device(x))
    yield from _differ(f"blend, n = {n}", out, out_gpu)


def _convert_problems(x: np.ndarray, dtype: str) -> Iterator[str]:
    if dtype == "float32":
        return
    wide = np.empty(x.size, np.float32)
    wide_gpu = cuda.to_device(wide)
    reduction.convert(wide, x, dtype)
    reduction.convert(wide_gpu, cuda.to_device(x), dtype)
    yield from _differ(f"convert from {dtype}, n = {x.size}", wide, wide_gpu)
    values = np.random.default_rng(x.size).standard_normal(x.size).astype(np.float32)
    narrow = np.zeros_like(x)
    narrow_gpu = cuda.to_device(narrow)
    reduction.convert(narrow, values, dtype)
    reduction.convert(narrow_gpu, cuda.to_device(values), dtype)
    yield from _differ(f"convert to {dtype}, n = {x.size}", narrow, narrow_gpu)


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
    for least in (limits(dtype, compressed, Topology(((0, 1), (2,)))).large for compressed in (False, True)):
        bad[3:9] = np.array([least - 1, least], f"u{x.itemsize}").view(x.dtype).repeat(3)[: bad[3:9].size]
        expected, got = reduction.count_from(bad, dtype, least), reduction.count_from(cuda.to_device(bad), dtype, least)
        if got != expected:
            yield f"count_from {least:x}, {dtype}, n = {x.size}: {got}, not {expected}"


# --- optimizers -------------------------------------------------------------------------------------------------------

_FUSED = 1e-5
"""Products may be fused with sums on a GPU, and a difference of two values of about one size shows it most."""


class _OnGPU(NumPy):
    """A library whose arrays are numba's, on a GPU or in the simulator."""

    def host_view(self, array: Any) -> None:
        return None

    def gpu_view(self, array: Any) -> Any:
        return array if device.simulated() else Flat(device.address(array), array.size, array.dtype.itemsize)

    def stream(self, array: Any) -> int:
        return device.stream_of(array) if not device.simulated() else 0


def update_problems(n: int) -> Iterator[str]:
    """What differs between the CPU and the GPU in the updates of optimizers at one size; a variance has zeros."""
    known = {one._make.__name__: one for one in vars(updates).values() if isinstance(one, updates.Update)}
    if set(known) != set(cuda_updates.KERNELS):
        yield f"formulas with a kernel for GPUs: {sorted(cuda_updates.KERNELS)}; expected {sorted(known)}"
    rng = np.random.default_rng(n)
    for name, update in known.items():
        kernel = cuda_updates.KERNELS[name]
        count = kernel.signature.count("[::1]")
        arguments = inspect.signature(kernel.function).parameters
        numbers = rng.uniform(0.1, 0.9, len(arguments) - count).tolist()
        arrays = [rng.standard_normal(n).astype(np.float32) for _ in range(count)]
        for argument, array in zip(arguments, arrays):
            if argument in ("v", "fresh"):
                array[...] = np.maximum(array, 0)
        on_gpu = [cuda.to_device(array) for array in arrays]
        update(NumPy(np), tuple(arrays), tuple(numbers))
        update(_OnGPU(np), tuple(on_gpu), tuple(numbers))
        for argument, expected, got in zip(arguments, arrays, on_gpu):
            yield from _differ(f"{name}, {argument}, n = {n}", expected, got, _FUSED)


def _as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values in a type, 16-bit ones as bits; bfloat16 by cutting."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype).view(np.uint16) if dtype == "float16" else values.astype(dtype)


def _differ(what: str, expected: np.ndarray, on_gpu: Any, tolerance: float = 0.0) -> Iterator[str]:
    """One line if the bytes differ, or with a tolerance the values, relative to the largest."""
    got = on_gpu if isinstance(on_gpu, np.ndarray) else on_gpu.copy_to_host()
    if tolerance and expected.size:
        differs = ~(np.abs(got.astype(np.float64) - expected) <= tolerance * np.abs(expected).max())
    else:
        differs = (expected.view(np.uint8) != got.view(np.uint8)).reshape(expected.size, expected.itemsize).any(axis=1)
    if differs.any():
        at = int(np.argmax(differs))
        yield f"{what}: {np.count_nonzero(differs)} elements differ, first at [{at}]: {got[at]!r}, not {expected[at]!r}"
