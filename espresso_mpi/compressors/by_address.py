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
        draws: whether it needs the key of the random bits of its rank.
        leading: bits of an element at the beginning of the payload that are final as soon as the element is encoded.
        grain: at whose multiples the elements of a payload may be cut, to be encoded or decoded part by part; 0: they
            may not be cut.
        calls: kernels that it calls. They get no key, state or scratch memory, and call none themselves.
        state: name of the state that it gets, as long as x, see ``Context.kept``; empty: none.
        shares: whether it needs the key that all ranks share in place of its rank's.
        states: names and sizes of states that it gets in place of such a one; before the first call, they are zeros.
        summary: elements of the summary that it makes or reads, see ``Compressor.summary``.
        scratch: bytes of scratch memory that it gets.
        needs_context: whether it gets ``Context.ranks`` and ``Context.share`` before its parameters.

    With ``summary`` or ``states``, the kernel gets the address of a list of addresses in place of that of a state: of
    the summary, if there is one, and of each of the states.
    """

    entry: Entry
    parameters: tuple[float | HasAddress, ...] = ()
    draws: bool = False
    grain: int = 0
    leading: int = 0
    calls: tuple[KernelCall, ...] = ()
    state: str = ""
    shares: bool = False
    states: tuple[tuple[str, int], ...] = ()
    summary: int = 0
    scratch: int = 0
    needs_context: bool = False

    def __post_init__(self) -> None:
        if (self.state and self.listed) or (self.draws and self.shares):
            raise ValueError(f"{self.entry.name}: expected one state or a list of addresses, and one key")
        for call in self.calls:
            if not call.self_contained or call.calls:
                raise ValueError(f"{call.entry.name}: expected a kernel that needs nothing but parameters")

    @property
    def self_contained(self) -> bool:
        """Whether the kernel needs no key, state, summary, scratch memory or context."""
        needs = (self.draws, self.shares, self.state, self.states, self.summary, self.scratch, self.needs_context)
        return not any(needs)

    @property
    def listed(self) -> bool:
        """Whether the kernel gets a list of addresses."""
        return bool(self.states or self.summary)

    @property
    def passed(self) -> tuple[float | HasAddress, ...]:
        """What the kernel gets: its parameters, then of each kernel that it calls the address and the parameters.

        What has an address stands for it, which float64 holds exactly: those of processes are below 2⁴⁸.
        """
        found: list[float | HasAddress] = [*self.parameters]
        for call in self.calls:
            found += [call.entry, *call.parameters]
        return tuple(found)
