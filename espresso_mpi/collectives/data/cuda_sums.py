"""The CUDA twins of the functions of ``reduction``: the same arguments, the same bits.

16-bit types come as their bits (uint16); float16 is viewed as such, bfloat16 is taken apart here. Sums and quotients
are IEEE operations, one rounding each, in the order of the rows. Where the CPU multiplies by the reciprocal of a power
of two, these kernels divide: that gives the same bits, and they wait for memory anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.arrays import device
from espresso_mpi.compressors.kernels.cpu.casts import BEYOND_HALF
from espresso_mpi.compressors.kernels.cuda import gpu

_ELEMENT = {"float16": "float16", "bfloat16": "uint16", "float32": "float32", "float64": "float64"}
"""The numba type that stands for each element type."""


def mean_rows(out: Any, rows: Any, own: int, divisor: float, dtype: str, counted: bool) -> int:
    """As ``reduction.mean_rows``; on a session's stream it returns 0, see ``gpu.cuts_of``."""
    factor = np.float64(divisor) if dtype == "float64" else np.float32(divisor)
    of, among = _as_element(out, dtype), _as_element(rows, dtype)
    if dtype != "float16" or not counted:
        _launch(_MEAN[dtype], out.size, of, among, own, factor)
        return 0
    counter = gpu.cut_counter()
    _launch(_beyond_half, out.size, of, among, own, factor, counter)
    _launch(_MEAN[dtype], out.size, of, among, own, factor)
    return gpu.cuts_of(counter)


def max_rows(out: Any, rows: Any, own: int) -> None:
    """As ``reduction.reduce_rows`` with the maximum."""
    _launch(_max, out.size, out, rows, own)


def add_integers(out: Any, rows: Any, own: int, counted: bool) -> int:
    """As ``reduction.reduce_rows`` of integers; on a session's stream it returns 0, see ``gpu.cuts_of``."""
    counter = gpu.cut_counter() if counted else gpu.uncounted()
    limits = np.iinfo(out.dtype)
    _launch(_ADD[str(out.dtype)], out.size, out, rows, own, np.int64(limits.min), np.int64(limits.max), counter)
    return gpu.cuts_of(counter) if counted else 0


def blend(out: Any, a: float, b: float, x: Any) -> None:
    """As ``reduction.blend``."""
    _launch(_blend, out.size, out, np.float32(a), np.float32(b), x)


def divide(x: Any, divisor: float) -> None:
    """As ``reduction.divide``."""
    _launch(_divide, x.size, x, np.float32(divisor))


def convert(out: Any, x: Any, dtype: str) -> None:
    """As ``reduction.convert``."""
    if out.dtype == np.float32:
        _launch(_WIDEN[dtype], out.size, out, _as_element(x, dtype))
    else:
        _launch(_NARROW[dtype], out.size, _as_element(out, dtype), x)


def count_from(x: Any, dtype: str, least: int) -> int:
    """As ``reduction.count_from``; waits for the GPU."""
    counter = gpu.event_counter()
    _launch_count(x, dtype, least, counter)
    return gpu.count_of(counter)


def _launch_count(x: Any, dtype: str, least: int, counter: Any) -> None:
    if dtype in ("float16", "bfloat16"):
        _launch(_count_16, x.size, x, np.uint16(least), counter)
    else:
        unsigned = np.uint32 if dtype == "float32" else np.uint64
        _launch(_COUNT[dtype], x.size, x, unsigned(least - 1).view(dtype), counter)


class Counts:
    """What ``count_from`` returns for several arrays, queued on the current stream: the host waits for none of them.

    Args:
        searched: flat arrays, each with its element type and the least bits that count.
    """

    def __init__(self, searched: Sequence[tuple[Any, str, int]]) -> None:
        self._number = len(searched)
        room = 1 << (self._number - 1).bit_length()
        self._free: list[_CountMemory] = gpu.scratch(("counts", room), list)
        self._memory = self._free.pop() if self._free else _CountMemory(room)
        self._memory.clear()
        for slot, (x, dtype, least) in zip(self._memory.slots, searched):
            _launch_count(x, dtype, least, slot)
        self._memory.fetch()

    def passed(self) -> bool:
        """Whether they are there."""
        return self._memory.mark.passed()

    def read(self) -> list[int]:
        """They, once they are there; only once."""
        self._free.append(self._memory)
        return self._memory.here[: self._number].tolist()


