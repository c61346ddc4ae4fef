"""Which call all ranks expect: the one that has followed the last one before.

All ranks see the same rounds, so all of them expect the same call.
"""

from __future__ import annotations


class Expectation:
    """What followed what, by the numbers of calls.

    Attributes:
        asked: the call that is expected in the round under way; None: none is.
    """

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._latest: int | None = None
        self.asked: int | None = None

    @property
    def next(self) -> int | None:
        """The call that is likely to come; None: it is not known."""
        return None if self._latest is None else self._after.get(self._latest)

    def came(self, number: int | None) -> None:
        """All ranks have made a call, as the only one; None: something else has happened."""
        if self._latest is not None and number is not None:
            self._after[self._latest] = number
        self._latest, self.asked = number, None

    def forget(self) -> None:
        """The numbers of calls have become invalid."""
        self._after.clear()
        self._latest = self.asked = None
