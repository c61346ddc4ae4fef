"""What intrinsics build vector code with: addresses, equal lanes, fused products, sums over lanes.

The functions are called while numba compiles an intrinsic; they take and give llvmlite values. A vector is as wide as
its type says: LLVM cuts it up for the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

_INDEX = ir.IntType(32)


def floats(width: int) -> Any:
    """The type of a vector of float32."""
    return ir.VectorType(ir.FloatType(), width)


def integers(width: int, bits: int = 32) -> Any:
    """The type of a vector of integers."""
    return ir.VectorType(ir.IntType(bits), width)


def constant(vector: Any, value: Any) -> Any:
    """A vector of that type with the same constant in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """The address of an array's first element."""
    return context.make_array(array_type)(context, builder, array).data


def pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, pointee: Any) -> Any:
    """The address of an element of an array, as that of a ``pointee``."""
    return builder.bitcast(builder.gep(data(context, builder, array_type, array), [index]), pointee.as_pointer())


def splat(builder: Any, scalar: Any, width: int) -> Any:
    """A vector with the scalar in all lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(one, undefined, constant(integers(width), 0))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a · b + c`` of vectors of float32, rounded once; llvmlite's own is for scalars."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32"), [a, b, c])


def fold(builder: Any, lanes: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the upper half of a vector's lanes with the lower half until one is left."""
    width = lanes.type.count
    while width > 1:
        width //= 2
        undefined = ir.Constant(lanes.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(lanes, undefined, ir.Constant(integers(width), half))
            for half in (list(range(width)), list(range(width, 2 * width)))
        )
        lanes = combine(low, high)
    return builder.extract_element(lanes, ir.Constant(_INDEX, 0))


def tree_sum(builder: Any, lanes: Any) -> Any:
    """The sum of a vector's lanes, folded pairwise: formats fix this order."""
    return fold(builder, lanes, builder.fadd)
