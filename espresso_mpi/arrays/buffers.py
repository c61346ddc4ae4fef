"""Adopts foreign arrays: only this file and ``same_memory`` see what the caller's framework made.

numpy, CuPy, torch (CPU and CUDA), JAX, and anything with DLPack or the CUDA array interface become flat arrays over the
*same memory*, plus a description. No framework is imported here: its arrays bring it along.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import GradientError
from ..types import ITEMSIZE, TensorSpec
from .device import begin_of, current_gpu, stream_of
from .same_memory import dtype_name, is_torch_tensor, of_torch, version_of

_spec = lru_cache(maxsize=1 << 16)(TensorSpec)
"""Cached descriptions: equal arrays get the same object, so that comparisons are fast."""

_SUPPORTED = ", ".join(ITEMSIZE)
_NAMES = {np.dtype(name): name for name in ("float32", "float64", "float16")}
"""A cache: numpy computes the name of a type at every access, which is slow."""


_OWN = 0x1 | 0x4 | 0x100 | 0x400
"""numpy's flags of an array that is C-contiguous, owns its memory, is aligned and writable."""


class Gradient(NamedTuple):
    """One adopted array.

    Attributes:
        spec: its description.
        array: flat, over the caller's memory; 16-bit types as their bits (uint16). A copy if the array is immutable or
            strided.
        rebuild: for an immutable array: makes a new foreign array of ``array``.
        source: for a strided array: the array itself.
        write_back: for a strided array: copies the result to ``source``.
        version: reads torch's counter of in-place changes, if it counts changes of this memory only. It does not count
            writes of this library.
        whole: whether it is a torch tensor whose memory is accessible through torch only.
        owner: the caller's array if it owns its memory. Two different owners share no memory.
        stream: on a GPU, the stream on which the caller last used the array, as its address.
        start: where the caller's array begins, if it is aligned host memory in C order, and may share memory; else 0.
    """

    spec: TensorSpec
    array: Any
    rebuild: Callable[[], Any] | None = None
    source: Any = None
    write_back: Callable[[], None] | None = None
    version: Callable[[], int] | None = None
    whole: bool = False
    owner: Any = None
    stream: int | None = None
    start: int = 0

    @property
    def steady(self) -> bool:
        """Whether ``array`` is the caller's aligned memory, whose address is all that is new when it comes again."""
        return self.owner is not None or self.start > 0


# --- the containers ---------------------------------------------------------------------------------------------------


def flatten(grads: Any) -> list[tuple[str, Any]]:
    """The arrays of a nested list, tuple or dict with their names: the keys on the way, joined by dots.

    Raises:
        GradientError: two arrays have the same name, or a dict key is not a string or a number.
    """
    if type(grads) is np.ndarray:
        return [("grads", grads)]
    found = list(_walk("", grads))
    if len({name for name, _ in found}) < len(found):
        twice = [name for name, count in Counter(name for name, _ in found).items() if count > 1]
        raise GradientError(
            f"grads: two arrays are named {twice[0]!r}; a key with a dot clashes with a nested key; rename one"
        )
    return found


def _walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield prefix or "grads", value
        return
    for key, item in items:
        if not isinstance(key, (str, int)):
            raise GradientError(f"grads: got a {type(key).__name__} as a key; expected text or a whole number")
        name = f"{prefix}.{key}" if prefix else str(key)
        if type(item) is np.ndarray:  # most are: a generator for each would cost more than the rest
            yield name, item
        else:
            yield from _walk(name, item)


def rebuild(grads: Any, gradients: list[Gradient]) -> Any:
    """``grads`` itself if all arrays were updated in place; else the same containers with new arrays where needed.

    The results of strided arrays are written back.
    """
    others = [g for g in gradients if not g.steady]  # the rest is memory which the result is in
    if not others:
        return grads
    for gradient in others:
        if gradient.write_back is not None:
            gradient.write_back()
    if all(g.rebuild is None for g in others):
        return grads
    pairs = zip(gradients, _walk("", grads))
    return replaced(grads, (g.rebuild() if g.rebuild else value for g, (_, value) in pairs))


def replaced(value: Any, leaves: Iterator[Any]) -> Any:
    """The same containers with other arrays, in the order of ``flatten``."""
    if isinstance(value, Mapping):
        new = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        new.update({key: replaced(item, leaves) for key, item in value.items()})
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, leaves) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(item, leaves) for item in value)
    return next(leaves)


