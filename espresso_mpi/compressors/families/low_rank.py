"""What ``powersgd`` and ``acpsgd`` share: their class, and the choice between CPU and GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from espresso_mpi.arrays import device

from ..base import Compressor
from ..by_address import Entry, KernelCall
from ..checks import check_positive_int
from ..context import Context
from ..kernels.cpu import host, lowrank, lowrank_entries
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

    def _kernel(self, entry: Entry, n: int, encodes: bool = False, **needs: Any) -> KernelCall | None:
        """A kernel of n elements; ``needs``: of ``KernelCall``."""
        if not n:
            return None
        m = self.matrix(n)
        numbers, scratch = (*m, self.header(n) // 4), lowrank_entries.scratch_of(m, n) if encodes else 0
        return KernelCall(entry, numbers, scratch=scratch, **needs)


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
    kept, how = _values(x, residual, how, context)
    stride = lowrank.filled_up(m.cols)
    wide = q if stride == m.cols else context.scratch("wide", m.groups * stride, np.float32, q)
    lowrank.project_rows(kept, x, how, q, wide, out, *m, subtract and residual is not None)


def project_columns(
    x: Any, residual: Any, p: Any, m: Matrix, out: Any, how: int, subtract: bool, context: Context
) -> None:
    """``Q = Mᵀ P`` into ``out``; otherwise as ``project_rows``."""
    if device.device_of(x) == "gpu":
        from ..kernels.cuda import lowrank as cuda_lowrank

        cuda_lowrank.project_columns(x, residual, p, m, out, how, subtract, context)
        return
    kept, how = _values(x, residual, how, context)
    parts = context.scratch("parts", -(-m.rows // CHUNK) * m.groups * m.cols, np.float32, x)
    lowrank.project_columns(kept, x, how, p, parts, out, *m, subtract and residual is not None)


def outer(p: np.ndarray, q: np.ndarray, m: Matrix, out: np.ndarray, add: bool) -> None:
    """Write ``P Qᵀ`` into ``out``, or add it, on the CPU."""
    lowrank.outer(out, p, q, *m, add, np.float32(1))


def _values(x: np.ndarray, residual: np.ndarray | None, how: int, context: Context) -> tuple[np.ndarray, int]:
    """Where the values to be compressed are or will be, and what has to be done for it."""
    if residual is not None:
        return residual, how
    return context.scratch("values", x.size, np.float32, x), lowrank.COPY


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
