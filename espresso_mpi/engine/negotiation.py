"""Rounds in which ranks learn of each other's calls: each says by a bit which it has.

A call is numbered, its bit, when a rank first brings it; what is new is told in words, once. All ranks compute the same
from the same messages: which calls all have, and which can never be carried out.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np

from ..collectives.messages.agreement import allgather_json, gather_small
from ..collectives.messages.transport import Transport
from ..errors import EspressoError
from . import fast_path
from .calls import Unit
from .diagnostics import Call, Content, absent_error, conflict_error, problem_error

_NEWS, _BLOCKED, _STUCK, _EXPRESS = 1, 2, 4, 8

_KNOWN = 1 << 14
"""Calls that ranks know by number; each costs a bit of every header."""


@dataclass(frozen=True)
class Heard:
    """What a round brought: flags and bits of every rank, (rank, note) of what is new, and everyone's message."""

    flags: Sequence[int]
    masks: list[int]
    notes: Sequence[tuple[int, Any]]
    messages: Sequence[np.ndarray]

    @property
    def express(self) -> bool:
        """Whether all ranks sent the data of one and the same call along."""
        going = bool(self.messages) and not self.notes and all(flag & _EXPRESS for flag in self.flags)
        return going and len(set(self.masks)) == 1

    @property
    def blocked(self) -> bool:
        """Whether on every rank somebody waits."""
        return all(flag & _BLOCKED for flag in self.flags)

    @property
    def stuck(self) -> bool:
        """Whether no rank has got on for a while."""
        return self.blocked and all(flag & _STUCK for flag in self.flags)


