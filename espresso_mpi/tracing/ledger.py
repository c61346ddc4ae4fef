"""Times of a table of operations that runs again and again: kept as numbers, and summed up when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .recording import Kind, Recorder

_ROWS, _NUMBERS = 64, 1 << 15
"""Runs that are kept before they are summed up, and how many numbers at most."""


@dataclass(frozen=True)
class LedgerInterval:
    """What is recorded of every run, from one mark to another.

    Attributes:
        kind, tensor, what, level, intra, inter: as of ``Recorder.add``.
        first, last: the marks.
        share: which part of the time that the rank only waited counts for this tensor, from and to; None: it is no
            interval in which ranks wait for each other.
    """

    kind: Kind
    tensor: str
    first: int
    last: int
    what: str = ""
    level: str = ""
    intra: int = 0
    inter: int = 0
    share: tuple[float, float] | None = None


class Ledger:
    """The marks of the latest runs of a table.

    Args:
        recorder: gets the sums.
        intervals: what is recorded of every run.
        marks: number of marks.
        segment: number of the segment.

    Attributes:
        row: int64, shape (marks, 2): the next run writes the nanoseconds of the clock and of waiting so far here;
            place: its address.
        tensors: their names.
    """

    def __init__(self, recorder: Recorder, intervals: Sequence[LedgerInterval], marks: int, segment: int = 0) -> None:
        self._recorder, self._intervals, self._segment = recorder, intervals, segment
        count = max(1, min(_ROWS, _NUMBERS // max(2 * marks, 1)))
        self._memory = np.zeros((count, marks, 2), np.int64)
        self._rows, self._steps = list(self._memory), list[Sequence[int]]()
        first, nbytes = self._memory.ctypes.data, self._memory[0].nbytes
        self._places = [first + number * nbytes for number in range(count)]
        self._ends = np.array([(i.first, i.last) for i in intervals], np.int64).reshape(-1, 2)
        self._waits = [n for n, i in enumerate(intervals) if i.share is not None]
        shares = [i.share for i in intervals if i.share is not None]
        self._shares = np.array([b - a for a, b in shares])
        self.tensors = frozenset(i.tensor for i in intervals if i.tensor)
        self._order = {tensor: n for n, tensor in enumerate(dict.fromkeys(i.tensor for i in intervals if i.tensor))}
        self.row, self.place = self._rows[0], self._places[0]

    def note(self, steps: Sequence[int]) -> None:
        """A run has written its marks; ``steps``: that of each tensor, in the order of their first intervals."""
        self._recorder.keep(self, steps)
        self.row, self.place = self._rows[len(self._steps)], self._places[len(self._steps)]

    @property
    def nbytes(self) -> int:
        """Bytes of memory for marks."""
        return self._memory.nbytes

    def take(self, steps: Sequence[int]) -> bool:
        """Keep the run in ``row``; returns whether there is no room for another. The recorder's lock is held."""
        if (own := self._rows[len(self._steps)]) is not self.row:  # runs were summed up since the row was given out
            own[:] = self.row
        self._steps.append(steps)
        return len(self._steps) == len(self._rows)

    def write_out(self) -> None:
        """Report every interval by itself, for a trace; the recorder's lock is held."""
        for steps, row in zip(self._steps, self._rows):
            times = (row * 1e-9).tolist()
            for one in self._intervals:
                (start, before), (stop, after) = times[one.first], times[one.last]
                step = steps[self._order[one.tensor]] if one.tensor else 0
                add, waited = self._recorder.add_held, after - before
                if one.share is not None and waited > 0:
                    a, b = (start + share * waited for share in one.share)
                    add("wait", one.tensor, step, self._segment, a, b, one.what, one.level)
                add(one.kind, one.tensor, step, self._segment, start, stop, one.what, one.level, one.intra, one.inter)
        self._steps = []

    def sums(self) -> list[tuple[Kind, str, Sequence[int], float, float, int, int]]:
        """For each kind of interval: (kind, tensor, its steps, seconds of all runs but the last, of the last, bytes
        of one run inside the node and between nodes). Forgets the runs. The recorder's lock is held."""
        count = len(self._steps)
        first, last = (self._memory[:count, self._ends[:, end]] for end in range(2))
        took = (last - first) * 1e-9  # (runs, intervals, clock and waiting)
        before, latest = took[:-1].sum(axis=0), took[-1]
        steps = list(zip(*self._steps)) if self._steps[0] else []
        found = list[tuple["Kind", str, Sequence[int], float, float, int, int]]()
        for one, (a, _), (b, _) in zip(self._intervals, before.tolist(), latest.tolist()):
            its = steps[self._order[one.tensor]] if one.tensor else ()
            found.append((one.kind, one.tensor, its, a, b, one.intra, one.inter))
        waited = zip((before[self._waits, 1] * self._shares).tolist(), (latest[self._waits, 1] * self._shares).tolist())
        for number, (a, b) in zip(self._waits, waited):
            one = self._intervals[number]
            its = steps[self._order[one.tensor]] if one.tensor else ()
            found.append(("wait", one.tensor, its, a, b, 0, 0))
        self._steps = []
        return found
