"""Adopts arrays of every element type that MPI has, not of gradients' types only."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import GradientError
from ..types import ITEMSIZE, TensorSpec
from . import buffers
from .buffers import Gradient
from .same_memory import dtype_name, is_torch_tensor, version_of

_KINDS = "biufc"
_NAMES = {np.dtype(code).name for code in np.typecodes["All"] if np.dtype(code).kind in _KINDS}


def adopt_any(name: str, value: Any, written: bool = True) -> Gradient:
    """As ``buffers.adopt``; also integers, bool and complex numbers.

    Args:
        written: whether the result goes there; otherwise it may be read-only.

    Raises:
        GradientError: as ``buffers.adopt``; the array is None.
    """
    if value is None:
        raise GradientError(f"{name}: got None; expected an array (numpy, CuPy, torch, JAX, or with DLPack)")
    if not written and isinstance(value, np.ndarray) and not value.flags.writeable:
        return _only_read(adopt_any(name, np.empty_like(value, shape=(0,))), value)
    if not isinstance(value, np.ndarray) and not hasattr(value, "dtype"):
        return buffers.adopt(name, value)
    dtype = dtype_name(value) if is_torch_tensor(value) else str(value.dtype).removeprefix("torch.")
    if dtype in ITEMSIZE:
        return buffers.adopt(name, value)
    if isinstance(value, np.ndarray):
        return _from_host(name, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.device.type == "cpu":
        version, whole = version_of(value)
        return _from_host(name, value.detach().numpy())._replace(version=version, whole=whole)
    if hasattr(value, "__cuda_array_interface__") and dtype in _NAMES:
        owned = value.detach() if hasattr(value, "detach") else value
        return buffers.flat_on_gpu(TensorSpec(name, tuple(value.shape), dtype, "gpu"), owned, np.dtype(dtype).itemsize)
    raise GradientError(
        f"{name}: got elements of type {dtype} in {type(value).__name__}; expected {', '.join(ITEMSIZE)}, or a numpy, "
        f"CuPy or torch array of other numbers; pass a copy, y = numpy.array(x), and use that y"
    )


def _from_host(name: str, array: np.ndarray) -> Gradient:
    if array.dtype.kind not in _KINDS or not array.dtype.isnative or array.dtype.itemsize > 16:
        raise GradientError(
            f"{name}: got elements of type {array.dtype}; expected numbers or bool, in native byte order"
        )
    if not array.flags.writeable:
        raise GradientError(
            f"{name}: got a read-only array; expected a writable one; pass x = numpy.array(...), a copy"
        )
    return buffers.flat_over(TensorSpec(name, array.shape, array.dtype.name), np.asarray(array))


def _only_read(form: Gradient, array: np.ndarray) -> Gradient:
    """Flat over a read-only array; ``form``: as which its elements are handled."""
    flat = np.ascontiguousarray(array).reshape(-1).view(form.array.dtype)
    return form._replace(spec=replace(form.spec, shape=array.shape), array=flat, owner=None)


def empty_like(value: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the library, type and device of another one; of numpy for libraries whose arrays are immutable."""
    if hasattr(value, "new_empty"):  # torch
        return value.new_empty(shape)
    if isinstance(value, np.ndarray) or not hasattr(value, "__cuda_array_interface__"):
        return np.empty(shape, value.dtype)
    return sys.modules[type(value).__module__.split(".")[0]].empty(shape, value.dtype)
