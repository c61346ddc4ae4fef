"""The C interface of XLA's foreign functions, as far as a handler in Python needs it.

The structures are those of ``xla/ffi/api/c_api.h`` in the jaxlib package. ``register`` checks that jaxlib has them in
this layout. What lives here: ctypes only. May import: JAX.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import jax

MAJOR, MINOR = 0, 3
"""The version of the interface that the structures below belong to."""

_METADATA, _INTERNAL = 1, 13  # a type of extension, and a code of errors


class _Version(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32), ("state_type", c_int64)]


class _Extension(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("kind", c_int), ("next", c_void_p), ("metadata", c_void_p)]


class _Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("extension", c_void_p), ("version", _Version), ("internal", c_void_p),
        ("error_create", c_void_p),
    ]  # fmt: skip


class _ErrorArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int)]


class _Buffers(ctypes.Structure):  # arguments, and results
    _fields_ = [
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", c_void_p),
        ("items", c_void_p),
    ]  # fmt: skip


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", c_void_p),
        ("names", c_void_p), ("items", c_void_p),
    ]  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p)]  # and shape


class _Scalar(ctypes.Structure):
    _fields_ = [("dtype", c_int), ("value", ctypes.POINTER(c_int64))]


class _Frame(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("extension", c_void_p), ("api", ctypes.POINTER(_Api)), ("context", c_void_p),
        ("stage", c_int), ("args", _Buffers), ("rets", _Buffers), ("attrs", _Attributes),
    ]  # fmt: skip


_METADATA_SIZE = _Metadata.traits.offset + ctypes.sizeof(c_uint32)
_Handler = ctypes.CFUNCTYPE(c_void_p, c_uint64)
_ErrorCreate = ctypes.CFUNCTYPE(c_void_p, ctypes.POINTER(_ErrorArgs))


class Call(NamedTuple):
    """One call by a program.

    Attributes:
        number: its only attribute.
        args, rets: addresses of the arguments and of the results, tokens among them.
    """

    number: int
    args: list[int]
    rets: list[int]


_registered: list[Any] = []
"""Handlers: XLA holds their addresses until the process ends."""


def register(target: str, execute: Callable[[Call], None]) -> str | None:
    """Make ``execute`` the foreign function ``target`` of programs on the CPU.

    An exception of ``execute`` becomes XLA's error, with its text.

    Returns:
        None, or in words why this jaxlib cannot call it.
    """
    unfit: list[str] = []
    seen: list[bool] = []

    def handle(address: int) -> int | None:
        try:
            words = _Words.from_address(address)[:]
            if words[_EXTENSION]:
                seen.append(True)
                unfit.extend(_described(_Frame.from_address(address)))
                return None
            execute(_call(words))
        except BaseException as error:  # an exception must not leave a callback of C
            return _error(_Frame.from_address(address), error)
        return None

    handler = _Handler(handle)
    _registered.append(handler)
    address = ctypes.cast(handler, c_void_p).value
    try:
        jax.local_devices(backend="cpu")  # registers at once; else jaxlib would wait until a program is compiled
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(address), platform="cpu")
    except Exception as error:  # each version has its own
        return " and ".join(unfit) or f"{type(error).__name__}: {error}"
    return " and ".join(unfit) or (None if seen else "the handler was not asked for its version")


def _described(frame: Any) -> list[str]:
    """Tell XLA this handler's version; returns what does not fit."""
    extension = _Extension.from_address(frame.extension)
    sizes = {"call frame": (frame.struct_size, ctypes.sizeof(_Frame))}
    if extension.kind == _METADATA:
        metadata = _Metadata.from_address(extension.metadata)
        sizes["metadata"] = (metadata.struct_size, _METADATA_SIZE)
        if metadata.struct_size == _METADATA_SIZE:
            metadata.version.major, metadata.version.minor, metadata.traits = MAJOR, MINOR, 0
    unfit = [f"its {what} has {got} bytes, not {size}" for what, (got, size) in sizes.items() if got != size]
    if not unfit and frame.api and frame.api.contents.version.major != MAJOR:
        unfit = [f"its version is {frame.api.contents.version.major}, not {MAJOR}"]
    return unfit


_WORD = ctypes.sizeof(c_uint64)
_Words = c_uint64 * (ctypes.sizeof(_Frame) // _WORD)
_EXTENSION, _ARGS, _RETS, _ATTRS = (
    getattr(_Frame, name).offset // _WORD for name in ("extension", "args", "rets", "attrs")
)
_SIZE, _ITEMS = _Buffers.size.offset // _WORD, _Buffers.items.offset // _WORD
_PARTS = {_ARGS: _Buffers, _RETS: _Buffers, _ATTRS: _Attributes}


def _call(words: list[int]) -> Call:
    """A call, from the words of its frame: reading a structure field by field takes five times as long."""
    for at, part in _PARTS.items():
        if words[at] != ctypes.sizeof(part):
            raise RuntimeError(
                f"foreign-function interface: a {part.__name__} has {words[at]} bytes; expected "
                f"{ctypes.sizeof(part)}, as in version {MAJOR}.{MINOR}; use another jaxlib"
            )
    (attribute,) = _pointers(words, _ATTRS, _Attributes.items.offset // _WORD)
    number = _Scalar.from_address(attribute).value.contents.value
    return Call(number, _addresses(words, _ARGS), _addresses(words, _RETS))


def _pointers(words: list[int], part: int, items: int) -> list[int]:
    count = words[part + _SIZE]
    return (c_uint64 * count).from_address(words[part + items])[:] if count else []


def _addresses(words: list[int], part: int) -> list[int]:
    at = _Buffer.data.offset
    return [c_uint64.from_address(pointer + at).value for pointer in _pointers(words, part, _ITEMS)]


def _error(frame: Any, error: BaseException) -> int | None:
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace").replace(b"\0", b"?")
    create = _ErrorCreate(frame.api.contents.error_create)
    made: int | None = create(_ErrorArgs(ctypes.sizeof(_ErrorArgs), None, text, _INTERNAL))
    return made
