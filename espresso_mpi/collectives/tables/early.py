"""Messages that leave while the rest of a payload is still encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .operations import Code, Operation


def with_sends(
    encoding: Sequence[Operation], receives: Sequence[Operation], sends: Sequence[Operation]
) -> list[Operation]:
    """Operations that encode a payload, with the messages that carry it as soon as it is final.

    The messages to each rank stay in their order, which is that of the receiver.

    Args:
        encoding: all encodes of the payload.
        receives: what is to be received in the other buffer; at once, unless ``encoding`` reads that.
        sends: of the payload.
    """
    reads = any(o.code in (Code.DECODE, Code.ADD) for o in encoding)
    found, left, final = ([] if reads else list(receives)), list(sends), _Final(encoding)
    for group in _groups(encoding):
        found += group
        if final.after(group):
            ready = list(_ready(left, final.nbytes))
            found += ready
            left = [send for send in left if send not in ready]
    return [*found, *(receives if reads else ()), *left]


def _groups(operations: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
    """Operations by themselves, or all that are made tile by tile."""
    at = 0
    while at < len(operations):
        count = 1 + (operations[at].tensor if operations[at].code == Code.TILES else 0)
        yield operations[at : at + count]
        at += count


def _ready(sends: Sequence[Operation], final: int) -> Iterator[Operation]:
    """The messages within the first ``final`` bytes that no other to the same rank must precede."""
    waiting = set[int]()
    for send in sends:
        if send.offset + send.nbytes > final:
            waiting.add(send.number)
        elif send.number not in waiting:
            yield send


class _Final:
    """How much of the beginning of a payload has its final content.

    Attributes:
        nbytes: so many bytes.
    """

    def __init__(self, encoding: Sequence[Operation]) -> None:
        self._offsets = sorted({o.offset for o in encoding if o.code == Code.ENCODE})
        self._final = dict.fromkeys(self._offsets, 0)
        self._whole = set[int]()
        self._first = self.nbytes = 0

    def after(self, group: Sequence[Operation]) -> bool:
        """Whether there are more after some operations."""
        before = self.nbytes
        for encode in (o for o in group if o.code == Code.ENCODE):
            assert encode.call is not None
            done = encode.first + encode.size
            self._final[encode.offset] = done * encode.call.leading // 8
            if done == encode.whole:
                self._whole.add(encode.offset)
        while self._first < len(self._offsets) and self._offsets[self._first] in self._whole:
            self._first += 1
        if self._first == len(self._offsets):
            self.nbytes = 1 << 62
        else:
            offset = self._offsets[self._first]
            self.nbytes = offset + self._final[offset]
        return self.nbytes > before
