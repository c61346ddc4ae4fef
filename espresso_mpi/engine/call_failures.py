"""The part of a ``Negotiation`` that fails calls, on all ranks alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np

from ..collectives.messages.part_sizes import size_error
from ..collectives.messages.transport import Transport
from ..errors import EspressoError
from .announced_sizes import AnnouncedSizes
from .calls import PendingCall
from .diagnostics import CallKey, Content, conflict_error, described, problem_error

_FEW = 8
"""Bits that are found one by one, which is quicker than by numpy."""


class CallFailures:
    """See ``Negotiation``, which sets the attributes."""

    declared: dict[CallKey, deque[PendingCall]]
    contents: list[Content]
    bad: dict[int, dict[int, dict[str, str]]]
    sizes: AnnouncedSizes
    _transport: Transport
    _finish: Callable[[PendingCall], None]
    _failed_early: dict[CallKey, deque[EspressoError]]
    _bits: dict[CallKey, int]
    _ambiguous: int

    def next_of(self, key: CallKey) -> PendingCall:
        """Remove and return the first declared call of a key."""
        calls = self.declared[key]
        call = calls.popleft()
        if not calls:  # every round iterates over the keys
            del self.declared[key]
        return call

    def _fail_broken(self, notes: Sequence[tuple[int, Any]], masks: list[int]) -> bool:
        """Fail the calls that one rank could not make, on all ranks."""
        said: dict[CallKey, list[tuple[int, Any]]] = {}
        for rank, note in notes:
            if note["problem"]:
                said.setdefault((note["call"][0], note["call"][1]), []).append((rank, note["problem"]))
        for key, problems in said.items():
            self._fail(key, problem_error(problems, len(masks), self._transport.describe), masks)
        return bool(said)

    def _fail_unfit(self, masks: list[int]) -> bool:
        """Fail the calls that all ranks have made with sizes that do not fit, on all ranks."""
        found = {number: ranks for number, ranks in self.sizes.wrong.items() if all(m >> number & 1 for m in masks)}
        for number, ranks in found.items():
            key = self.contents[number].key
            self._fail(key, size_error(described(key), self._transport, ranks), masks)
        return bool(found)

    def _fail_conflicts(self, masks: list[int]) -> bool:
        """Fail the calls whose content differs between ranks, on all ranks."""
        rest = reduce(or_, masks) & ~reduce(and_, masks) & self._ambiguous
        keys = {self.contents[number].key for number in numbers_in(rest)}
        found = False
        for key in sorted(keys):
            mine = {rank: mask & self._bits[key] for rank, mask in enumerate(masks) if mask & self._bits[key]}
            if len(set(mine.values())) > 1:
                contents = {rank: self.contents[numbers_in(bits)[0]] for rank, bits in mine.items()}
                self._fail(key, conflict_error(contents, self._transport.describe), masks)
                found = True
        return found

    def _fail(self, key: CallKey, error: EspressoError, masks: list[int]) -> None:
        """Fail the next call of a key, also on ranks that make it later."""
        bits = self._bits.get(key, 0)
        for rank, mask in enumerate(masks):
            masks[rank] = mask & ~bits
        for number in numbers_in(bits):
            self.bad.pop(number, None)
        if key not in self.declared:
            self._failed_early.setdefault(key, deque()).append(error)
            return
        call = self.next_of(key)
        call.error = error
        self._finish(call)


def numbers_in(mask: int) -> list[int]:
    """The positions of the bits that are set."""
    if mask.bit_count() <= _FEW:
        return list(_lowest_first(mask))
    row = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()
    return found


def _lowest_first(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def bits_of(numbers: Iterable[int], size: int) -> bytearray:
    """A mask of ``size`` bytes with these bits set, least significant byte first: the inverse of ``numbers_in``."""
    row = bytearray(size)
    for number in numbers:
        row[number >> 3] |= 1 << (number & 7)
    return row
