"""What the CUDA kernels share: their registry, how they are launched, device functions.

Imported when the first GPU array appears and not before: ``numba.cuda`` takes 0.05 to 0.2 s. For the same reason each
method keeps its kernels in a file of their own in this folder.

The arithmetic is IEEE's and written out like that of the CPU kernels, so that both write the same bytes. The compiler
may fuse a product with the sum that follows, so no kernel holds one where that would round differently.

Numba reads memory 4 bytes at a time. The kernels therefore load four elements, a stride apart, before they use the
first: with fewer requests under way a GPU does not reach its memory's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
from numba import cuda
from numba.cuda import libdevice

from espresso_mpi.arrays import device
from espresso_mpi.compressors.limit import LIMIT
from espresso_mpi.files.compiled import cached
from espresso_mpi.files.sources import with_digest

from .launching import Launch

T = TypeVar("T")

THREADS = 256
"""Threads of a block."""

TILE = 4 * THREADS
"""Elements that a block takes at a time, four in each thread."""

LANES = 32
"""Threads of a warp."""

FULL = 0xFFFFFFFF
"""The mask of all lanes of a warp."""

STAGED = 2048
"""Elements of a block of a format that a warp can keep in shared memory: 8 KB."""

STAGED_THREADS = 128
"""Threads of a block whose warps do so."""

STAGE = STAGED_THREADS // LANES * STAGED
"""Float32 of shared memory for them: 32 KB, of the 48 KB that a block may have."""

_CACHED = 256
"""Elements of a block of a format that stay in the first cache, whatever the other warps read."""

KERNELS: list[Kernel] = []
"""Every kernel of the modules imported so far; a test compiles them all for several kinds of GPU."""


class Kernel:
    """A kernel with its signature, compiled for the current device when it is first launched, and kept on disk.

    Called with the number of blocks, the number of threads in each, and the arguments.

    Attributes:
        function: its source; signature: of its arguments.
        name: its module and its own name, with its variant.
        may_fuse: whether the compiler may fuse products with sums, because no CPU kernel has to write the same bytes.
    """

    def __init__(self, function: FunctionType, signature: str, variant: str, may_fuse: bool) -> None:
        self.function, self.signature, self.may_fuse = with_digest(function), signature, may_fuse
        self._launches: dict[int, Launch] = {}
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}{variant}"

    @cached_property
    def _compiled(self) -> Any:
        return cached(lambda cache: cuda.jit(self.signature, cache=cache)(self.function))

    def __call__(self, grid: int, threads: int, *args: Any) -> None:
        if device.simulated():
            self._compiled[grid, threads, device.stream()](*args)
            return
        number = device_number()
        launch = self._launches.get(number)
        if launch is None:
            launch = self._launches[number] = Launch(self._compiled, self.signature)
        launch(grid, threads, args)


def kernel(signature: str, may_fuse: bool = False, **variant: Any) -> Callable[[Any], Kernel]:
    """Decorator: register a kernel with this signature; ``may_fuse``: see ``Kernel``.

    ``variant`` names the constants of a kernel that is built several times: a constant costs nothing where a flag
    among the arguments would be a branch in the innermost loop.
    """
    label = "".join(f"[{key}={value}]" for key, value in variant.items())

    def decorate(function: Any) -> Kernel:
        made = Kernel(function, f"void({signature})", label, may_fuse)
        KERNELS.append(made)
        return made

    return decorate


def blocks(work: int, each: int, resident: int = 2048 // THREADS) -> int:
    """How many blocks share ``work`` units at ``each`` a block: at most ``resident`` on a multiprocessor.

    As many as that run at once; kernels loop over the rest, so that what they set up serves many units.
    """
    return max(1, min(-(-work // each), resident * _multiprocessors(device_number())))


def staging(count: int, block: int) -> tuple[bool, int, int]:
    """How warps take ``count`` blocks of a format whose elements they need twice.

    Returns:
        whether each warp keeps its block in shared memory; how many blocks of threads, and threads in each. Longer
        ones are read twice: more warps on a multiprocessor than these would push one another's data out of the caches.
    """
    staged = _CACHED < block <= STAGED
    threads = min(STAGED_THREADS, THREADS) if staged else THREADS
    resident = 6 if staged else 3 if block > STAGED else 2048 // threads
    return staged, blocks(count, threads // LANES, resident), threads


@lru_cache
def _multiprocessors(number: int) -> int:
    return int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


def device_number() -> int:
    """The current device, as a key for what is cached per device."""
    return int(cuda.get_current_device().id)


def scratch(name: Any, make: Callable[[], T]) -> T:
    """Memory for a kernel's own use, made once for each device and stream."""
    return device.per_stream((name, device_number()), make)


def sent(values: np.ndarray) -> Any:
    """A copy of an array on the device."""
    return cuda.to_device(values, stream=device.stream())


def event_counter() -> Any:
    """One int64 on the device for what a kernel counts, set to zero; to be read before there is another use of it."""
    found = scratch("counter", lambda: cuda.device_array(1, np.int64))
    device.copy_later(found, _ZERO)
    return found


def count_of(counter: Any) -> int:
    """What a kernel has counted; waits for the stream."""
    return int(device.to_host(counter)[0])


def cut_counter() -> Any:
    """Where a kernel counts the values that it cuts: on a session's stream its running total, else as above."""
    own = device.own_stream()
    return event_counter() if own is None else own.cuts


def cuts_of(counter: Any) -> int:
    """How many values were cut. On a session's stream 0, without a wait: the end of a call reads the total."""
    return count_of(counter) if device.own_stream() is None else 0


