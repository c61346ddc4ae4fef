"""The sizes of the parts that ranks send to each other in calls whose ranks may have different ones.

A rank announces its sizes with the description of a call, and again when they change. All ranks hear the same, so all
of them know which calls do not fit, and nothing is compared while sizes stay as they are.
"""

from __future__ import annotations

import numpy as np

from ..collectives.messages.part_sizes import Sizes, shown, unequal


class AnnouncedSizes:
    """What the ranks have announced, by the number of the call.

    Args:
        size: the number of ranks.
        rank: this one.

    Attributes:
        wrong: (giver, taker) of a part that they know differently, for the calls in which there is one.
        changed: calls of which a rank has announced other sizes; they are not yet compared.
    """

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank
        self._known: dict[int, dict[int, np.ndarray]] = {}
        self.wrong: dict[int, tuple[int, int]] = {}
        self.changed = set[int]()

    def new(self, number: int | None, sizes: Sizes | None) -> bool:
        """Whether this rank must announce the sizes of a call."""
        if sizes is None or number is None:
            return False
        before = self._known.get(number, {}).get(self._rank)
        return before is None or not np.array_equal(before, shown(sizes))

    def register(self, number: int, rank: int, sizes: Sizes) -> None:
        """A rank has announced its sizes: the elements that it gives to each rank, and those that it takes."""
        self._known.setdefault(number, {})[rank] = shown(sizes)
        self.changed.add(number)

    def compare(self) -> None:
        """Find out which of the calls that have changed fit."""
        for number in self.changed:
            known = self._known[number]
            self.wrong.pop(number, None)
            found = unequal([known[rank] for rank in range(self._size)]) if len(known) == self._size else None
            if found is not None:
                self.wrong[number] = found
        self.changed.clear()

    def forget(self) -> None:
        """The numbers of calls have become invalid."""
        self._known.clear()
        self.wrong.clear()
        self.changed.clear()
