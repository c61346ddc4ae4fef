"""The fast Walsh-Hadamard transform of blocks in Sylvester's order, without its factor 1/√d.

The butterflies run from stride 1 upwards: this order is part of the format (``cpu.rotations``).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import group64, host, vectors


def _stages(builder: Any, parts: list[Any]) -> list[Any]:
    """The butterflies between the vectors of a list: strides of one vector, two, four, ..."""
    stride = 1
    while stride < len(parts):
        done = list(parts)
        for k in range(len(parts)):
            if not k & stride:
                done[k] = builder.fadd(parts[k], parts[k + stride])
                done[k + stride] = builder.fsub(parts[k], parts[k + stride])
        parts, stride = done, 2 * stride
    return parts


def _inner_stages(builder: Any, vector: Any) -> Any:
    """The butterflies inside a vector: strides 1, 2, 4, 8. ``±1 · v + partner`` is their sum or difference exactly."""
    for stride in (1, 2, 4, 8):
        partner = builder.shuffle_vector(
            vector,
            ir.Constant(group64.VECTOR, ir.Undefined),
            ir.Constant(group64.VECTOR_I, [lane ^ stride for lane in range(group64.WIDTH)]),
        )
        signs = ir.Constant(group64.VECTOR, [-1.0 if lane & stride else 1.0 for lane in range(group64.WIDTH)])
        vector = vectors.fma(builder, vector, signs, partner)
    return vector


@intrinsic
def _near_stages(typingctx, x, groups):  # type: ignore[no-untyped-def]
    """The butterflies of strides 1 to 32 in ``64 * groups`` elements."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        array = group64.Array(context, builder, sig, args, 0)
        with cgutils.for_range(builder, args[1]) as loop:
            at = group64.start_of(builder, loop)
            inner = [_inner_stages(builder, vector) for vector in array.group(at)]
            array.store_group(_stages(builder, inner), at)
        return context.get_dummy_value()

    return types.none(x, types.intp), codegen


def _make_far_stages(radix: int) -> Any:
    @intrinsic
    def far_stages(typingctx, x, index, stride):  # type: ignore[no-untyped-def]
        """The butterflies of strides ``stride`` to ``stride · radix / 2``, for 16 columns from ``index`` on."""

        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            array, at = group64.Array(context, builder, sig, args, 0), [args[1]]
            while len(at) < radix:
                at.append(builder.add(at[-1], args[2]))
            for place, value in zip(at, _stages(builder, [array.load(place) for place in at])):
                array.store(value, place)
            return context.get_dummy_value()

        return types.none(x, types.intp, types.intp), codegen

    return far_stages


_far_2, _far_4, _far_8, _far_16 = (_make_far_stages(radix) for radix in (2, 4, 8, 16))


@host.inline
def transform(x):  # type: ignore[no-untyped-def]
    """``x = H·x`` for a power of two of at least 64 elements."""
    _near_stages(x, x.size // 64)
    stride = 64
    while stride < x.size:
        radix = min(16, x.size // stride)
        for first in range(0, x.size, radix * stride):
            for i in range(first, first + stride, 16):
                if radix == 16:
                    _far_16(x, i, stride)
                elif radix == 8:
                    _far_8(x, i, stride)
                elif radix == 4:
                    _far_4(x, i, stride)
                else:
                    _far_2(x, i, stride)
        stride *= radix