def uncounted() -> Any:
    """Where a kernel counts what nobody reads."""
    return scratch("uncounted", lambda: cuda.device_array(1, np.int64))


_ZERO = np.zeros(1, np.int64)


# --- bits and random bits ---------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def float_bits(x):  # type: ignore[no-untyped-def]
    """The 32 bits of a float32 as uint32."""
    return np.uint32(libdevice.float_as_int(x))


@cuda.jit(device=True)
def bits_float(bits):  # type: ignore[no-untyped-def]
    """The float32 that has these 32 bits."""
    return libdevice.int_as_float(np.int32(bits))


@cuda.jit(device=True)
def counter(index, low):  # type: ignore[no-untyped-def]
    """As ``host.counter``."""
    return np.uint32(np.uint32(index) * np.uint32(0x9E3779B9) + low)


@cuda.jit(device=True)
def uniform(at, high):  # type: ignore[no-untyped-def]
    """As ``host.uniform``, to the bit."""
    h = np.uint32((at ^ (at >> np.uint32(16)) ^ high) * np.uint32(0x7FEB352D))
    h = np.uint32((h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    return np.float32(np.int32(h >> np.uint32(8))) * np.float32(5.9604645e-08)


@cuda.jit(device=True)
def sanitise(value):  # type: ignore[no-untyped-def]
    """As ``host.sanitise``."""
    small = np.float32(LIMIT) if value > np.float32(LIMIT) else value
    small = np.float32(-LIMIT) if small < np.float32(-LIMIT) else small
    return small if value == value else np.float32(0.0)


@cuda.jit(device=True)
def over(value, divisor):  # type: ignore[no-untyped-def]
    """``value / divisor``, which is 1 in most launches."""
    return value if divisor == np.float32(1.0) else value / divisor


# --- warps ------------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def ballot(condition):  # type: ignore[no-untyped-def]
    """Bit l of the uint32 says whether the condition holds in lane l of this warp."""
    return np.uint32(cuda.ballot_sync(FULL, condition))


@cuda.jit(device=True)
def lanes_below(lane):  # type: ignore[no-untyped-def]
    """The mask of the lanes before this one."""
    return np.uint32((np.uint32(1) << np.uint32(lane)) - np.uint32(1))


@cuda.jit(device=True)
def warp_max(value):  # type: ignore[no-untyped-def]
    """The largest of the lanes' values, in every lane."""
    return half_warp_max(max(value, cuda.shfl_xor_sync(FULL, value, 16)))


@cuda.jit(device=True)
def half_warp_max(value):  # type: ignore[no-untyped-def]
    """The largest of the values of this half's lanes, in each of them."""
    value = max(value, cuda.shfl_xor_sync(FULL, value, 8))
    value = max(value, cuda.shfl_xor_sync(FULL, value, 4))
    value = max(value, cuda.shfl_xor_sync(FULL, value, 2))
    return max(value, cuda.shfl_xor_sync(FULL, value, 1))


@cuda.jit(device=True)
def warp_sum(value):  # type: ignore[no-untyped-def]
    """The sum of the lanes' values, in every lane: the upper half is folded onto the lower one five times."""
    value += cuda.shfl_xor_sync(FULL, value, 16)
    value += cuda.shfl_xor_sync(FULL, value, 8)
    value += cuda.shfl_xor_sync(FULL, value, 4)
    value += cuda.shfl_xor_sync(FULL, value, 2)
    return value + cuda.shfl_xor_sync(FULL, value, 1)


@cuda.jit(device=True)
def warp_prefix_sum(value, lane):  # type: ignore[no-untyped-def]
    """The sum of the values of this lane and those before it."""
    for distance in (1, 2, 4, 8, 16):
        below = cuda.shfl_up_sync(FULL, value, distance)
        if lane >= distance:
            value += below
    return value


@cuda.jit(device=True)
def block_max(tops, value):  # type: ignore[no-untyped-def]
    """The largest of all threads' values; ``tops``: shared memory, a place for each warp."""
    value = warp_max(value)
    cuda.syncthreads()  # all have read what was there before
    if cuda.laneid == 0:
        tops[np.uint32(cuda.threadIdx.x // 32)] = value
    cuda.syncthreads()
    for warp in range(np.int32(cuda.blockDim.x // 32)):
        value = max(value, tops[np.uint32(warp)])
    return value


# --- elements ---------------------------------------------------------------------------------------------------------


def make_fetch(keep: bool) -> Any:
    """A device function: an element of a block that ends at ``stop``, with its residual; 0 beyond the end."""

    @cuda.jit(device=True)
    def fetch(x, residual, i, stop):  # type: ignore[no-untyped-def]
        if i >= stop:
            return np.float32(0)
        return sanitise(residual[i] + x[i] if keep else x[i])

    return fetch


def make_stage(staged: bool) -> Any:
    """A device function: keep four values, 32 apart, in shared memory; nothing where blocks are read twice."""

    @cuda.jit(device=True)
    def stage(memory, at, p, q, r, s):  # type: ignore[no-untyped-def]
        if staged:
            memory[at], memory[at + 32], memory[at + 64], memory[at + 96] = p, q, r, s

    return stage


# --- a kernel that several methods use --------------------------------------------------------------------------------


@kernel("float32[::1]")
def clear(out):  # type: ignore[no-untyped-def]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = np.float32(0)


def zero(out: Any) -> None:
    """Fill a float32 array with zeros."""
    clear(blocks(out.size, TILE), THREADS, out)
