"""Rows of several ranks become one by other operators than sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from espresso_mpi.arrays.device import device_of


def combine_rows(out: Any, rows: Any, own: int, combine: Callable[[Any, Any], None] | None) -> None:
    """Reduce ``rows``, with ``out`` in place of row ``own``, into ``out``. The rows do not change.

    Args:
        rows: one of each rank, all as long as ``out``.
        combine: ``combine(row, total)`` adds a row to a total, in host memory; None: the elementwise maximum.
    """
    if combine is None:
        _largest(out, rows, own)
        return
    others = [row for r, row in enumerate(rows) if r != own]
    if own == 0 or len(others) == 1 or out.dtype.kind in "biu":  # the same in every order
        for row in others:
            combine(row, out)
        return
    total = rows[0].copy()
    for r in range(1, len(rows)):
        combine(out if r == own else rows[r], total)
    np.copyto(out, total)


def _largest(out: Any, rows: Any, own: int) -> None:
    if device_of(out) == "gpu":
        from . import cuda_sums

        cuda_sums.max_rows(out, rows, own)
        return
    for r in range(len(rows)):
        if r != own:
            np.maximum(out, rows[r], out=out)  # summaries are small
