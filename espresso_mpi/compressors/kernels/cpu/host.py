"""What the CPU kernels share: the two builds of a kernel, bit casts, fused arithmetic, random bits, sign masks.

Every kernel is plain IEEE arithmetic (no fast-math), so that it writes the same bytes on any number of threads and the
same bytes as its CUDA twin. Where a product is followed by a sum the fused form is written out (``fma``), because a
GPU compiler would otherwise fuse it unasked and round differently from the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import get_num_threads, set_num_threads, types
from numba.core import cgutils
from numba.extending import intrinsic

from espresso_mpi.compressors.limit import LIMIT
from espresso_mpi.files.compiled import compiled
from espresso_mpi.files.sources import renamed

from . import vectors

EMPTY = np.empty(0, np.float32)
"""Stands for "no residual" in a kernel's arguments: numba wants one type for both cases."""

# Below this size waking the threads costs more than they save (about 10 us against 4 us of work at 10 GB/s).
PARALLEL_MIN = 1 << 16

LIMIT_BITS = int(np.float32(LIMIT).view(np.uint32))
"""LIMIT as float32 bits: magnitudes with larger ones are not sanitised."""

_threads = 0  # 0: as many as numba would use


def limit_threads(count: int) -> None:
    """Let kernels use at most ``count`` threads; numba's own setting is left to its owner."""
    global _threads
    _threads = count


_OPTIONS = {"nogil": True, "error_model": "numpy"}


_PARALLEL = threading.Lock()
"""One parallel region at a time: numba's fallback layer, workqueue, ends the process if two threads meet there."""


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    """A numba function, cached on disk where there is a place for it."""
    return compiled(function, **_OPTIONS, **options)


def inline(function: Callable[..., Any]) -> Any:
    """Compile a helper that kernels call for one block of data."""
    return _compile(function)


class Kernel:
    """A CPU kernel whose ``prange`` loop is built twice: serial, and over numba's threads.

    The serial build compiles several times faster and has no start-up cost, and it is the one that ranks sharing a
    core want. The first argument must be an array; its size decides which build runs.

    Attributes:
        serial: the serial build.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__doc__ = function.__doc__
        self.serial = _compile(function)
        self._parallel = _compile(renamed(function, "_parallel"), parallel=True)  # numba tells builds apart by name

    def __call__(self, first: np.ndarray, *rest: Any) -> Any:
        if _threads == 1 or first.size < PARALLEL_MIN:  # before asking numba, which takes longer than a small kernel
            return self.serial(first, *rest)
        threads = get_num_threads()
        wanted = min(threads, _threads or threads)
        if wanted == 1:
            return self.serial(first, *rest)
        with _PARALLEL:
            set_num_threads(wanted)
            try:
                return self._parallel(first, *rest)
            finally:
                set_num_threads(threads)


class Composite:
    """A function of several kernels and composites, which numba could compile.

    These must be names in its module, above it: in the compiled function, the names stand for the serial builds.

    For an array that needs no threads it is one compiled function, which calls the serial builds. For longer ones it
    runs in Python, where each kernel uses its threads. The first argument must be an array; its size decides.

    Attributes:
        serial: the compiled function.
    """

    serial: Any

    def __init__(self, function: Any) -> None:
        self.__doc__, self._function = function.__doc__, function
        names = function.__globals__.items()
        serial = {name: value.serial for name, value in names if isinstance(value, Kernel | Composite)}
        self.serial = _compile(renamed(function, "", **serial))

    def __call__(self, first: np.ndarray, *rest: Any) -> Any:
        return (self.serial if runs_serial(first.size) else self._function)(first, *rest)


def runs_serial(size: int) -> bool:
    """Whether kernels of arrays of this size run on one thread."""
    if _threads == 1 or size < PARALLEL_MIN:
        return True
    threads = get_num_threads()
    return min(threads, _threads or threads) == 1


def _bitcast(source: Any, target: Any, to: Any) -> Any:
    signature = target(source)
    return signature, lambda context, builder, sig, args: builder.bitcast(args[0], to)


@intrinsic
def float_bits(typingctx, x):  # type: ignore[no-untyped-def]
    """The 32 bits of a float32 as uint32."""
    return _bitcast(types.float32, types.uint32, ir.IntType(32))


@intrinsic
def bits_float(typingctx, x):  # type: ignore[no-untyped-def]
    """The float32 that has these 32 bits."""
    return _bitcast(types.uint32, types.float32, ir.FloatType())


@intrinsic
def fma(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    """``a * b + c`` in float32, rounded once."""
    f32 = types.float32

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.fma(*args)

    return f32(f32, f32, f32), codegen


@intrinsic
def to_half(typingctx, x):  # type: ignore[no-untyped-def]
    """The bits of the float16 nearest to a float32 (ties to even), as uint16."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def from_half(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float32 equal to the float16 with these bits."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