class _CountMemory:
    """Counters on the GPU, and page-locked memory that they are copied to."""

    def __init__(self, room: int) -> None:
        self._there, self.here = cuda.device_array(room, np.int64), device.pinned(8 * room).view(np.int64)
        self.slots = [self._there[number : number + 1] for number in range(room)]
        self.mark, self._zeros = device.Mark(), np.zeros(room, np.int64)

    def clear(self) -> None:
        device.copy_later(self._there, self._zeros)

    def fetch(self) -> None:
        device.copy_later(self.here, self._there)
        self.mark.set()


def _launch(kernel: gpu.Kernel, size: int, *args: Any) -> None:
    """Run a kernel over ``size`` elements, which its blocks take by tiles."""
    kernel(gpu.blocks(size, gpu.TILE), gpu.THREADS, *args)


def _as_element(array: Any, dtype: str) -> Any:
    return array.view(np.float16) if dtype == "float16" else array


# --- from and to the type that is calculated with ---------------------------------------------------------------------


@cuda.jit(device=True)
def _same(value):  # type: ignore[no-untyped-def]
    return value


@cuda.jit(device=True)
def _to_float16(value):  # type: ignore[no-untyped-def]
    cut = min(max(value, np.float32(-65504.0)), np.float32(65504.0))
    return np.float16(value if abs(value) == np.float32(np.inf) else cut)


@cuda.jit(device=True)
def _to_float32(value):  # type: ignore[no-untyped-def]
    return np.float32(value)


@cuda.jit(device=True)
def _to_float64(value):  # type: ignore[no-untyped-def]
    return np.float64(value)


@cuda.jit(device=True)
def _from_bfloat16(bits):  # type: ignore[no-untyped-def]
    return gpu.bits_float(np.uint32(np.uint32(bits) << np.uint32(16)))


@cuda.jit(device=True)
def _to_bfloat16(value):  # type: ignore[no-untyped-def]
    bits = gpu.float_bits(value)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


_LOAD = {"float16": _to_float32, "bfloat16": _from_bfloat16, "float32": _same, "float64": _same}
_STORE = {"float16": _to_float16, "bfloat16": _to_bfloat16, "float32": _same, "float64": _same}


# --- kernels ----------------------------------------------------------------------------------------------------------


