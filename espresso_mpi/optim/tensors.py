"""Parameters of any framework as flat arrays, and the library that computes with them: numpy, CuPy or torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import buffers, device
from ..arrays.caller_streams import Flat
from ..errors import GradientError


@dataclass(frozen=True)
class Tensor:
    """One parameter: ``array`` is flat, over the caller's memory, and can be computed with."""

    adopted: buffers.Gradient
    library: NumPy | Torch
    array: Any

    @property
    def name(self) -> str:
        """Name of the parameter: the keys on the way to it."""
        return self.adopted.spec.name

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.adopted.spec.size


def tensors_of(params: Any) -> list[Tensor]:
    """The parameters in their order; None becomes an empty tensor, which no step changes."""
    return [tensor_of(name, value) for name, value in buffers.flatten(params)]


def tensor_of(name: str, value: Any) -> Tensor:
    adopted = buffers.adopt(name, value)
    if adopted.spec.dtype not in (None, "float32", "float64"):
        raise GradientError(
            f"{name}: got a parameter of type {adopted.spec.dtype}; expected float32 or float64; small steps are lost "
            f"in 16 bits, so update a float32 copy and round that"
        )
    library = library_of(name, value, adopted)
    return Tensor(adopted, library, library.flat(value, adopted))


def library_of(name: str, value: Any, adopted: buffers.Gradient) -> NumPy | Torch:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(value, torch.Tensor):
        return Torch(torch)
    if adopted.spec.device == "cpu":
        return NumPy(np)
    if cupy is None:
        raise GradientError(
            f"{name}: got a GPU array that is no torch tensor; expected one that can be computed with; import cupy, or "
            f"pass host arrays"
        )
    return NumPy(cupy)


def matched(tensors: list[Tensor], values: dict[str, Any]) -> dict[str, Any]:
    """The gradients by name, if they are those of the parameters."""
    names = [t.name for t in tensors]
    if set(values) != set(names):
        raise GradientError(
            f"grads: {difference(set(values), names)}; expected one for each parameter, None where there is none"
        )
    for tensor in tensors:
        value, spec = values[tensor.name], tensor.adopted.spec
        shape = None if value is None else tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
        if shape is not None and (spec.dtype is None or shape != spec.shape):
            expected = "None" if spec.dtype is None else f"shape {spec.shape}"
            raise GradientError(
                f"{tensor.name}: got a gradient of shape {shape}; expected {expected}, as its parameter"
            )
    return values


def message_of(tensor: Tensor) -> Any:
    """Zeros, float32, in the parameter's shape: what is synchronised. That of an empty tensor is not."""
    return tensor.library.zeros(tensor).reshape(tensor.adopted.spec.shape if tensor.size else (0,))


def as_before(owner: str, tensors: list[Tensor], known: Mapping[str, Any]) -> list[Tensor]:
    """The parameters, if they are those for which an optimizer has arrays.

    Args:
        known: an array of each parameter, by name.

    Raises:
        GradientError: other names, or another number of elements.
    """
    names = {tensor.name for tensor in tensors}
    if names != set(known):
        raise GradientError(f"{owner}: params {difference(names, known)}; expected the parameters of before")
    for tensor in tensors:
        before = math.prod(known[tensor.name].shape)
        if tensor.size != before:
            raise GradientError(
                f"{owner}: {tensor.name} has {tensor.size} elements; expected {before}, as before; make a new "
                f"optimizer for parameters of other sizes"
            )
    return tensors


def difference(names: set[str], expected: Iterable[str]) -> str:
    """What names lack, and what they have too much."""
    known = set(expected)
    missing, other = sorted(known - names), sorted(names - known)
    parts = [f"lacks {missing[0]!r} and {len(missing) - 1} more"] if missing else []
    parts += [f"has {other[0]!r} and {len(other) - 1} more that no parameter is named"] if other else []
    return ", ".join(parts)


def read(tensor: Tensor, value: Any) -> Any:
    """A gradient, flat in float64, where its parameter is."""
    return tensor.library.wide(tensor, value, _beside(tensor, value))


def native(tensor: Tensor, value: Any) -> Any:
    """A gradient, flat, where its parameter is: in its own type if the library has it, without a copy."""
    adopted = _beside(tensor, value)
    if adopted.spec.dtype in ("float32", "float64"):
        return tensor.library.native(tensor, value, adopted)
    return tensor.library.wide(tensor, value, adopted)


def _beside(tensor: Tensor, value: Any) -> buffers.Gradient:
    """The adopted gradient.

    Raises:
        GradientError: it is on a GPU, and its parameter is not.
    """
    adopted = buffers.adopt(tensor.name, value)
    if adopted.spec.device == "gpu" and tensor.adopted.spec.device == "cpu":
        raise GradientError(
            f"{tensor.name}: got a gradient on the GPU; expected cpu, as its parameter; move one of them"
        )
    return adopted


# --- the libraries that compute ---------------------------------------------------------------------------------------


