"""The formulas of optimizers as CUDA kernels: one launch reads each array once, and writes in place.

Imported when an optimizer first has arrays on a GPU. The GPU compiler may fuse products with sums, so results differ in
their last bits from those of the CPU, and perhaps of other GPUs: all ranks of a job must use the same type of GPU and
version of CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import cuda

from espresso_mpi.arrays.caller_streams import on_stream
from espresso_mpi.compressors.kernels.cuda import gpu

from . import formulas

KERNELS: dict[str, gpu.Kernel] = {}
"""The kernel of each formula, by its name."""


def apply(formula: str, stream: int, arrays: Sequence[Any], numbers: Sequence[float]) -> None:
    """Replace the first arrays by what a formula makes of the arrays and numbers.

    Args:
        stream: of the arrays' framework, on which the kernel runs; see ``device.stream_of``.
        arrays: flat float32 on the GPU, all of one size: ``Flat``, or what numba takes.
    """
    if arrays[0].size:
        with on_stream(stream):
            grid = gpu.blocks(arrays[0].size, gpu.THREADS)
            KERNELS[formula](grid, gpu.THREADS, *arrays, *map(np.float32, numbers))


def _of(arrays: int, numbers: int) -> Callable[[Any], gpu.Kernel]:
    """Decorator: register the kernel of the formula of this name, which takes so many arrays and numbers."""

    def decorate(function: Any) -> gpu.Kernel:
        made = gpu.kernel(", ".join([*arrays * ["float32[::1]"], *numbers * ["float32"]]), may_fuse=True)(function)
        KERNELS[function.__name__] = made
        return made

    return decorate


_clip = cuda.jit(device=True)(formulas.clip)


def _element(make: Callable[..., Any], *functions: Any) -> Any:
    """A formula of elements."""
    return cuda.jit(device=True)(make(math.sqrt, *functions))


_adam, _momentum, _progress = map(_element, (formulas.adam, formulas.momentum, formulas.progress))
_outer, _decayed, _sgd = map(_element, (formulas.outer, formulas.decayed_momentum, formulas.sgd))
_mean_momentum, _lamb, _frozen_lamb = map(
    _element, (formulas.mean_momentum, formulas.lamb_direction, formulas.frozen_direction)
)
_along, _sign_step = map(_element, (formulas.along, formulas.sign_step))
_frozen, _local, _from_anchor = (
    _element(make, _clip) for make in (formulas.frozen_adam, formulas.local_adam, formulas.from_anchor)
)


@_of(4, 10)
def adam(x, m, v, g, first, first_rest, second, second_rest, rate, m_scale, v_scale, eps, decay, typical):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i], m[i], v[i] = _adam(
            x[i], m[i], v[i], g[i], first, first_rest, second, second_rest, rate, m_scale, v_scale, eps, decay, typical
        )


@_of(2, 2)
def momentum(g, m, first, first_rest):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        g[i] = _momentum(g[i], m[i], first, first_rest)


@_of(4, 7)
def frozen_adam(x, m, v, mean, rate, m_scale, v_scale, eps, decay, typical, most):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i], m[i] = _frozen(x[i], m[i], v[i], mean[i], rate, m_scale, v_scale, eps, decay, typical, most)


@_of(3, 0)
def progress(message, anchor, x):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), message.size, cuda.gridsize(1)):
        message[i] = _progress(message[i], anchor[i], x[i])


@_of(4, 6)
def outer(x, anchor, u, d, rate, inertia, direct, ahead, keep, keep_rest):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i], anchor[i], u[i] = _outer(x[i], anchor[i], u[i], d[i], rate, inertia, direct, ahead, keep, keep_rest)


@_of(3, 2)
def decayed_momentum(g, m, x, inertia, decay):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        g[i] = _decayed(g[i], m[i], x[i], inertia, decay)


@_of(3, 3)
def sgd(x, m, mean, rate, ahead, behind):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i], m[i] = _sgd(x[i], m[i], mean[i], rate, ahead, behind)


@_of(2, 3)
def sign_step(x, q, shrink, along, signed):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] = _sign_step(x[i], q[i], shrink, along, signed)


@_of(5, 8)
def local_adam(x, m, u, v, g, first, first_rest, rate, v_scale, eps, shrink, typical, most):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i], m[i], u[i] = _local(
            x[i], m[i], u[i], v[i], g[i], first, first_rest, rate, v_scale, eps, shrink, typical, most
        )


@_of(3, 5)
def mean_momentum(g, m, u, first, first_rest, rate, shrink, inverse):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        g[i] = _mean_momentum(g[i], m[i], u[i], first, first_rest, rate, shrink, inverse)


@_of(5, 6)
def from_anchor(x, m, anchor, v, mean, length, v_scale, eps, kept, typical, most):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i], m[i] = _from_anchor(x[i], m[i], anchor[i], v[i], mean[i], length, v_scale, eps, kept, typical, most)


@_of(4, 8)
def lamb_direction(g, m, v, x, first, first_rest, second, second_rest, m_scale, v_scale, eps, decay):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        g[i], m[i], v[i] = _lamb(
            g[i], m[i], v[i], x[i], first, first_rest, second, second_rest, m_scale, v_scale, eps, decay
        )


@_of(5, 9)
def frozen_direction(mean, m, fresh, v, x, first, inverse, second, second_rest, m_scale, v_scale, eps, decay, typical):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), mean.size, cuda.gridsize(1)):
        mean[i], m[i], fresh[i] = _frozen_lamb(
            mean[i], m[i], fresh[i], v[i], x[i], first, inverse, second, second_rest, m_scale, v_scale, eps, decay,
            typical,
        )  # fmt: skip


@_of(2, 1)
def along(x, direction, rate):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        x[i] = _along(x[i], direction[i], rate)
