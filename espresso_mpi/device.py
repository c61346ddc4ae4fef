"""Host and GPU memory behind one small set of functions.

An array is a numpy array (host) or a numba device array (GPU).

Nothing of CUDA is imported before a GPU array appears.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .types import DeviceKind


def device_of(array: Any) -> DeviceKind:
    """Where an array lives."""
    return "cpu" if isinstance(array, np.ndarray) else "gpu"


def address(array: Any) -> int:
    """Where an array begins in its memory."""
    interface = array.__array_interface__ if isinstance(array, np.ndarray) else array.__cuda_array_interface__
    return interface["data"][0]


def empty(size: int, dtype: Any, device: DeviceKind) -> Any:
    """A flat uninitialised array."""
    if device == "cpu":
        return np.empty(size, dtype)
    from numba import cuda

    return cuda.device_array(size, dtype)


def zeros(size: int, dtype: Any, device: DeviceKind) -> Any:
    """A flat array of zeros."""
    if device == "cpu":
        return np.zeros(size, dtype)
    from numba import cuda

    return cuda.to_device(np.zeros(size, dtype))


def pinned(size: int) -> np.ndarray:
    """Host bytes that a GPU copies from and to at full speed."""
    from numba import cuda

    return cuda.pinned_array(size, np.uint8)


def copy(target: Any, source: Any) -> None:
    """Copy a flat array onto another of the same size and type, between any two places."""
    if target.size == 0:
        return
    if device_of(target) == "gpu":
        target.copy_to_device(source)
    elif device_of(source) == "gpu":
        source.copy_to_host(target)
    else:
        target[...] = source


def synchronize() -> None:
    """Wait until the GPU has finished what this process queued."""
    from numba import cuda

    cuda.synchronize()