class NumPy:
    """numpy, or CuPy, which has the same functions."""

    def __init__(self, module: Any) -> None:
        self._np = module

    def flat(self, value: Any, adopted: buffers.Gradient) -> Any:
        return self._np.asarray(adopted.array)

    def wide(self, tensor: Tensor, value: Any, adopted: buffers.Gradient) -> Any:
        return values_of(self._np, adopted)

    def native(self, tensor: Tensor, value: Any, adopted: buffers.Gradient) -> Any:
        return self._np.asarray(adopted.array)

    def zeros(self, tensor: Tensor) -> Any:
        return self._np.zeros(tensor.array.size, np.float32)

    def single(self, array: Any) -> Any:
        return array.astype(np.float32, copy=False)

    def double(self, array: Any) -> Any:
        return array.astype(np.float64, copy=False)

    @property
    def sqrt(self) -> Any:
        """The elementwise square root."""
        return self._np.sqrt

    @property
    def clip(self) -> Any:
        """Limits elements to a range; NaN stays."""
        return self._np.clip

    def host_view(self, array: Any) -> np.ndarray | None:
        """The array itself if it is in host memory."""
        return array if self._np is np else None

    def gpu_view(self, array: Any) -> Flat | None:
        """The array as a kernel takes it if it is float32 in the memory of a GPU."""
        if self._np is np or array.dtype != np.float32:
            return None
        return Flat(array.data.ptr, array.size, array.itemsize)

    def stream(self, array: Any) -> int:
        """The stream on which the library computes with an array on a GPU, as its address."""
        return device.stream_of(array)

    def number(self, value: float) -> Any:
        """A number of a formula: a float64 would make float64 of booleans."""
        return np.float32(value)

    def exponents(self, array: Any) -> Any:
        """The exponents of ``frexp``: integers."""
        return self._np.frexp(array)[1]

    def copy(self, array: Any) -> Any:
        """A new array of the same values."""
        return array.copy()

    def finite(self, array: Any) -> Any:
        """Whether no value is NaN or infinite: a boolean, which may still be queued on a GPU."""
        return self._np.isfinite(array).all()

    def norm(self, wide: Any) -> float:
        with np.errstate(over="ignore"):
            return math.sqrt(float((wide * wide).sum()))

    def to_host(self, array: Any) -> np.ndarray:
        return np.array(array) if self._np is np else self._np.asnumpy(array)

    def from_host(self, tensor: Tensor, array: np.ndarray) -> Any:
        return self._np.asarray(array)


class Torch:
    """torch, on the CPU and on the GPU."""

    def __init__(self, module: Any) -> None:
        self._torch = module

    def flat(self, value: Any, adopted: buffers.Gradient) -> Any:
        if adopted.source is not None:  # strided: a copy, which ``buffers.rebuild`` writes back
            return self._torch.as_tensor(adopted.array, device=value.device)
        return value.detach().view(-1)

    def wide(self, tensor: Tensor, value: Any, adopted: buffers.Gradient) -> Any:
        if not isinstance(value, self._torch.Tensor):
            if adopted.spec.device == "gpu":
                raise GradientError(
                    f"{tensor.name}: got a gradient of type {type(value).__name__}; expected a torch tensor or a host "
                    f"array for a torch parameter on the GPU; pass torch.as_tensor(x)"
                )
            value = self._torch.from_numpy(values_of(np, adopted))
        return value.detach().reshape(-1).to(tensor.array.device, self._torch.float64)

    def native(self, tensor: Tensor, value: Any, adopted: buffers.Gradient) -> Any:
        if not isinstance(value, self._torch.Tensor):
            return self.wide(tensor, value, adopted)
        return value.detach().reshape(-1).to(tensor.array.device)

    def zeros(self, tensor: Tensor) -> Any:
        return self._torch.zeros(tensor.array.numel(), dtype=self._torch.float32, device=tensor.array.device)

    def single(self, array: Any) -> Any:
        return array.to(self._torch.float32)

    def double(self, array: Any) -> Any:
        return array.to(self._torch.float64)

    @property
    def sqrt(self) -> Any:
        """The elementwise square root."""
        return self._torch.sqrt

    @property
    def clip(self) -> Any:
        """Limits elements to a range; NaN stays."""
        return self._torch.clamp

    def host_view(self, array: Any) -> np.ndarray | None:
        """The tensor's memory as an array of numpy if it is in host memory."""
        return array.numpy() if array.device.type == "cpu" else None

    def gpu_view(self, array: Any) -> Flat | None:
        """The tensor as a kernel takes it if it is float32 in the memory of a GPU of CUDA."""
        if array.device.type != "cuda" or array.dtype != self._torch.float32:
            return None
        return Flat(array.data_ptr(), array.numel(), array.element_size())

    def stream(self, array: Any) -> int:
        """The stream on which the library computes with an array on a GPU, as its address."""
        return device.stream_of(array)

    def number(self, value: float) -> Any:
        """A number of a formula."""
        return value

    def exponents(self, array: Any) -> Any:
        """The exponents of ``frexp``: integers."""
        return self._torch.frexp(array).exponent

    def copy(self, array: Any) -> Any:
        """A new tensor of the same values."""
        return array.clone()

    def finite(self, array: Any) -> Any:
        """Whether no value is NaN or infinite: a boolean, which may still be queued on a GPU."""
        return self._torch.isfinite(array).all()

    def norm(self, wide: Any) -> float:
        return math.sqrt(float((wide * wide).sum()))

    def to_host(self, array: Any) -> np.ndarray:
        return np.array(array.cpu().numpy())

    def from_host(self, tensor: Tensor, array: np.ndarray) -> Any:
        return self._torch.from_numpy(np.array(array)).to(tensor.array.device)


def computing(library: NumPy | Torch, *arrays: Any) -> tuple[NumPy | Torch, list[Any]]:
    """Arrays as numpy's if they are in host memory, and their library: its sums do not depend on the threads."""
    views = [view for view in map(library.host_view, arrays) if view is not None]
    return (NumPy(np), views) if len(views) == len(arrays) else (library, list(arrays))


def values_of(library: Any, adopted: buffers.Gradient) -> Any:
    """The values of an adopted array as float64, by numpy or CuPy."""
    array = library.asarray(adopted.array)
    if adopted.spec.dtype == "float16":
        array = array.view(np.float16)
    elif adopted.spec.dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