# --- groups of 64 floats: one vector instruction sequence each on any target ------------------------------------------

_V = 64
_VECTOR, _VECTOR_I = vectors.floats(_V), vectors.integers(_V)


@intrinsic
def negative_mask(typingctx, x, index):  # type: ignore[no-untyped-def]
    """Bit i of the uint64 says whether ``x[index + i] < 0``, for 64 elements."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        values = builder.load(vectors.pointer(context, builder, sig.args[0], args[0], args[1], _VECTOR), align=4)
        negative = builder.fcmp_ordered("<", values, ir.Constant(_VECTOR, [0.0] * _V))
        return builder.bitcast(negative, ir.IntType(_V))

    return types.uint64(x, types.intp), codegen


@intrinsic
def _abs_sum_groups(typingctx, x, groups):  # type: ignore[no-untyped-def]
    """Sum ``|x|`` over ``64 * groups`` elements: 64 running lane sums, then a pairwise tree over the lanes."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        total = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * _V))
        no_sign = ir.Constant(_VECTOR_I, [0x7FFFFFFF] * _V)
        with cgutils.for_range(builder, args[1]) as loop:
            index = builder.mul(loop.index, ir.Constant(loop.index.type, _V))
            bits = builder.load(vectors.pointer(context, builder, sig.args[0], args[0], index, _VECTOR_I), align=4)
            magnitudes = builder.bitcast(builder.and_(bits, no_sign), _VECTOR)
            builder.store(builder.fadd(builder.load(total), magnitudes), total)
        return vectors.tree_sum(builder, builder.load(total))

    return types.float32(x, types.intp), codegen


@inline
def abs_sum(x):  # type: ignore[no-untyped-def]
    """Sum of ``|x|``: whole groups of 64 by lanes and tree, then the rest one by one. The format fixes this order."""
    groups = x.size // 64
    total = _abs_sum_groups(x, groups)
    for i in range(64 * groups, x.size):
        total += np.float32(abs(x[i]))
    return total


@inline
def max_bits(x):  # type: ignore[no-untyped-def]
    """The largest magnitude in x, as float32 bits: an integer maximum vectorises without fast-math."""
    top = np.uint32(0)
    for i in range(x.size):
        bits = np.uint32(float_bits(x[i]) & np.uint32(0x7FFFFFFF))
        top = bits if bits > top else top
    return top


