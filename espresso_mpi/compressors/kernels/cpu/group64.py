"""Groups of 64 elements inside intrinsics: four vectors of 16 lanes, loaded, stored and summed side by side.

The functions are called while numba compiles an intrinsic; ``vectors`` has those for single vectors.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from . import vectors

WIDTH = 16  # floats in a vector of AVX-512; LLVM cuts them up for smaller ones
_F32, I32, _I16, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
VECTOR, VECTOR_I, _MASK = vectors.floats(WIDTH), vectors.integers(WIDTH), vectors.integers(WIDTH, 1)
FOUR = range(4)  # vectors in a group of 64 elements


def offset(builder: Any, index: Any, by: int) -> Any:
    return builder.add(index, ir.Constant(index.type, by))


class Array:
    """An array argument inside an intrinsic: loads and stores of vectors."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any, number: int) -> None:
        self._place = (context, builder, signature.args[number], args[number])
        self._builder = builder

    def load(self, index: Any, pointee: Any = VECTOR) -> Any:
        return self._builder.load(vectors.pointer(*self._place, index, pointee), align=2 if pointee is _I16 else 4)

    def store(self, value: Any, index: Any) -> None:
        self._builder.store(value, vectors.pointer(*self._place, index, value.type), align=4)

    def group(self, index: Any, pointee: Any = VECTOR) -> list[Any]:
        """The four vectors of 64 elements from ``index`` on."""
        return [self.load(offset(self._builder, index, WIDTH * k), pointee) for k in FOUR]

    def store_group(self, four: list[Any], index: Any) -> None:
        for k in FOUR:
            self.store(four[k], offset(self._builder, index, WIDTH * k))

    def splat(self, index: int) -> Any:
        """One element of the array in all lanes."""
        return vectors.splat(self._builder, self.load(ir.Constant(I64, index), _F32), WIDTH)


def bits_of(builder: Any, mask: Any) -> list[Any]:
    """A uint64 as four vectors of bits."""
    parts = [builder.trunc(builder.lshr(mask, ir.Constant(I64, WIDTH * k)), _I16) for k in FOUR]
    return [builder.bitcast(part, _MASK) for part in parts]


def word_of(builder: Any, masks: list[Any]) -> Any:
    """Four vectors of bits as a uint64."""
    word = ir.Constant(I64, 0)
    for k in FOUR:
        part = builder.zext(builder.bitcast(masks[k], _I16), I64)
        word = builder.or_(word, builder.shl(part, ir.Constant(I64, WIDTH * k)))
    return word


def start_of(builder: Any, loop: Any) -> Any:
    """The first element of the group that a loop over groups has arrived at."""
    return builder.mul(loop.index, ir.Constant(loop.index.type, 4 * WIDTH))


def fold(builder: Any, four: list[Any], combine: Any) -> Any:
    """Fold the upper half of 64 lanes onto the lower half until one is left."""
    low, high = combine(four[0], four[2]), combine(four[1], four[3])
    return vectors.fold(builder, combine(low, high), combine)


def accumulators(builder: Any, vector: Any, zero: Any) -> list[Any]:
    return [cgutils.alloca_once_value(builder, vectors.constant(vector, zero)) for _ in FOUR]
