"""numba's CUDA simulator with what it lacks: warp operations, exact fused products, bit casts, and a fast scheduler.

Import this before numba: the simulator is chosen by an environment variable.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda, typeof, types
from numba.core.sigutils import normalize_signature
from numba.cuda import libdevice
from numba.cuda.simulator import api, kernelapi
from numba.cuda.simulator import kernel as simulated
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray, FakeWithinKernelCUDAArray
from numba.cuda.simulator.kernelapi import FakeCUDAModule, FakeCUDAShared
from numba.np.numpy_support import from_dtype

from espresso_mpi.compressors.kernels.cuda import gpu

THREADS = 64


def install() -> None:
    """Complete the simulator, and make the launches small: every GPU thread is a greenlet."""
    warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)  # unsigned arithmetic is meant to wrap
    for name in ("ballot_sync", "shfl_xor_sync", "shfl_up_sync", "syncwarp", "syncthreads_count", "fma"):
        setattr(FakeCUDAModule, name, globals()[f"_{name}"])
    FakeCUDAShared.array = _shared_array
    libdevice.float_as_int = lambda x: np.float32(x).view(np.int32)
    libdevice.int_as_float = lambda x: np.int32(x).view(np.float32)
    cuda.event = _Event
    FakeCUDAArray.__getattr__, FakeCUDAArray.flags = _attribute, property(_flags)
    FakeCUDAArray.squeeze = lambda array, axis=None: FakeCUDAArray(array._ary.squeeze(axis))
    simulated.swapped_cuda_module = _swapped
    simulated.FakeWithinKernelCUDAArray = _Array
    simulated.FakeCUDAKernel.__call__ = _direct(simulated.FakeCUDAKernel.__call__)
    simulated.BlockManager = _Block
    kernelapi.threading = SimpleNamespace(current_thread=getcurrent)
    gpu.Kernel.__call__ = _checked(gpu.Kernel.__call__)
    gpu.THREADS, gpu.TILE = THREADS, 4 * THREADS
    gpu.blocks.__defaults__ = (2,)  # fewer than there is work for, so that loops over tiles are run
    gpu.device_number = lambda: 0
    gpu._multiprocessors = lambda device: 1


_ATTRIBUTES = frozenset({"dtype", "ndim", "size", "strides"})
"""What numba's arrays of a GPU have, besides what the simulator defines by itself."""


def _attribute(array, name):  # type: ignore[no-untyped-def]
    """The simulator would give all that numpy's arrays have, which an array of a GPU lacks."""
    if name in _ATTRIBUTES:
        return getattr(array._ary, name)
    raise AttributeError(f"an array of a GPU has no attribute {name!r}")


def _flags(array):  # type: ignore[no-untyped-def]
    """A dictionary of two keys, as numba's arrays of a GPU have it."""
    return {name: array._ary.flags[name] for name in ("C_CONTIGUOUS", "F_CONTIGUOUS")}


def _checked(call):  # type: ignore[no-untyped-def]
    """A GPU reads what a kernel's signature says, whatever it is given: look here whether they agree."""

    def checked(kernel, grid, threads, *args):  # type: ignore[no-untyped-def]
        expected, _ = normalize_signature(kernel.signature)
        got = tuple(_type_of(arg) for arg in args)
        if got != expected:
            raise TypeError(f"{kernel.name}: launched with {got}, but its signature is {expected}")
        call(kernel, grid, threads, *args)

    return checked


def _type_of(arg):  # type: ignore[no-untyped-def]
    if isinstance(arg, FakeCUDAArray):
        return types.Array(from_dtype(arg.dtype), arg.ndim, "C" if arg.is_c_contiguous() else "A")
    return typeof(arg)


@contextmanager
def _swapped(function, module):  # type: ignore[no-untyped-def]
    """Give a kernel and the device functions that it calls the simulated ``cuda``, for the whole launch.

    The simulator's own version swaps it around each call of a device function, under the feet of the other threads.
    """
    places = [space for space in (function.__globals__, *_modules(len(sys.modules))) if space.get("cuda") is cuda]
    for space in places:
        space["cuda"] = module
    try:
        yield
    finally:
        for space in places:
            space["cuda"] = cuda


@lru_cache(1)
def _modules(imported: int) -> list[dict[str, Any]]:
    """The names of the modules of the package that have ``cuda``.

    Args:
        imported: number of modules so far: when there are more, they are looked up again.
    """
    ours = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("espresso_mpi.")]
    return [space for space in ours if space.get("cuda") is cuda]


def _direct(call):  # type: ignore[no-untyped-def]
    """Within a launch, which has done the simulator's work: it takes longer than most device functions do."""

    def called(kernel, *args):  # type: ignore[no-untyped-def]
        if kernel._device and kernel.fn.__globals__.get("cuda") is not cuda:
            return kernel.fn(*args)
        return call(kernel, *args)

    return called


