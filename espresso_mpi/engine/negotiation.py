"""Negotiation rounds: every rank announces by one bit per call which calls it has made.

A call gets its number, which is its bit, when a rank first announces it; its description is sent once. All ranks derive
the same from the same messages: which calls all of them have made, and which ones can never run.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..collectives.messages.agreement import allgather_json, gather_small
from ..collectives.messages.transport import Transport
from ..errors import EspressoError
from . import fast_path
from .announced_sizes import AnnouncedSizes
from .call_failures import CallFailures, bits_of, numbers_in
from .calls import PendingCall
from .dense_piggyback import DensePiggyback
from .diagnostics import CallKey, Content, absent_error
from .expectation import Expectation
from .table_piggyback import TablePiggyback

_NEWS, _BLOCKED, _STUCK, _FAST_PATH, _WHOLE, _UNSEARCHED = 1, 2, 4, 8, 16, 32
"""Flags of a rank: it has new calls, a thread waits, it has made no progress for a while; that data travel with the
header: those of the call as ``fast_path`` has them, or all of them as one array; and that their values are searched by
the sum only, so that the rank has made no call if the headers differ."""

OWN_STATE = _BLOCKED | _STUCK | _UNSEARCHED
"""What ranks may differ in that run the same call."""

Piggyback = fast_path.Piggyback | TablePiggyback | DensePiggyback
"""Data that travel with a header."""

_KNOWN = 1 << 14
"""The number of calls that are remembered; each costs a bit of every header."""


@dataclass(frozen=True)
class RoundResult:
    """The result of a negotiation round.

    Attributes:
        flags, masks: flags and bits of every rank.
        notes: (rank, note) of every call that is new.
        messages: the message of every rank.
        piggyback: the data that this rank has sent with its header.
    """

    flags: Sequence[int]
    masks: list[int]
    notes: Sequence[tuple[int, Any]]
    messages: Sequence[np.ndarray]
    piggyback: Piggyback | None = None

    @property
    def fast_path(self) -> bool:
        """Whether all ranks have sent the data of one and the same call."""
        if self.piggyback is None or self.notes:
            return False
        alike = all(flag & _FAST_PATH for flag in self.flags) and len(set(self.masks)) == 1
        return self.piggyback.met > 0 or (alike and self.masks[0] > 0)

    @property
    def odd(self) -> bool:
        """Whether all is as before, because there are values that cannot be summed: look for them first."""
        return self.piggyback is not None and self.piggyback.odd

    @property
    def not_made(self) -> bool:
        """Whether this rank has made no call in the round, because its values are still to be searched."""
        return self.piggyback is not None and self.piggyback.unsearched and not self.piggyback.met

    @property
    def unsearched(self) -> bool:
        """Whether that holds for some rank, which then makes its call in one of the next rounds."""
        return any(flag & _UNSEARCHED for flag in self.flags)

    @property
    def blocked(self) -> bool:
        """Whether a thread waits on every rank."""
        return all(flag & _BLOCKED for flag in self.flags)

    @property
    def stuck(self) -> bool:
        """Whether no rank has made progress for a while."""
        return self.blocked and all(flag & _STUCK for flag in self.flags)


class Numbered(Protocol):
    """What is known of calls by their numbers: called on all ranks at once, and all of them get the same answers.

    Attributes:
        expecting: whether they note which call follows which, because there may be one that they can expect.
    """

    @property
    def expecting(self) -> bool:
        """See above."""

    def forget_numbers(self) -> None:
        """The numbers have become invalid."""

    def forget_arrangement(self, number: int) -> None:
        """A rank has announced other sizes of the parts of a call."""

    def expects(self, number: int) -> bool:
        """Whether the ranks make a call in the way of expected ones, if they expect it."""

    def failed_to_expect(self, number: int) -> None:
        """All ranks have made a call that was expected, but not all of them in that way."""


class Negotiation(CallFailures):
    """The calls of this rank that wait to start, and what is known of the calls of other ranks.

    Args:
        transport: the messages.
        finish: called with a call that has failed.
        numbered: what is known of calls by their numbers.

    Attributes:
        declared: calls that wait to start, by key.
        contents: the contents of the known calls, by number.
        bad: by number and rank: the values of a call that cannot be summed.
        sizes: of the parts of calls.
    """

    def __init__(self, transport: Transport, finish: Callable[[PendingCall], None], numbered: Numbered) -> None:
        self._transport, self._finish, self._numbered = transport, finish, numbered
        self._expectation = Expectation()
        self.sizes = AnnouncedSizes(transport.topology.size, transport.rank)
        self.declared: dict[CallKey, deque[PendingCall]] = {}
        self.contents: list[Content] = []
        self.bad: dict[int, dict[int, dict[str, str]]] = {}
        self._failed_early: dict[CallKey, deque[EspressoError]] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._bits: dict[CallKey, int] = {}
        self._ambiguous = 0
        self._version = 0  # of what headers look like
        self._latest_header: tuple[Any, np.ndarray] = None, np.empty(0, np.uint8)

    @property
    def front(self) -> list[PendingCall]:
        """The calls of this rank that may start next: the first of each key."""
        return [calls[0] for calls in self.declared.values()]

    @property
    def header_size(self) -> int:
        """Bytes of a header: flags, and a bit for each known call."""
        return 1 + (len(self.contents) + 7) // 8

    @property
    def _full(self) -> bool:
        """Whether the next round forgets all numbers: no header with a number may be shown before it."""
        return len(self.contents) >= _KNOWN

    def declare(self, call: PendingCall) -> None:
        """Queue a call of this rank."""
        self.declared.setdefault(call.key, deque()).append(call)

    def failed_remotely(self, call: PendingCall) -> bool:
        """Whether the call has already failed because of another rank; if so, it is finished with that error."""
        errors = self._failed_early.get(call.key)
        if errors:
            call.error = errors.popleft()
            if not errors:
                del self._failed_early[call.key]
            self._finish(call)
        return call.error is not None

    def give_up(self) -> list[PendingCall]:
        """Remove and return all declared calls."""
        calls = list(itertools.chain.from_iterable(self.declared.values()))
        self.declared, self.bad = {}, {}
        return calls

    def withdraw(self, kinds: Collection[str]) -> list[PendingCall]:
        """Remove and return the declared calls of these kinds, to be declared anew. All ranks do it at once."""
        keys = [key for key in self.declared if key[0] in kinds]
        self.bad = {number: said for number, said in self.bad.items() if self.contents[number].key[0] not in kinds}
        return list(itertools.chain.from_iterable(self.declared.pop(key) for key in keys))

    # --- rounds -------------------------------------------------------------------------------------------------------

    def expected(self, idle: bool) -> int | None:
        """The number of the call that all ranks expect in the round that begins; None: they expect none.

        Args:
            idle: as of ``compare``.
        """
        if not self._numbered.expecting:
            return None
        number = self._expectation.next if idle else None
        asked = number if number is not None and self._numbered.expects(number) else None
        self._expectation.asked = asked
        return asked

    def came(self, number: int) -> None:
        """All ranks have made a call in one exchange."""
        if self._numbered.expecting:
            self._expectation.came(number)

    def compare(
        self,
        front: Sequence[PendingCall],
        idle: bool,
        blocked: bool,
        stuck: bool,
        find_piggyback: Callable[[int | None], Piggyback | None],
        decline: Callable[[int, Piggyback | None], None],
    ) -> RoundResult:
        """Exchange headers with all ranks.

        Args:
            front: the calls that may start next.
            idle: no segment is active.
            blocked: a thread waits on this rank.
            stuck: this rank has made no progress for a while.
            find_piggyback: returns the data of the only call in front, if they may be piggybacked on the header; gets
                the number of the call that is expected.
            decline: gets a call that is expected and the data that are piggybacked; takes part in the messages of the
                call, unless these are data of it.
        """
        self._number(front)
        news = [call for call in front if not call.announced and self._is_news(call)]
        if idle and self._full:
            self._forget(front)
        size = self.header_size
        expected = self.expected(idle)
        piggyback = find_piggyback(expected) if idle and not news else None
        whole = isinstance(piggyback, fast_path.NodePiggyback) and piggyback.whole
        data = _WHOLE if whole else _FAST_PATH * (piggyback is not None)
        flag = _NEWS * bool(news) | _BLOCKED * blocked | _STUCK * stuck | data
        mine = [call.number for call in front if call.number is not None and call.problem is None]
        header = self._header(flag, mine)
        if expected is not None:
            decline(expected, piggyback)
        if piggyback is not None:
            return self._shown(header, piggyback, mine[0])
        room = fast_path.room(size, self._transport) if idle else size
        return self._result(gather_small(self._transport, header, room), news)

    def show(self, call: PendingCall, piggyback: Piggyback, header: np.ndarray | None = None) -> RoundResult:
        """As ``compare``, for the only call in front, which is waited for: its data are piggybacked on the header.

        Args:
            header: of the call, as of ``repeated_header``, if it is known.
        """
        assert call.number is not None
        shown = self._header(_alone(piggyback.unsearched), (call.number,)) if header is None else header
        return self._shown(shown, piggyback, call.number)

    def repeated_header(self, call: PendingCall, signature: tuple[Any, ...], unsearched: bool) -> np.ndarray | None:
        """The header for a call that has begun before, as of ``show``; None: it has no number, or must not be shown.

        Args:
            call: stands for it; gets its number.
            unsearched: whether its values are searched by the sum.
        """
        if self.bad or self._failed_early or self.declared:
            return None
        version, header = call.shown
        if version == (self._version, unsearched):
            return header
        call.number = self._numbers.get(signature)
        if call.number is None or self._full:
            return None
        header = self._header(_alone(unsearched), (call.number,))
        call.shown = (self._version, unsearched), header
        return header

    def knows(self, call: PendingCall) -> bool:
        """Whether a call of this rank has a number, and nothing is known of values that forbid it, or of failures."""
        if self._full:
            return False
        self._number((call,))
        return call.number is not None and call.number not in self.bad and not self._failed_early.get(call.key)

    def _shown(self, header: np.ndarray, piggyback: Piggyback, number: int) -> RoundResult:
        messages = piggyback.exchange(header, OWN_STATE)
        if piggyback.met:
            self.came(number)
        if piggyback.met or not messages:
            return RoundResult([], [], [], [], piggyback)
        return self._result(messages, (), piggyback)

    def _result(
        self, messages: Sequence[np.ndarray], news: Sequence[PendingCall], piggyback: Piggyback | None = None
    ) -> RoundResult:
        """What the headers of all ranks say; exchanges the descriptions of new calls, if there are any."""
        rows = [row[: self.header_size].tobytes() for row in messages]
        flags = [row[0] for row in rows]
        masks = [0 if row[0] & _UNSEARCHED else int.from_bytes(row[1:], "little") for row in rows]
        notes: list[tuple[int, Any]] = []
        if any(flag & _NEWS for flag in flags):
            text = json.dumps([call.note() for call in news]).encode()
            notes = [(rank, n) for rank, found in enumerate(allgather_json(self._transport, text)) for n in found]
            for call in news:
                call.announced = True
        self._learn(None if notes or len(set(masks)) > 1 or masks[0].bit_count() != 1 else masks[0].bit_length() - 1)
        return RoundResult(flags, masks, notes, messages, piggyback)

    def _learn(self, number: int | None) -> None:
        """The ranks have made a call, as the only one of each, by an exchange of headers; None: they have not."""
        if not self._numbered.expecting:
            return
        if number is not None and number == self._expectation.asked:
            self._numbered.failed_to_expect(number)
        self._expectation.came(number)

    def _header(self, flag: int, numbers: Sequence[int]) -> np.ndarray:
        """Flags and bits of this rank as flat uint8, not to be changed: that of the last round if it is equal."""
        key = (flag, self.header_size, tuple(numbers))
        if self._latest_header[0] != key:
            message = bytearray((flag,)) + bits_of(numbers, self.header_size - 1)
            self._latest_header = key, np.frombuffer(message, np.uint8)
        return self._latest_header[1]

    def settle(self, front: Sequence[PendingCall], result: RoundResult) -> bool:
        """Register new calls, and fail those that can never start; returns whether any failed. Changes the masks."""
        for rank, note in result.notes:
            self._register(rank, note, result.masks)
        for number in self.sizes.changed:
            self._numbered.forget_arrangement(number)
        self.sizes.compare()
        self._number(front)
        failed = self._fail_broken(result.notes, result.masks)
        failed = self._fail_unfit(result.masks) or failed
        return self._fail_conflicts(result.masks) or failed

    def require_timely(self, front: Sequence[PendingCall], masks: Sequence[int], since: float) -> None:
        """Raise RankTimeoutError if a rank that responds has not made one of the calls within the timeout.

        Args:
            front: the calls that may start next.
            masks: the calls of each rank.
            since: time of the last progress.
        """
        waiter, now = self._transport.waiter, time.perf_counter()
        for call in front:
            waited = now - max(call.since, since)
            if call.number is None or waited < min(waiter.notice, waiter.timeout):
                continue
            missing = [rank for rank, mask in enumerate(masks) if not mask >> call.number & 1]
            if waited > waiter.timeout:
                raise absent_error(waiter.timeout, call.title, missing, self._transport.describe)
            if not call.noticed:
                call.noticed = True
                waiter.log_notice(waited, missing, call.title)

    def keys_of(self, masks: Sequence[int]) -> dict[int, list[CallKey]]:
        """The keys of the calls of each rank."""
        return {rank: [self.contents[number].key for number in numbers_in(mask)] for rank, mask in enumerate(masks)}

    def _is_news(self, call: PendingCall) -> bool:
        """Whether the other ranks must hear more of a call than its number."""
        if call.number is None or call.bad or call.problem is not None:
            return True
        return call.sizes is not None and self.sizes.new(call.number, call.sizes)

    def _number(self, front: Sequence[PendingCall]) -> None:
        for call in front:
            if call.number is None:
                call.number = self._numbers.get(call.signature)

    def _forget(self, front: Sequence[PendingCall]) -> None:
        """Forget all numbers, on all ranks: if calls differ from step to step, most will never occur again."""
        for known in (self.contents, self._numbers, self._bits, self.bad):
            known.clear()
        self.sizes.forget()
        self._expectation.forget()
        self._ambiguous = 0
        self._version += 1
        for call in front:
            call.number, call.announced = None, False
        self._numbered.forget_numbers()

    def _register(self, rank: int, note: Mapping[str, Any], masks: list[int]) -> None:
        """Register a call that is new, or whose values are not finite."""
        if note["problem"]:
            return
        content = Content.read(note)
        signature = (content.key, content.priority, bytes.fromhex(content.digest))
        number = self._numbers.get(signature)
        if number is None:
            number = self._numbers[signature] = len(self.contents)
            self.contents.append(content)
            self._version += 1
            known = self._bits.get(content.key, 0)
            self._bits[content.key] = known | 1 << number
            if known:
                self._ambiguous |= known | 1 << number
        masks[rank] |= 1 << number
        if "sizes" in note:
            self.sizes.register(number, rank, note["sizes"])
        if note["bad"]:
            self.bad.setdefault(number, {})[rank] = note["bad"]


def _alone(unsearched: bool) -> int:
    """The flags of a call that is the only one, is waited for, and has data with its header."""
    return _BLOCKED | _FAST_PATH | _UNSEARCHED * unsearched
