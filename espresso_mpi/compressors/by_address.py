"""Kernels that compiled code calls by their address: what a method tells of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class HasAddress(Protocol):
    """What stays in memory as long as this exists."""

    @property
    def address(self) -> int:
        """Where it begins."""


class Entry(HasAddress, Protocol):
    """A kernel with the one signature that compiled code calls; see ``kernels.cpu.entries``.

    Its machine code is compiled, or loaded from disk, when its address is first asked for.
    """

    name: str


@dataclass(frozen=True, eq=False)
class KernelTable:
    """An array that kernels read: float32, contiguous."""

    array: np.ndarray

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


@dataclass(frozen=True)
class KernelCall:
    """A kernel and the parameters that a method passes to it.

    Attributes:
        entry: the kernel.
        parameters: numbers that float64 holds exactly, and arrays that the kernel reads.
        draws: whether it needs the key of the random bits.
        leading: bits of an element at the beginning of the payload that are final as soon as the element is encoded.
        grain: at whose multiples the elements of a payload may be cut, to be encoded or decoded part by part; 0: they
            may not be cut.
        calls: kernels that it calls. They get no key, state or scratch memory, and call none themselves.
        state: name of the state that it gets, as long as x, see ``Context.kept``; empty: none.
        scratch: bytes of scratch memory that it gets.
    """

    entry: Entry
    parameters: tuple[float | HasAddress, ...] = ()
    draws: bool = False
    grain: int = 0
    leading: int = 0
    calls: tuple[KernelCall, ...] = ()
    state: str = ""
    scratch: int = 0

    def __post_init__(self) -> None:
        for call in self.calls:
            if call.draws or call.calls or call.state or call.scratch:
                raise ValueError(f"{call.entry.name}: expected a kernel that needs no key, state or scratch memory")

    @property
    def passed(self) -> tuple[float | HasAddress, ...]:
        """What the kernel gets: its parameters, then of each kernel that it calls the address and the parameters.

        What has an address stands for it, which float64 holds exactly: those of processes are below 2⁴⁸.
        """
        found: list[float | HasAddress] = [*self.parameters]
        for call in self.calls:
            found += [call.entry, *call.parameters]
        return tuple(found)
