"""Which call all ranks expect: the one that has followed the last two calls, or else the last one, before.

All ranks see the same rounds, so all of them expect the same call.
"""

from __future__ import annotations

_PAIRS = 1 << 12
"""What is remembered at a time: calls may differ from step to step."""


class Expectation:
    """What followed what, by the numbers of calls.

    Attributes:
        asked: the call that is expected in the round under way; None: none is.
    """

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._latest: tuple[int, ...] = ()
        self.asked: int | None = None

    @property
    def next(self) -> int | None:
        """The call that is likely to come; None: it is not known."""
        return self._after.get(self._latest, self._after.get(self._latest[-1:]))

    def came(self, number: int | None) -> None:
        """All ranks have made a call, as the only one; None: something else has happened."""
        self.asked = None
        if number is None:
            self._latest = ()
            return
        if len(self._after) >= _PAIRS:
            self._after.clear()
        for before in {self._latest, self._latest[-1:]} - {()}:
            self._after[before] = number
        self._latest = (*self._latest[-1:], number)

    def forget(self) -> None:
        """The numbers of calls have become invalid."""
        self._after.clear()
        self._latest, self.asked = (), None
