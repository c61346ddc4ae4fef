"""The values that describe a tensor. All frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

DeviceKind = Literal["cpu", "gpu"]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element of the element types that can be synchronised."""

ALIGN = 64
"""Parts of a tensor begin at multiples of this many elements, so that vector loads and sign words stay whole."""


@dataclass(frozen=True)
class TensorSpec:
    """The properties of a tensor on which the ranks must agree. ``dtype`` is None for an entry that is ``None``.

    Example:
        >>> espresso_mpi.TensorSpec("w", (3, 4), "float32").nbytes
        48
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    device: DeviceKind = "cpu"

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape) if self.dtype else 0

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the uncompressed tensor."""
        return self.size * (ITEMSIZE.get(self.dtype) or np.dtype(self.dtype).itemsize) if self.dtype else 0

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.dtype else "None"