@intrinsic
def trailing_zeros(typingctx, mask):  # type: ignore[no-untyped-def]
    """Number of zero bits below the lowest one of a uint64 that is not zero."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


# --- random bits ------------------------------------------------------------------------------------------------------


STEP = np.uint32(0x9E3779B9)
"""How far the counters of neighbouring elements lie apart: the golden ratio of 2**32."""


@inline
def counter(index, low):  # type: ignore[no-untyped-def]
    """Where the random bits of element ``index`` start. A loop adds STEP from one element to the next."""
    return np.uint32(np.uint32(index) * STEP + low)


@inline
def key_from(key, first):  # type: ignore[no-untyped-def]
    """The halves of a key, for a kernel that counts its elements from ``first`` on."""
    return counter(first, np.uint32(key & 0xFFFFFFFF)), np.uint32((key >> 32) & 0xFFFFFFFF)


@inline
def random_bits(at, high):  # type: ignore[no-untyped-def]
    """32 random bits, from an element's counter and the key's high half.

    Two rounds of multiply and xor-shift (constants of C. Wellons' ``lowbias32``); 32-bit so that it vectorises.
    """
    h = np.uint32((at ^ (at >> np.uint32(16)) ^ high) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))


@inline
def uniform(at, high):  # type: ignore[no-untyped-def]
    """A uniform float32 in [0, 1) with 24 of the ``random_bits``."""
    return np.float32(np.int32(random_bits(at, high) >> np.uint32(8))) * np.float32(5.9604645e-08)


@inline
def sanitise(value):  # type: ignore[no-untyped-def]
    """The value that compressors carry for any float32: at most LIMIT in magnitude, 0 for NaN. Vectorises."""
    small = np.float32(LIMIT) if value > np.float32(LIMIT) else value
    small = np.float32(-LIMIT) if small < np.float32(-LIMIT) else small
    return small if value == value else np.float32(0.0)


@inline
def sanitise_into(out, x):  # type: ignore[no-untyped-def]
    """``out = sanitise(x)`` for as many values as x has; ``out`` may be x."""
    for i in range(x.size):
        out[i] = sanitise(x[i])


@inline
def sanitised_copy(values):  # type: ignore[no-untyped-def]
    """The sanitised values of an array, for encoders without a residual to hold them: rare, for it is slow."""
    sanitised = np.empty_like(values)
    sanitise_into(sanitised, values)
    return sanitised


@inline
def sanitised_sum(kept, x):  # type: ignore[no-untyped-def]
    """``kept = sanitise(kept + x)`` for one block."""
    for i in range(x.size):
        kept[i] = sanitise(kept[i] + x[i])


@inline
def add_into(residual, x):  # type: ignore[no-untyped-def]
    """``residual += x`` for one block: the residual then holds what is to be encoded."""
    for i in range(x.size):
        residual[i] += x[i]


def key_words(key: int) -> tuple[np.uint32, np.uint32]:
    """The two 32-bit halves of a 64-bit key: ``counter`` takes the low one and ``uniform`` the high one."""
    return np.uint32(key & 0xFFFFFFFF), np.uint32((key >> 32) & 0xFFFFFFFF)


# --- sign masks with two values ---------------------------------------------------------------------------------------


@intrinsic
def ones(typingctx, mask):  # type: ignore[no-untyped-def]
    """Number of one bits of a uint64."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


def _chosen(builder: Any, mask: Any, plus: Any, minus: Any) -> Any:
    """64 times ``plus`` or ``minus``, the latter where the mask has a one."""
    bits = builder.bitcast(mask, ir.VectorType(ir.IntType(1), _V))
    return builder.select(bits, vectors.splat(builder, minus, _V), vectors.splat(builder, plus, _V))


@intrinsic
def store_chosen(typingctx, out, index, mask, plus, minus):  # type: ignore[no-untyped-def]
    """``out[index + i] = minus if mask bit i else plus`` for 64 elements."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        pointer = vectors.pointer(context, builder, sig.args[0], args[0], args[1], _VECTOR)
        builder.store(_chosen(builder, *args[2:]), pointer, align=4)
        return context.get_dummy_value()

    return types.none(out, types.intp, types.uint64, types.float32, types.float32), codegen


@intrinsic
def add_chosen(typingctx, out, index, mask, plus, minus):  # type: ignore[no-untyped-def]
    """``out[index + i] += minus if mask bit i else plus`` for 64 elements."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        pointer = vectors.pointer(context, builder, sig.args[0], args[0], args[1], _VECTOR)
        total = builder.fadd(builder.load(pointer, align=4), _chosen(builder, *args[2:]))
        builder.store(total, pointer, align=4)
        return context.get_dummy_value()

    return types.none(out, types.intp, types.uint64, types.float32, types.float32), codegen


@intrinsic
def _split_sum_groups(typingctx, x, groups):  # type: ignore[no-untyped-def]
    """As ``_abs_sum_groups``, apart for the values that are not negative (NaN among them) and for the negative ones."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        zero = ir.Constant(_VECTOR, [0.0] * _V)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(2)]
        with cgutils.for_range(builder, args[1]) as loop:
            index = builder.mul(loop.index, ir.Constant(loop.index.type, _V))
            values = builder.load(vectors.pointer(context, builder, sig.args[0], args[0], index, _VECTOR), align=4)
            negative = builder.fcmp_ordered("<", values, zero)
            parts = (
                builder.select(negative, zero, values),
                builder.select(negative, builder.fneg(values), zero),
            )
            for total, part in zip(sums, parts):
                builder.store(builder.fadd(builder.load(total), part), total)
        return context.make_tuple(builder, sig.return_type, [vectors.tree_sum(builder, builder.load(t)) for t in sums])

    return types.UniTuple(types.float32, 2)(x, types.intp), codegen


@inline
def split_sums(x):  # type: ignore[no-untyped-def]
    """The sum of the values that are not negative and that of the others' magnitudes, in the order of ``abs_sum``."""
    groups = x.size // 64
    plus, minus = _split_sum_groups(x, groups)
    for i in range(64 * groups, x.size):
        if x[i] < 0:
            minus -= x[i]
        else:
            plus += x[i]
    return plus, minus


def inlined(function: Callable[..., Any]) -> Any:
    """As ``inline``, and always a part of its caller.

    LLVM calls a helper that is large or used twice instead: 10 to 40 ns for arrays as arguments, which shows where
    blocks are small.
    """
    return _compile(function, forceinline=True)