def streams_of(gradients: Iterable[Gradient]) -> list[int]:
    """The streams of the caller's on which arrays on a GPU were last used."""
    return [gradient.stream for gradient in gradients if gradient.stream is not None]


# --- the arrays -------------------------------------------------------------------------------------------------------


def adopt(name: str, value: Any) -> Gradient:
    """A flat array over the memory of ``value``, which may be None.

    A strided array is copied, and gets the result when the call ends, see ``Gradient``.

    Raises:
        GradientError: ``value`` is no array, has an unsupported element type, is read-only, has elements that share
            memory, or is strided on a GPU and not of torch.
    """
    if not name.isascii():
        _require_text(name)
    if type(value) is np.ndarray and value.flags.num & _OWN == _OWN:  # of most calls with many tensors, all
        known = _NAMES.get(value.dtype)
        if known is not None:
            flat = value.ravel()  # a view
            array = flat.view(np.uint16) if known == "float16" else flat
            return Gradient(_spec(name, value.shape, known), array, None, None, None, None, False, value)
    if value is None:
        nothing = np.empty(0, np.float32)
        return Gradient(TensorSpec(name, (), None), nothing, owner=nothing)
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    if is_torch_tensor(value):
        return _from_plain_torch(name, value) or _from_torch(name, value)
    if _comes_from(value, "torch") and hasattr(value, "layout"):
        return _from_torch(name, value)
    if _comes_from(value, "jax", "jaxlib"):
        if any(cls.__name__ == "Tracer" for cls in type(value).__mro__):
            raise GradientError(
                f"{name}: got an array that JAX traces, without values; inside jit use espresso_mpi.jax.sync(grads)"
            )
        return _from_jax(name, value)
    if hasattr(value, "__cuda_array_interface__"):
        return _from_cuda(name, value, value.shape, str(value.dtype))
    if hasattr(value, "__dlpack__"):
        return _from_dlpack(name, value)
    raise GradientError(
        f"{name}: got {type(value).__name__}{_meant(value)}; expected an array (numpy, CuPy, torch, JAX, or with "
        f"DLPack or the CUDA array interface) or None"
    )


def adopt_gradient(name: str, value: Any) -> Gradient:
    """As ``adopt``; weights, which somebody may pass in the place of their gradients, are refused."""
    if type(value) is not np.ndarray and type(value).__name__ == "Parameter" and value.requires_grad:
        raise GradientError(
            f"{name}: got a Parameter, which holds weights; expected its gradient: pass p.grad; to average weights, "
            f"pass p.detach()"
        )
    return adopt(name, value)


def _meant(value: Any) -> str:
    """What was probably meant by an object of torch that is no array."""
    if _comes_from(value, "torch") and hasattr(value, "named_parameters"):
        return (
            " (a model: pass {n: p.grad for n, p in model.named_parameters()}, or use espresso_mpi.torch.GradientSync)"
        )
    if hasattr(value, "param_groups"):
        return " (an optimizer: pass the gradients, p.grad of its parameters, before its step)"
    if isinstance(value, Iterator):
        return " (an iterator: pass a list, such as [p.grad for p in model.parameters()])"
    return ""


