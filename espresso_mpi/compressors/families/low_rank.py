"""What ``powersgd`` and ``acpsgd`` share: their class, and the choice between CPU and GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from espresso_mpi.arrays import device

from ..base import Compressor
from ..checks import check_positive_int
from ..context import Context
from ..kernels.cpu import host
from ..kernels.cpu.lowrank import (
    add_chunks,
    filled_rows,
    outer,
    project_all_rows,
    project_chunks,
    rows_at_once,
    top_of,
    values,
)
from ..kernels.cpu.matrices import CHUNK, LANES, LARGEST_RANK, Matrix, side
from ..kernels.cpu.orthonormal import orthonormalise

Self = TypeVar("Self", bound="LowRank")


@dataclass(frozen=True)
class LowRank(Compressor):
    """A matrix as the product of two thin factors.

    Args:
        rank: vectors in each factor.
        cols: values in a row of the matrix. With 0, or where the factors would be no smaller than the values, the
            matrix is nearly square whatever the tensor's shape.
    """

    rank: int = 4
    cols: int = 0
    common = True
    whole = True

    def __post_init__(self) -> None:
        check_positive_int(self.name, "rank", self.rank, high=LARGEST_RANK)
        check_positive_int(self.name, "cols", self.cols, low=0)

    @property
    def element(self) -> str | None:
        return "float32"

    def shaped(self: Self, shape: tuple[int, ...]) -> Self:
        keep = self.cols or len(shape) < 2
        return self if keep else replace(self, cols=math.prod(shape[1:]))

    def matrix(self, n: int) -> Matrix:
        """How n values are seen."""
        return _matrix_of(n, self.rank, self.cols)


@lru_cache(maxsize=4096)
def _matrix_of(n: int, rank: int, cols: int) -> Matrix:
    """Every step asks for it several times for each tensor."""
    own, nearly_square = _cut(n, rank, cols), _cut(n, rank, side(n))
    return own if own.rank * (own.rows + own.cols) < n else nearly_square


def _cut(n: int, rank: int, cols: int) -> Matrix:
    rows = -(-n // cols) if cols else n
    return Matrix(rows, cols or n, min(rank, rows, cols or n))


# --- factors ----------------------------------------------------------------------------------------------------------


def orthonormal(name: str, source: Any, m: Matrix, length: int, fill: bool, context: Context) -> Any:
    """The vectors of a factor made orthonormal, in scratch memory that has room for whole groups (zeros).

    Args:
        source: ``rank`` vectors of ``length``, any values.
        fill: put random vectors, the same on all ranks, in the place of those that depend on the ones before; else
            zeros.
    """
    low, high = host.key_words(context.shared)
    target = context.scratch(name, m.groups * length, np.float32, source)
    if device.device_of(source) == "gpu":
        from ..kernels.cuda import lowrank as cuda_lowrank

        cuda_lowrank.orthonormalise(source, target, m.rank, length, fill, low, high)
    else:
        lanes = context.scratch("lanes", LANES, np.float64, source)
        orthonormalise(source, target, m.rank, length, fill, low, high, lanes)
    return target


# --- what the methods call --------------------------------------------------------------------------------------------


def project_rows(
    x: Any, residual: Any, q: Any, m: Matrix, out: Any, how: int, subtract: bool, context: Context
) -> None:
    """``P = M Q`` into ``out``, where M is ``residual`` after adding x (``how`` ADD) or as it is (READY), or x alone.

    Args:
        q: from ``orthonormal``.
        subtract: leave ``M - P Qᵀ`` in the residual, if there is one.
    """
    if device.device_of(x) == "gpu":
        from ..kernels.cuda import lowrank as cuda_lowrank

        cuda_lowrank.project_rows(x, residual, q, m, out, how, subtract)
        return
    kept, how = values(x, residual, how, context)
    subtract = subtract and residual is not None
    wide, stride = filled_rows(q, m, context)
    top = float(top_of(wide, 0, 0, wide.size, 1))
    block = rows_at_once(m.cols)
    project_all_rows(kept, x, how, m.cols, q, wide, stride, top, m.rank, out, m.rows, block, subtract)


def project_columns(
    x: Any, residual: Any, p: Any, m: Matrix, out: Any, how: int, subtract: bool, context: Context
) -> None:
    """``Q = Mᵀ P`` into ``out``; otherwise as ``project_rows``."""
    if device.device_of(x) == "gpu":
        from ..kernels.cuda import lowrank as cuda_lowrank

        cuda_lowrank.project_columns(x, residual, p, m, out, how, subtract, context)
        return
    kept, how = values(x, residual, how, context)
    size = m.groups * m.cols
    parts = context.scratch("parts", -(-m.rows // CHUNK) * size, np.float32, x)
    project_chunks(kept, x, how, m.cols, p, m.rows, m.rank, parts, size)
    add_chunks(parts, size, out)
    if subtract and residual is not None:
        outer(p, out, m, residual, True, -1.0)


def write_header(factor: Any, header: Any, start: int = 0, first: float = 0.0) -> None:
    """Copy a factor to ``start`` in a header that begins with ``first`` if that is before it; the rest is zeros."""
    if device.device_of(header) == "gpu":
        from ..kernels.cuda import lowrank as cuda_lowrank

        cuda_lowrank.write_header(factor, header, start, first)
        return
    header.fill(0)
    header[0] = first
    header[start : start + factor.size] = factor


def clear(values: Any) -> None:
    """Fill with zeros."""
    if device.device_of(values) == "gpu":
        from ..kernels.cuda import gpu

        gpu.zero(values)
    else:
        values.fill(0)


def keep(factor: Any, kept: Any) -> None:
    """Copy a factor from a payload into the state of a method, without what is not finite."""
    if device.device_of(kept) == "gpu":
        from ..kernels.cuda import lowrank as cuda_lowrank

        cuda_lowrank.keep(factor, kept)
    else:
        host.sanitise_into(kept, factor)
