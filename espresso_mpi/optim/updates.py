"""Formulas, applied in place: by a fused kernel to arrays in host memory or on a GPU, as expressions to others.

numba compiles a formula into one pass over memory, on all threads of the rank or on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from ..compressors.kernels.cpu import host
from .formulas import (
    adam,
    along,
    clip,
    decayed_momentum,
    from_anchor,
    frozen_adam,
    frozen_direction,
    lamb_direction,
    local_adam,
    mean_momentum,
    momentum,
    outer,
    progress,
    sgd,
    sign_step,
)
from .tensors import NumPy, Torch

# --- kernels ----------------------------------------------------------------------------------------------------------


_clip = host.inlined(clip)
_adam, _momentum, _progress, _outer = (host.inlined(make(np.sqrt)) for make in (adam, momentum, progress, outer))
_frozen, _local, _from_anchor = (host.inlined(make(np.sqrt, _clip)) for make in (frozen_adam, local_adam, from_anchor))
_decayed, _sgd, _mean_momentum = (host.inlined(make(np.sqrt)) for make in (decayed_momentum, sgd, mean_momentum))
_lamb, _frozen_lamb, _along, _sign_step = (
    host.inlined(make(np.sqrt)) for make in (lamb_direction, frozen_direction, along, sign_step)
)


@host.Kernel
def _adam_kernel(x, m, v, g, first, first_rest, second, second_rest, rate, m_scale, v_scale, eps, decay, typical):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i], v[i] = _adam(
            x[i], m[i], v[i], g[i], first, first_rest, second, second_rest, rate, m_scale, v_scale, eps, decay, typical
        )


@host.Kernel
def _momentum_kernel(g, m, first, first_rest):  # type: ignore[no-untyped-def]
    for i in prange(g.size):
        g[i] = _momentum(g[i], m[i], first, first_rest)


@host.Kernel
def _frozen_kernel(x, m, v, mean, rate, m_scale, v_scale, eps, decay, typical, most):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i] = _frozen(x[i], m[i], v[i], mean[i], rate, m_scale, v_scale, eps, decay, typical, most)


@host.Kernel
def _progress_kernel(message, anchor, x):  # type: ignore[no-untyped-def]
    for i in prange(message.size):
        message[i] = _progress(message[i], anchor[i], x[i])


@host.Kernel
def _outer_kernel(x, anchor, u, d, rate, inertia, direct, ahead, keep, keep_rest):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], anchor[i], u[i] = _outer(x[i], anchor[i], u[i], d[i], rate, inertia, direct, ahead, keep, keep_rest)


@host.Kernel
def _decayed_kernel(g, m, x, inertia, decay):  # type: ignore[no-untyped-def]
    for i in prange(g.size):
        g[i] = _decayed(g[i], m[i], x[i], inertia, decay)


@host.Kernel
def _sgd_kernel(x, m, mean, rate, ahead, behind):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i] = _sgd(x[i], m[i], mean[i], rate, ahead, behind)


@host.Kernel
def _sign_step_kernel(x, q, shrink, along, signed):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i] = _sign_step(x[i], q[i], shrink, along, signed)


@host.Kernel
def _local_kernel(x, m, u, v, g, first, first_rest, rate, v_scale, eps, shrink, typical, most):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i], u[i] = _local(
            x[i], m[i], u[i], v[i], g[i], first, first_rest, rate, v_scale, eps, shrink, typical, most
        )


@host.Kernel
def _mean_momentum_kernel(g, m, u, first, first_rest, rate, shrink, inverse):  # type: ignore[no-untyped-def]
    for i in prange(g.size):
        g[i] = _mean_momentum(g[i], m[i], u[i], first, first_rest, rate, shrink, inverse)


@host.Kernel
def _from_anchor_kernel(x, m, anchor, v, mean, length, v_scale, eps, kept, typical, most):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i], m[i] = _from_anchor(x[i], m[i], anchor[i], v[i], mean[i], length, v_scale, eps, kept, typical, most)


@host.Kernel
def _lamb_kernel(g, m, v, x, first, first_rest, second, second_rest, m_scale, v_scale, eps, decay):  # type: ignore[no-untyped-def]
    for i in prange(g.size):
        g[i], m[i], v[i] = _lamb(
            g[i], m[i], v[i], x[i], first, first_rest, second, second_rest, m_scale, v_scale, eps, decay
        )


@host.Kernel
def _frozen_lamb_kernel(  # type: ignore[no-untyped-def]
    mean, m, fresh, v, x, first, inverse, second, second_rest, m_scale, v_scale, eps, decay, typical
):
    for i in prange(mean.size):
        mean[i], m[i], fresh[i] = _frozen_lamb(
            mean[i], m[i], fresh[i], v[i], x[i], first, inverse, second, second_rest, m_scale, v_scale, eps, decay,
            typical,
        )  # fmt: skip


@host.Kernel
def _along_kernel(x, direction, rate):  # type: ignore[no-untyped-def]
    for i in prange(x.size):
        x[i] = _along(x[i], direction[i], rate)


class Update:
    """A formula, applied in place.

    Args:
        make: makes the formula for a square root.
        kernel: its loop over host memory.
        outputs: how many of the first arrays the formula changes.
        clips: whether ``make`` also takes a function that limits values.
    """

    def __init__(self, make: Callable[..., Any], kernel: host.Kernel, outputs: int, clips: bool = False) -> None:
        self._make, self._kernel, self._outputs, self._clips = make, kernel, outputs, clips

    def __call__(self, library: NumPy | Torch, arrays: tuple[Any, ...], numbers: tuple[float, ...] = ()) -> None:
        """Replace the first arrays by what the formula makes of the arrays and numbers. All arrays are of one size.

        On a GPU, float32 has a kernel, and other types are computed by expressions.
        """
        views = [view for view in map(library.host_view, arrays) if view is not None]
        if len(views) == len(arrays):
            self._kernel(*views, *map(np.float32, numbers))
            return
        on_gpu = [view for view in map(library.gpu_view, arrays) if view is not None]
        if len(on_gpu) == len(arrays):
            from . import cuda_updates

            cuda_updates.apply(self._make.__name__, library.stream(arrays[0]), on_gpu, numbers)
            return
        self._express(library, arrays, numbers)

    def _express(self, library: NumPy | Torch, arrays: tuple[Any, ...], numbers: tuple[float, ...]) -> None:
        functions = (library.sqrt, library.clip) if self._clips else (library.sqrt,)
        results = self._make(*functions)(*arrays, *map(library.number, numbers))
        results = results if isinstance(results, tuple) else (results,)
        changed = arrays[: self._outputs]
        kept = [library.copy(one) if any(one is array for array in changed) else one for one in results]
        for array, result in zip(changed, kept):
            array[...] = result


ADAM = Update(adam, _adam_kernel, 3)
MOMENTUM = Update(momentum, _momentum_kernel, 1)
FROZEN_ADAM = Update(frozen_adam, _frozen_kernel, 2, clips=True)
PROGRESS = Update(progress, _progress_kernel, 1)
OUTER = Update(outer, _outer_kernel, 3)
DECAYED_MOMENTUM = Update(decayed_momentum, _decayed_kernel, 1)
SGD = Update(sgd, _sgd_kernel, 2)
SIGN_STEP = Update(sign_step, _sign_step_kernel, 1)
LOCAL_ADAM = Update(local_adam, _local_kernel, 3, clips=True)
MEAN_MOMENTUM = Update(mean_momentum, _mean_momentum_kernel, 1)
FROM_ANCHOR = Update(from_anchor, _from_anchor_kernel, 2, clips=True)
LAMB_DIRECTION = Update(lamb_direction, _lamb_kernel, 3)
FROZEN_DIRECTION = Update(frozen_direction, _frozen_lamb_kernel, 3)
ALONG = Update(along, _along_kernel, 1)