class _Array(FakeWithinKernelCUDAArray):
    """An array as a kernel sees it. The simulator's own lists numpy's attributes for each ``size``."""

    size = property(lambda array: array._item._ary.size)
    shape = property(lambda array: array._item._ary.shape)
    dtype = property(lambda array: array._item._ary.dtype)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = self._item._ary[index]
        return _Array(FakeCUDAArray(found)) if isinstance(found, np.ndarray) else found

    def __setitem__(self, index, value) -> None:  # type: ignore[no-untyped-def]
        self._item._ary[index] = value


# --- the scheduler ----------------------------------------------------------------------------------------------------


class _Thread(greenlet):
    """One GPU thread: runs from barrier to barrier, while the block waits for it."""

    def __init__(self, work, block, thread, slots) -> None:  # type: ignore[no-untyped-def]
        super().__init__(work)
        self.blockIdx, self.threadIdx = (SimpleNamespace(x=at, y=0, z=0) for at in (block, thread))
        self.thread_id, self.slots, self.turn = thread, slots, 0

    def syncthreads(self) -> None:
        self.parent.switch()


class _Block:
    """Stands for the simulator's BlockManager, whose GPU threads are threads of Python: a hundred times slower."""

    def __init__(self, function, grid, threads, debug) -> None:  # type: ignore[no-untyped-def]
        self._function, self._threads = function, threads[0]

    def run(self, place, *args) -> None:  # type: ignore[no-untyped-def]
        slots = ([None] * self._threads, [None] * self._threads)
        work = partial(self._function, *args)
        alive = [_Thread(work, place[0], number, slots) for number in range(self._threads)]
        while alive:
            for thread in alive:
                thread.switch()
            alive = [thread for thread in alive if not thread.dead]


# --- what the simulator's `cuda` lacks --------------------------------------------------------------------------------


def _lanes(value):  # type: ignore[no-untyped-def]
    """What the lanes of this thread's warp hand in, and the number of this lane.

    One barrier is enough: a lane that hands in the value after the next one has seen the others read this one.
    """
    thread = getcurrent()
    thread.turn = 1 - thread.turn
    mine = thread.slots[thread.turn]
    mine[thread.thread_id] = value
    thread.syncthreads()
    first, lane = divmod(thread.thread_id, 32)
    return mine[32 * first : 32 * first + 32], lane


def _ballot_sync(self, mask, predicate):  # type: ignore[no-untyped-def]
    values, _ = _lanes(bool(predicate))
    return np.uint32(sum(1 << lane for lane in range(32) if values[lane])).view(np.int32)


def _shfl_xor_sync(self, mask, value, distance):  # type: ignore[no-untyped-def]
    values, lane = _lanes(value)
    return values[lane ^ distance]


def _shfl_up_sync(self, mask, value, distance):  # type: ignore[no-untyped-def]
    values, lane = _lanes(value)
    return values[lane - distance if lane >= distance else lane]


def _syncwarp(self):  # type: ignore[no-untyped-def]
    _lanes(None)


def _syncthreads_count(self, predicate):  # type: ignore[no-untyped-def]
    """As ``_lanes``, over the whole block."""
    thread = getcurrent()
    thread.turn = 1 - thread.turn
    thread.slots[thread.turn][thread.thread_id] = bool(predicate)
    thread.syncthreads()
    return sum(thread.slots[thread.turn])


def _shared_array(self, shape, dtype):  # type: ignore[no-untyped-def]
    """One array for each line of source that asks, as the simulator's own, which takes 0.3 ms to find that line."""
    caller = sys._getframe(1)
    return self._allocations.setdefault((caller.f_code, caller.f_lineno), np.empty(shape, dtype))


class _Event(api.Event):
    """Nothing is late in the simulator."""

    def __init__(self, timing: bool = True) -> None:
        super().__init__()

    def query(self) -> bool:
        return True


_fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
_fmaf.argtypes, _fmaf.restype = 3 * [ctypes.c_float], ctypes.c_float


def _fma(self, a, b, c):  # type: ignore[no-untyped-def]
    return np.float32(_fmaf(a, b, c))


def main(wanted: list[str]) -> None:
    """Print what the simulated GPU does differently, as JSON: a list of problems for each name.

    Args:
        wanted: compressors' specs; a name alone stands for its examples as well; ``collectives``; or ``optimizers``.
            After ``--quick`` only for those examples that take another branch in a kernel.
    """
    install()
    quick = wanted[:1] == ["--quick"]
    json.dump({what: list(_problems(what, quick)) for what in wanted[quick:]}, sys.stdout)


def _problems(what: str, quick: bool) -> Iterator[str]:
    import cuda_twins
    import law_tools

    if what == "collectives":
        for n in (0, 1, 65, 600):
            yield from cuda_twins.collective_problems(n)
        return
    if what == "optimizers":
        for n in (0, 1, 600):
            yield from cuda_twins.update_problems(n)
        return
    specs = law_tools.specs_of(what.partition(":")[0])
    cases = {s: cuda_twins.FEWER for s in specs if not quick or law_tools.takes_another_branch(s)}
    cases = {what: cuda_twins.FEW} if ":" in what else cases | {what: cuda_twins.FEW}
    for spec, inputs in cases.items():
        yield from cuda_twins.compressor_problems(spec, inputs)


if __name__ == "__main__":
    main(sys.argv[1:])
