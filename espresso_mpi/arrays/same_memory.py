"""Arrays of other libraries as numpy arrays over the same memory, as quickly as calls that come again need it.

Nothing is remembered of an array: address, shape, strides and type are read anew each time. So memory that was freed
and has another tensor now, and a tensor that was resized, are what they are. The numpy array refers to the memory, and
torch refuses to resize what it has given to numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

_PLAIN = 0x1 | 0x100
"""numpy's flags of an array that is C-contiguous and aligned."""

_NAMES: dict[Any, str] = {}
"""A cache: torch makes the name of a type at every access, which is slow."""


def dtype_name(tensor: Any) -> str:
    """The name of a torch tensor's element type."""
    dtype = tensor.dtype
    return _NAMES.get(dtype) or _NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))


def is_torch_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch, and of none of its subclasses, which may mean something else by their memory."""
    cls = type(value)
    return cls.__name__ == "Tensor" and cls.__module__ == "torch"


def of_torch(tensor: Any) -> np.ndarray | None:
    """The memory of a tensor, bfloat16 as int16; None if it is not aligned host memory in C order, or has a gradient's
    history.
    """
    if not tensor.is_cpu:
        return None
    try:
        bits = tensor.view(sys.modules["torch"].int16) if dtype_name(tensor) == "bfloat16" else tensor
        array: np.ndarray = bits.numpy()
    except (TypeError, RuntimeError):  # it requires a gradient, is sparse, or is to be conjugated
        return None
    return array if array.flags.num & _PLAIN == _PLAIN else None


def of_any(value: Any) -> np.ndarray | None:
    """The memory of an array as numpy's or torch's, or of an object with DLPack; None where this takes a copy."""
    if type(value) is np.ndarray:
        return value
    if is_torch_tensor(value):
        return of_torch(value)
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return None
    if type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):  # immutable
        return None
    try:
        return np.from_dlpack(value) if int(value.__dlpack_device__()[0]) == 1 else None
    except (TypeError, RuntimeError, BufferError):  # numpy has no such type
        return None


def version_of(tensor: Any) -> tuple[Callable[[], int] | None, bool]:
    """What reads the counter of in-place changes of a torch tensor, and whether torch alone leads to its memory.

    None where there is no counter (inference mode), and where the tensor is a part of its storage: the parts of a
    storage share one counter, so it also counts changes of the others. Memory that torch has from, or has given to,
    numpy and others cannot be resized.
    """
    storage = tensor.untyped_storage()
    if tensor.is_inference() or storage.nbytes() != tensor.numel() * tensor.element_size():
        return None, False
    return partial(getattr, tensor, "_version"), storage.resizable()


def is_alone(holder: Any) -> bool:
    """Whether a torch tensor, and the memory that it has for itself, can be reached through ``holder.result`` only.

    False as well where this torch does not tell.
    """
    storages = getattr(sys.modules["torch"]._C, "_storage_Use_Count", None)
    if storages is None or not hasattr(holder.result, "_use_count") or holder.result._use_count() != 1:
        return False
    if holder.result.is_shared() or storages(holder.result.untyped_storage()._cdata) != _ONE_STORAGE:
        return False
    return sys.getrefcount(holder.result) == _ONE_HOLDER


_ONE_STORAGE = 2
"""References to a storage: the tensor's, and that of the Python object through which one asks."""

_HOLDER = SimpleNamespace(result=object())
_ONE_HOLDER = sys.getrefcount(_HOLDER.result)
"""References to what one holder holds, as this interpreter counts them while one asks."""
