"""Keeps the matrix products of several ranks on one node from fighting over its cores.

`espresso-mpi run` and `espresso-mpi lab` set `OMP_NUM_THREADS` before numpy is loaded. A job started by a
bare `mpirun` has numpy loaded by the time anyone asks, and each rank would then use every core, four ranks
four times over. The library that numpy multiplies with can still be told.
"""

from __future__ import annotations

import os

from threadpoolctl import ThreadpoolController

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def limit_threads(threads: int) -> bool:
    """Limits this process's matrix products to ``threads`` threads, unless the user has set a number.

    Returns False where threadpoolctl knows no BLAS library in this process (such as Apple's Accelerate): nothing was
    changed then.
    """
    if any(os.environ.get(name) for name in _VARIABLES):
        return True
    libraries = ThreadpoolController().select(user_api="blas")
    libraries.limit(limits=threads)  # for good: only its use as a context manager would give them back
    return len(libraries) > 0