class Negotiation:
    """The calls of this rank that are not begun, and what is known of those of the others.

    Args:
        finish: ends a call that failed.
        forgotten: told when the numbers of calls mean nothing any more, on all ranks at once.

    Attributes:
        declared: calls that wait to begin, by what they are matched by.
        contents: of the calls that ranks know, by their numbers.
        bad: by number and rank: what is odd about the values of a call.
    """

    def __init__(self, transport: Transport, finish: Callable[[Unit], None], forgotten: Callable[[], None]) -> None:
        self._transport, self._finish, self._forgotten = transport, finish, forgotten
        self.declared: dict[Call, deque[Unit]] = {}
        self.contents: list[Content] = []
        self.bad: dict[int, dict[int, dict[str, str]]] = {}
        self._doomed: dict[Call, deque[EspressoError]] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._bits: dict[Call, int] = {}
        self._rivals = 0

    @property
    def front(self) -> list[Unit]:
        """The calls of this rank that could begin."""
        return [units[0] for units in self.declared.values()]

    @property
    def header_size(self) -> int:
        """Bytes of flags, and of a bit for each call that the ranks know."""
        return 1 + (len(self.contents) + 7) // 8

    def declare(self, unit: Unit) -> None:
        """A call of this rank waits to begin."""
        self.declared.setdefault(unit.call, deque()).append(unit)

    def doomed(self, unit: Unit) -> bool:
        """Whether another rank's half of the call has failed before; then this half has failed as well."""
        errors = self._doomed.get(unit.call)
        if errors:
            unit.error = errors.popleft()
            self._finish(unit)
        return unit.error is not None

    def next_of(self, call: Call) -> Unit:
        """Take the first of the declared calls of that name."""
        units = self.declared[call]
        unit = units.popleft()
        if not units:  # every round looks at what is there
            del self.declared[call]
        return unit

    def give_up(self) -> list[Unit]:
        """All declared calls, which are declared no more."""
        units = list(itertools.chain.from_iterable(self.declared.values()))
        self.declared, self.bad = {}, {}
        return units

    # --- rounds -------------------------------------------------------------------------------------------------------

    def compare(
        self, front: Sequence[Unit], idle: bool, blocked: bool, stuck: bool, small: Callable[[], Sequence[Any] | None]
    ) -> Heard:
        """Exchange headers with all ranks.

        Args:
            idle: nothing is under way; blocked: somebody waits on this rank; stuck: it has not got on for a while.
            small: the arrays of the only call in front, if it is so small that its data goes along.
        """
        self._number(front)
        news = [unit for unit in front if not unit.told and (unit.number is None or unit.bad or unit.problem)]
        if idle and len(self.contents) >= _KNOWN:
            self._forget(front)
        size = self.header_size
        arrays = small() if idle and not news else None
        flag = _NEWS * bool(news) | _BLOCKED * blocked | _STUCK * stuck | _EXPRESS * bool(arrays)
        mine = [unit.number for unit in front if unit.number is not None and unit.problem is None]
        message = np.frombuffer(bytes([flag]) + bits_of(mine, size - 1), np.uint8)
        if arrays:
            message = fast_path.packed(message, arrays)
        messages = gather_small(self._transport, message, fast_path.room(size) if idle else size)
        rows = [row[:size].tobytes() for row in messages]
        flags, masks = [row[0] for row in rows], [int.from_bytes(row[1:], "little") for row in rows]
        notes: list[tuple[int, Any]] = []
        if any(flag & _NEWS for flag in flags):
            text = json.dumps([unit.note() for unit in news]).encode()
            notes = [(rank, n) for rank, found in enumerate(allgather_json(self._transport, text)) for n in found]
            for unit in news:
                unit.told = True
        return Heard(flags, masks, notes, messages)

    def settle(self, front: Sequence[Unit], heard: Heard) -> bool:
        """Learn what is new, and let calls fail that can never begin; whether any did. Changes the masks."""
        for rank, note in heard.notes:
            self._hear(rank, note, heard.masks)
        self._number(front)
        failed = self._fail_broken(heard.notes, heard.masks)
        return self._fail_conflicts(heard.masks) or failed

    def require_patience(self, front: Sequence[Unit], masks: Sequence[int], since: float) -> None:
        """Raise RankTimeoutError if a rank that answers has not made a call of this one for too long.

        Args:
            since: when calls last got on.
        """
        waiter, now = self._transport.waiter, time.perf_counter()
        for unit in front:
            waited = now - max(unit.since, since)
            if unit.number is None or waited < min(waiter.notice, waiter.timeout):
                continue
            missing = [rank for rank, mask in enumerate(masks) if not mask >> unit.number & 1]
            if waited > waiter.timeout:
                raise absent_error(waiter.timeout, unit.title, missing, self._transport.describe)
            if not unit.noticed:
                unit.noticed = True
                waiter.say(waited, missing, unit.title)

    def calls_of(self, masks: Sequence[int]) -> dict[int, list[Call]]:
        """The calls that each rank has."""
        return {rank: [self.contents[number].call for number in numbers_in(mask)] for rank, mask in enumerate(masks)}

    def _number(self, front: Sequence[Unit]) -> None:
        for unit in front:
            if unit.number is None:
                unit.number = self._numbers.get(unit.key)

    def _forget(self, front: Sequence[Unit]) -> None:
        """Let all ranks learn the calls anew: where they differ from step to step, most will never come again."""
        for known in (self.contents, self._numbers, self._bits, self.bad):
            known.clear()
        self._rivals = 0
        for unit in front:
            unit.number, unit.told = None, False
        self._forgotten()

    def _hear(self, rank: int, note: Mapping[str, Any], masks: list[int]) -> None:
        """A call that a rank brings for the first time, or with values that are not finite."""
        if note["problem"]:
            return
        content = Content.read(note)
        key = (content.call, content.priority, bytes.fromhex(content.digest))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.contents)
            self.contents.append(content)
            known = self._bits.get(content.call, 0)
            self._bits[content.call] = known | 1 << number
            if known:
                self._rivals |= known | 1 << number
        masks[rank] |= 1 << number
        if note["bad"]:
            self.bad.setdefault(number, {})[rank] = note["bad"]

    def _fail_broken(self, notes: Sequence[tuple[int, Any]], masks: list[int]) -> bool:
        """Calls that a rank could not make fail on all ranks."""
        said: dict[Call, list[tuple[int, Any]]] = {}
        for rank, note in notes:
            if note["problem"]:
                said.setdefault((note["call"][0], note["call"][1]), []).append((rank, note["problem"]))
        for call, problems in said.items():
            self._fail(call, problem_error(problems, len(masks), self._transport.describe), masks)
        return bool(said)

    def _fail_conflicts(self, masks: list[int]) -> bool:
        """Calls of one name that differ between ranks fail on all ranks."""
        rest = reduce(or_, masks) & ~reduce(and_, masks) & self._rivals
        calls = {self.contents[number].call for number in numbers_in(rest)}
        found = False
        for call in sorted(calls):
            mine = {rank: mask & self._bits[call] for rank, mask in enumerate(masks) if mask & self._bits[call]}
            if len(set(mine.values())) > 1:
                contents = {rank: self.contents[numbers_in(bits)[0]] for rank, bits in mine.items()}
                self._fail(call, conflict_error(contents, self._transport.describe), masks)
                found = True
        return found

    def _fail(self, call: Call, error: EspressoError, masks: list[int]) -> None:
        """The call that is next on each rank fails, also where it is still to come."""
        bits = self._bits.get(call, 0)
        for rank, mask in enumerate(masks):
            masks[rank] = mask & ~bits
        for number in numbers_in(bits):
            self.bad.pop(number, None)
        if call not in self.declared:
            self._doomed.setdefault(call, deque()).append(error)
            return
        unit = self.next_of(call)
        unit.error = error
        self._finish(unit)


def numbers_in(mask: int) -> list[int]:
    """The places of the bits that are set."""
    row = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()
    return found


def bits_of(numbers: Iterable[int], size: int) -> bytes:
    """The bits at these places, in so many bytes: the inverse of ``numbers_in``, least significant byte first."""
    row = bytearray(size)
    for number in numbers:
        row[number >> 3] |= 1 << (number & 7)
    return bytes(row)
