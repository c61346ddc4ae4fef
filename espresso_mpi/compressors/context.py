"""What a compressor is given besides its arrays: keys, scratch memory, memory of its own, the agreed summary."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..arrays import device
from ..arrays.workspace import Workspace


@dataclass(frozen=True)
class Summary:
    """A float32 array of ``size`` elements that the ranks reduce with ``operator`` before they encode.

    With "max", no element may be -0 or NaN: ranks need not agree on which of two equal elements is the larger.

    Example:
        >>> espresso_mpi.compressors.get("thc").summary(4096)
        Summary(size=4, operator='max')
    """

    size: int
    operator: Literal["sum", "max"]


@dataclass(frozen=True)
class Journey:
    """What becomes of a tensor between a gradient on every rank and the result, for methods with an error bound.

    Attributes:
        encodes: how often its route encodes.
        ranks: how many there are.
        excess: by how much the mean over a node may exceed each of its ranks' values; above 1 on uneven nodes.
        total: the result is the sum over the ranks instead of their mean.
        dtype: element type of the tensor.

    Example:
        >>> from espresso_mpi.compressors.context import Journey
        >>> bound = espresso_mpi.compressors.get("bound:abs=0.01")
        >>> bound.largest_error(1.0, 10.0, Journey(encodes=2, ranks=4)) < 0.01
        True
    """

    encodes: int = 1
    ranks: int = 1
    excess: float = 1.0
    total: bool = False
    dtype: str = "float32"


@dataclass
class Context:
    """The circumstances of one encode or decode. Everything has a default, for a call by hand.

    Attributes:
        key: 64-bit seed of this rank, tensor and step: for stochastic rounding.
        shared: 64-bit seed that is the same on all ranks: for positions and rotations that they have in common.
        step: training step, counted from 0.
        ranks: how many payloads will be averaged.
        workspace: scratch memory that outlives the call; its content does not.
        state: what the method keeps from step to step for this tensor on this rank, saved with checkpoints: float32
            arrays by name. Use ``kept``.
        summary: the agreed summary, float32; None if the ranks do not agree on one (then encode makes its own).
        share: which share of the tensor's elements this part of it has.
        divisor: for a decode on a GPU by a method that ``divides``: what the result is divided by.
        cut: written by encode: how many values were beyond what the payload's format can hold.

    Example:
        >>> context = espresso_mpi.compressors.Context(key=1)  # the same key draws the same random bits
        >>> int8 = espresso_mpi.compressors.get("int8:rounding=stochastic")
        >>> payload = np.empty(int8.nbytes(100), np.uint8)
        >>> int8.encode(np.ones(100, np.float32), payload, context=context)
    """

    key: int = 0
    shared: int = 0
    step: int = 0
    ranks: int = 1
    workspace: Workspace = field(default_factory=Workspace)
    state: MutableMapping[str, Any] = field(default_factory=dict)
    summary: Any = None
    share: float = 1.0
    divisor: float = 1.0
    cut: int = 0

    def scratch(self, name: str, size: int, dtype: Any, like: Any) -> Any:
        """A flat array of ``size`` elements on the device of ``like``, with any content; one of each name at a time."""
        return self.workspace.array(f"compressor-{name}", size, dtype, device.device_of(like))

    def kept(self, name: str, size: int, like: Any) -> Any:
        """A float32 array that keeps its content from step to step, on the device of ``like``.

        Zeros at first, and again when its size changes.
        """
        where = device.device_of(like)
        array = self.state.get(name)
        if array is None or array.size != size:
            array = self.state[name] = device.zeros(size, np.float32, where)
        elif device.device_of(array) != where:
            moved = device.empty(size, np.float32, where)
            device.copy(moved, array)
            array = self.state[name] = moved
        return array