def _require_text(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise GradientError(f"grads: the name {name!r} is no valid Unicode; rename the tensor") from None


def _comes_from(value: Any, *modules: str) -> bool:
    return any(cls.__module__.split(".")[0] in modules for cls in type(value).__mro__)


def _from_numpy(name: str, array: np.ndarray, rebuild: Callable[[], Any] | None = None) -> Gradient:
    plain = type(array) is np.ndarray
    if not plain and isinstance(array, np.ma.MaskedArray):
        raise GradientError(
            f"{name}: got a masked array, whose mask would be lost; pass array.data, or x = array.filled(0) and "
            f"use that x"
        )
    dtype = _NAMES.get(array.dtype) or array.dtype.name
    if dtype not in ITEMSIZE or not array.dtype.isnative:
        raise GradientError(
            f"{name}: got elements of type {array.dtype}; expected one of {_SUPPORTED}; pass x = array.astype(...) and "
            f"use that x, which gets the mean"
        )
    if not array.flags.writeable:
        raise GradientError(
            f"{name}: got a read-only array; expected a writable one; pass x = numpy.array(...), a copy, and use that "
            f"x, which gets the mean"
        )
    own = array if plain else np.asarray(array)
    return flat_over(_spec(name, array.shape, dtype), own.view(np.uint16) if ITEMSIZE[dtype] == 2 else own, rebuild)


def flat_over(
    spec: TensorSpec,
    array: np.ndarray,
    rebuild: Callable[[], Any] | None = None,
    version: Callable[[], int] | None = None,
    whole: bool = False,
) -> Gradient:
    """Flat over host memory; over a copy of it in C order where it is strided, since ranks may differ in strides."""
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        start = begin_of(flat) if rebuild is None and array.size and array.flags.aligned else 0
        return Gradient(spec, flat, rebuild, version=version, whole=whole, start=start)
    _require_apart(spec.name, array.shape, array.strides, array.itemsize)
    copied = np.ascontiguousarray(array)
    return Gradient(spec, copied.reshape(-1), rebuild, array, partial(np.copyto, array, copied), version, whole)


def _require_apart(name: str, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Refuse memory in which several elements share an address.

    Rare strides for which this is hard to decide are refused as well.
    """
    reach = itemsize
    for stride, length in sorted((abs(stride), length) for length, stride in zip(shape, strides) if length > 1):
        if stride < reach:
            raise GradientError(
                f"{name}: got an expanded or overlapping array (shape {tuple(shape)}, strides in bytes "
                f"{tuple(strides)}); expected a place in memory for each element; pass a copy, y = numpy.array(x) or "
                f"x.clone(memory_format=torch.contiguous_format), and use that y, which gets the mean"
            )
        reach += (length - 1) * stride


def _from_plain_torch(name: str, tensor: Any) -> Gradient | None:
    """As ``_from_torch``, of what most tensors are; None: it is something else, or cannot be adopted."""
    version, whole = version_of(tensor) if tensor.layout is sys.modules["torch"].strided else (None, False)
    dtype, array = dtype_name(tensor), of_torch(tensor)
    if array is None or not array.size or dtype not in ITEMSIZE:
        return None
    flat = array.reshape(-1)
    bits = flat.view(np.uint16) if ITEMSIZE[dtype] == 2 else flat
    return Gradient(
        _spec(name, array.shape, dtype), bits, None, None, None, version, whole, None, None, tensor.data_ptr()
    )


def _from_torch(name: str, tensor: Any) -> Gradient:
    torch = sys.modules["torch"]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if hasattr(tensor, "to_local"):
        raise GradientError(
            f"{name}: got a {type(tensor).__name__}, whose parts lie on several ranks; expected a plain tensor; pass "
            f"y = x.to_local() where every rank has a replica, or average it by its own process group"
        )
    if tensor.layout != torch.strided:
        raise GradientError(
            f"{name}: got a sparse tensor ({tensor.layout}); expected a dense one; make the layer with "
            f"sparse=False (as torch.nn.Embedding has it), or the gradient dense before: p.grad = p.grad.to_dense()"
        )
    if dtype not in ITEMSIZE:
        raise GradientError(
            f"{name}: got elements of type {dtype}; expected one of {_SUPPORTED}; pass y = x.to(...) and use that y, "
            f"which gets the mean"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise GradientError(
            f"{name}: got a tensor on {tensor.device}; expected cpu or cuda; pass y = x.cpu() and copy the mean "
            f"back after the call: x.copy_(y)"
        )
    version, whole = version_of(tensor)
    tensor = tensor.detach()
    bits = tensor.view(torch.int16) if ITEMSIZE[dtype] == 2 else tensor
    if tensor.device.type == "cuda":
        return _from_torch_cuda(name, bits, dtype)._replace(version=version, whole=whole)
    array = bits.numpy().view(np.uint16) if ITEMSIZE[dtype] == 2 else bits.numpy()
    return flat_over(_spec(name, tuple(tensor.shape), dtype), array, version=version, whole=whole)


def _from_torch_cuda(name: str, bits: Any, dtype: str) -> Gradient:
    """On the GPU, strided memory by torch's own copies."""
    shape, size = tuple(bits.shape), bits.element_size()
    if bits.is_contiguous():
        return _from_cuda(name, bits, shape, dtype)
    _require_apart(name, shape, [stride * size for stride in bits.stride()], size)
    copied = bits.contiguous()

    def write_back() -> None:
        bits.data.copy_(copied)  # through .data: it is not the caller's change, so its counter stays
        sys.modules["torch"].cuda.current_stream(bits.device).synchronize()  # that of the engine's thread

    return _from_cuda(name, copied, shape, dtype)._replace(source=bits, write_back=write_back)


def _from_jax(name: str, array: Any) -> Gradient:
    """A copy on the host; the result goes back to the array's own device and sharding as a new array."""
    jax = sys.modules["jax"]
    host = np.array(array)
    return _from_numpy(name, host, lambda: jax.device_put(host, array.sharding))


def _from_cuda(name: str, array: Any, shape: tuple[int, ...], dtype: str) -> Gradient:
    if dtype not in ITEMSIZE:
        raise GradientError(
            f"{name}: got elements of type {dtype}; expected one of {_SUPPORTED}; pass y = x.astype(...) and use that "
            f"y, which gets the mean"
        )
    return flat_on_gpu(_spec(name, tuple(shape), dtype, "gpu"), array, ITEMSIZE[dtype])


def flat_on_gpu(spec: TensorSpec, array: Any, itemsize: int) -> Gradient:
    """A flat numba device array over the same GPU memory; 16-bit floating-point numbers as their bits."""
    from numba import cuda

    name, own, current = spec.name, _gpu_of(array), current_gpu()
    if own is not None and own != current:
        raise GradientError(
            f"{name}: got a tensor on GPU {own}; expected GPU {current}, the one that this process works on; give each "
            f"rank one GPU by CUDA_VISIBLE_DEVICES, or call numba.cuda.select_device({own}) before anything uses a GPU"
        )
    interface = array.__cuda_array_interface__
    if interface["data"][1]:
        raise GradientError(
            f"{name}: got a read-only GPU array; expected a writable one; pass y = x.copy() and use that y, which gets "
            f"the mean"
        )
    if interface.get("strides") is not None and not _packed(interface, itemsize):
        raise GradientError(
            f"{name}: got a strided GPU array; expected C-contiguous memory; pass y = cupy.ascontiguousarray(x) and "
            f"copy the mean back after the call: x[...] = y"
        )
    if spec.size == 0:
        return Gradient(spec, np.empty(0, np.float32))
    flat = cuda.as_cuda_array(
        _Flat(array, spec.size, "<u2" if ITEMSIZE.get(spec.dtype or "") == 2 else interface["typestr"])
    )
    return Gradient(spec, flat, stream=stream_of(array))


def _gpu_of(array: Any) -> int | None:
    """The number of the GPU that holds an array; None if the array does not tell."""
    if hasattr(array, "gpu_data"):  # numba's
        return int(array.gpu_data.context.device.id)
    if not hasattr(array, "__dlpack_device__"):
        return None
    kind, number = array.__dlpack_device__()
    return int(number) if int(kind) == 2 else None  # 2: CUDA; memory of kind 13, managed, is on no one GPU


class _Flat:
    """A flat view of a foreign GPU array, in the only terms that all libraries share.

    It names no stream: numba would queue copies of the array there, and not with the kernels that they belong to.
    """

    def __init__(self, owner: Any, size: int, typestr: str) -> None:
        self._owner = owner
        interface = dict(owner.__cuda_array_interface__)
        self.__cuda_array_interface__ = {
            **interface,
            "shape": (size,),
            "strides": None,
            "typestr": typestr,
            "stream": None,
        }


def _packed(interface: Mapping[str, Any], itemsize: int) -> bool:
    expected = itemsize
    for length, stride in zip(reversed(interface["shape"]), reversed(interface["strides"])):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _from_dlpack(name: str, value: Any) -> Gradient:
    """Host memory by numpy; GPU memory by CuPy, which a GPU array without the CUDA array interface needs."""
    kind = int(value.__dlpack_device__()[0])
    if kind == 1:
        return _from_numpy(name, np.from_dlpack(value))
    cupy = sys.modules.get("cupy")
    if kind != 2 or cupy is None:
        raise GradientError(
            f"{name}: got DLPack memory of device type {kind}; expected CPU (1), or CUDA (2) with CuPy imported"
        )
    array = cupy.from_dlpack(value)
    return _from_cuda(name, array, array.shape, str(array.dtype))