def _make_mean(dtype):  # type: ignore[no-untyped-def]
    load, store, element = _LOAD[dtype], _STORE[dtype], _ELEMENT[dtype]

    @cuda.jit(device=True)
    def term(out, rows, own, r, i):  # type: ignore[no-untyped-def]
        return load(out[i] if r == own else rows[r, i])

    factor = "float64" if dtype == "float64" else "float32"

    @gpu.kernel(f"{element}[::1], {element}[:, ::1], int64, {factor}", dtype=dtype)
    def mean_rows(out, rows, own, divisor):  # type: ignore[no-untyped-def]
        step = gpu.THREADS
        for tile in range(gpu.TILE * cuda.blockIdx.x, out.size, gpu.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + gpu.TILE <= out.size:
                p, q = term(out, rows, own, 0, i), term(out, rows, own, 0, i + step)
                s, t = term(out, rows, own, 0, i + 2 * step), term(out, rows, own, 0, i + 3 * step)
                for r in range(1, rows.shape[0]):
                    p, q = p + term(out, rows, own, r, i), q + term(out, rows, own, r, i + step)
                    s += term(out, rows, own, r, i + 2 * step)
                    t += term(out, rows, own, r, i + 3 * step)
                out[i], out[i + step] = store(p / divisor), store(q / divisor)
                out[i + 2 * step], out[i + 3 * step] = store(s / divisor), store(t / divisor)
            else:
                for j in range(i, out.size, step):
                    p = term(out, rows, own, 0, j)
                    for r in range(1, rows.shape[0]):
                        p += term(out, rows, own, r, j)
                    out[j] = store(p / divisor)

    return mean_rows


@gpu.kernel("float16[::1], float16[:, ::1], int64, float32, int64[::1]")
def _beyond_half(out, rows, own, divisor, beyond):  # type: ignore[no-untyped-def]
    """Counts the results of ``mean_rows`` that a half cannot hold, before they are made."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        total = np.float32(out[i] if own == 0 else rows[0, i])
        for r in range(1, rows.shape[0]):
            total += np.float32(out[i] if r == own else rows[r, i])
        if np.float32(BEYOND_HALF) <= abs(total / divisor) < np.float32(np.inf):
            cuda.atomic.add(beyond, 0, 1)


@gpu.kernel("float32[::1], float32")
def _divide(x, divisor):  # type: ignore[no-untyped-def]
    step = gpu.THREADS
    for tile in range(gpu.TILE * cuda.blockIdx.x, x.size, gpu.TILE * cuda.gridDim.x):
        i = tile + cuda.threadIdx.x
        if tile + gpu.TILE <= x.size:
            p, q, r, s = x[i], x[i + step], x[i + 2 * step], x[i + 3 * step]
            x[i], x[i + step] = p / divisor, q / divisor
            x[i + 2 * step], x[i + 3 * step] = r / divisor, s / divisor
        else:
            for j in range(i, x.size, step):
                x[j] = x[j] / divisor


def _make_convert(change, target, source):  # type: ignore[no-untyped-def]
    @gpu.kernel(f"{target}[::1], {source}[::1]", to=target, of=source)
    def convert(out, x):  # type: ignore[no-untyped-def]
        step = gpu.THREADS
        for tile in range(gpu.TILE * cuda.blockIdx.x, out.size, gpu.TILE * cuda.gridDim.x):
            i = tile + cuda.threadIdx.x
            if tile + gpu.TILE <= out.size:
                p, q, r, s = x[i], x[i + step], x[i + 2 * step], x[i + 3 * step]
                out[i], out[i + step] = change(p), change(q)
                out[i + 2 * step], out[i + 3 * step] = change(r), change(s)
            else:
                for j in range(i, out.size, step):
                    out[j] = change(x[j])

    return convert


def _make_count(dtype):  # type: ignore[no-untyped-def]
    @gpu.kernel(f"{dtype}[::1], {dtype}, int64[::1]", dtype=dtype)
    def count(x, limit, counter):  # type: ignore[no-untyped-def]
        found = np.int64(0)
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            found += not abs(x[i]) <= limit
        if found:
            cuda.atomic.add(counter, 0, found)

    return count


@gpu.kernel("uint16[::1], uint16, int64[::1]")
def _count_16(x, least, counter):  # type: ignore[no-untyped-def]
    found = np.int64(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        found += (x[i] & 0x7FFF) >= least
    if found:
        cuda.atomic.add(counter, 0, found)


_MEAN = {dtype: _make_mean(dtype) for dtype in _ELEMENT}
_COUNT = {dtype: _make_count(dtype) for dtype in ("float32", "float64")}
_WIDEN = {
    "float16": _make_convert(_to_float32, "float32", "float16"),
    "bfloat16": _make_convert(_from_bfloat16, "float32", "uint16"),
    "float64": _make_convert(_to_float32, "float32", "float64"),
}
_NARROW = {
    "float16": _make_convert(_to_float16, "float16", "float32"),
    "bfloat16": _make_convert(_to_bfloat16, "uint16", "float32"),
    "float64": _make_convert(_to_float64, "float64", "float32"),
}


@gpu.kernel("float32[::1], float32[:, ::1], int64")
def _max(out, rows, own):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        top = out[i]
        for r in range(rows.shape[0]):
            if r != own:
                top = max(top, rows[r, i])
        out[i] = top


@gpu.kernel("float32[::1], float32, float32, float32[::1]")
def _blend(out, a, b, x):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = cuda.fma(b, x[i], a * out[i])


def _make_add(element):  # type: ignore[no-untyped-def]
    @gpu.kernel(f"{element}[::1], {element}[:, ::1], int64, int64, int64, int64[::1]", element=element)
    def add(out, rows, own, low, high, outside):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            total = np.int64(0)
            for r in range(rows.shape[0]):
                total += np.int64(out[i] if r == own else rows[r, i])
            if total < low or total > high:
                cuda.atomic.add(outside, 0, 1)
            out[i] = min(max(total, low), high)

    return add


_ADD = {element: _make_add(element) for element in ("int8", "int16", "int32")}
