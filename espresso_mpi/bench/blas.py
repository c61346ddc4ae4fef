"""Keeps the matrix products of several ranks on one machine from fighting over its cores.

`espresso-mpi run` and `espresso-mpi lab` set `OMP_NUM_THREADS` before numpy is loaded. A job started by a
bare `mpirun` has numpy loaded by the time anyone asks, and each rank would then use every core, four ranks
four times over. OpenBLAS, which comes with numpy's wheels, can still be told.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_FUNCTIONS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def limit_threads(threads: int) -> bool:
    """Limits this process's matrix products to ``threads`` threads, unless the user has set a number.

    Returns False where the BLAS library is not an OpenBLAS that can be found: nothing was changed then.
    """
    if any(os.environ.get(name) for name in _VARIABLES):
        return True
    setters = [setter for path in _loaded_libraries() if (setter := _setter(path)) is not None]
    for setter in setters:
        setter(threads)
    return bool(setters)


def _loaded_libraries() -> set[str]:
    """Paths of the OpenBLAS libraries in this process; empty where the system does not list them."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return {path for line in lines if "openblas" in Path(path := line[line.find("/") :]).name}


def _setter(path: str) -> Callable[[int], Any] | None:
    """The library's function that sets the number of threads, or None."""
    library = ctypes.CDLL(path)
    for name in _FUNCTIONS:
        if hasattr(library, name):
            function = getattr(library, name)
            function.argtypes, function.restype = [ctypes.c_int], None
            return function
    return None
