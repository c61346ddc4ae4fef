"""numba's CUDA simulator with what it lacks: warp operations, exact fused products, bit casts, and a fast scheduler.

Import this before numba: the simulator is chosen by an environment variable.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import threading
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
from numba import cuda, typeof, types
from numba.core.sigutils import normalize_signature
from numba.cuda import libdevice
from numba.cuda.simulator import kernel as simulated
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from numba.cuda.simulator.kernelapi import FakeCUDAModule, FakeCUDAShared
from numba.np.numpy_support import from_dtype

from espresso_mpi.compressors.kernels.cuda import gpu

THREADS = 64


def install() -> None:
    """Complete the simulator, and make the launches small: every GPU thread is a Python thread."""
    warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)  # unsigned arithmetic is meant to wrap
    for name in ("ballot_sync", "shfl_xor_sync", "shfl_up_sync", "syncwarp", "fma"):
        setattr(FakeCUDAModule, name, globals()[f"_{name}"])
    FakeCUDAShared.array = _shared_array
    libdevice.float_as_int = lambda x: np.float32(x).view(np.int32)
    libdevice.int_as_float = lambda x: np.int32(x).view(np.float32)
    simulated.swapped_cuda_module = _swapped
    simulated.BlockManager = _Block
    gpu.Kernel.__call__ = _checked(gpu.Kernel.__call__)
    gpu.THREADS, gpu.TILE = THREADS, 4 * THREADS
    gpu.blocks.__defaults__ = (2,)  # fewer than there is work for, so that loops over tiles are run
    gpu.device_number = lambda: 0
    gpu._multiprocessors = lambda device: 1


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
    ours = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("espresso_mpi.")]
    places = [space for space in (function.__globals__, *ours) if space.get("cuda") is cuda]
    for space in places:
        space["cuda"] = module
    try:
        yield
    finally:
        for space in places:
            space["cuda"] = cuda


# --- the scheduler ----------------------------------------------------------------------------------------------------


class _Worker(threading.Thread):
    """Runs one GPU thread after another, from barrier to barrier, only while the block waits for it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._go, self._back = threading.Lock(), threading.Lock()  # signals: held until given
        self._go.acquire()
        self._back.acquire()
        self.start()

    def assign(self, work, block, thread, slots) -> None:  # type: ignore[no-untyped-def]
        self.blockIdx, self.threadIdx = (SimpleNamespace(x=at, y=0, z=0) for at in (block, thread))
        self.thread_id, self.slots, self.turn = thread, slots, 0
        self._work, self.done, self.error = work, False, None

    def advance(self) -> None:
        """Let it run to its next barrier or its end."""
        self._go.release()
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def syncthreads(self) -> None:
        self._back.release()
        self._go.acquire()

    def run(self) -> None:
        while True:
            self._go.acquire()
            try:
                self._work()
            except Exception as error:
                self.error = error
            self.done = True
            self._back.release()


_WORKERS: list[_Worker] = []


class _Block:
    """Stands for the simulator's BlockManager, which polls its threads and is a hundred times slower."""

    def __init__(self, function, grid, threads, debug) -> None:  # type: ignore[no-untyped-def]
        self._function, self._threads = function, threads[0]

    def run(self, place, *args) -> None:  # type: ignore[no-untyped-def]
        while len(_WORKERS) < self._threads:
            _WORKERS.append(_Worker())
        slots = ([None] * self._threads, [None] * self._threads)
        alive = _WORKERS[: self._threads]
        for number, worker in enumerate(alive):
            worker.assign(lambda: self._function(*args), place[0], number, slots)
        while alive:
            for worker in alive:
                worker.advance()
            alive = [worker for worker in alive if not worker.done]


# --- what the simulator's `cuda` lacks --------------------------------------------------------------------------------


def _lanes(value):  # type: ignore[no-untyped-def]
    """What the lanes of this thread's warp hand in, and the number of this lane.

    One barrier is enough: a lane that hands in the value after the next one has seen the others read this one.
    """
    thread = threading.current_thread()
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


def _shared_array(self, shape, dtype):  # type: ignore[no-untyped-def]
    """One array for each line of source that asks, as the simulator's own, which takes 0.3 ms to find that line."""
    caller = sys._getframe(1)
    return self._allocations.setdefault((caller.f_code, caller.f_lineno), np.empty(shape, dtype))


_fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
_fmaf.argtypes, _fmaf.restype = 3 * [ctypes.c_float], ctypes.c_float


def _fma(self, a, b, c):  # type: ignore[no-untyped-def]
    return np.float32(_fmaf(a, b, c))


def main(what: str) -> None:
    """Exit with a list of what the simulated GPU does differently, if anything.

    Args:
        what: a compressor's spelling; its name alone stands for its examples as well; or ``collectives``.
    """
    install()
    import cuda_twins
    import law_tools

    if what == "collectives":
        problems = [problem for n in (0, 1, 65, 600) for problem in cuda_twins.collective_problems(n)]
    else:
        cases = dict.fromkeys(law_tools.spellings_of(what.partition(":")[0]), cuda_twins.FEWER)
        cases = {what: cuda_twins.FEW} if ":" in what else cases | {what: cuda_twins.FEW}
        problems = [problem for each in cases.items() for problem in cuda_twins.compressor_problems(*each)]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main(sys.argv[1])
