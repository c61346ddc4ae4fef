"""How the gradients of a warm-up travel if the session plans for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..session import Session

SAFE = "int8"
"""What trains like uncompressed gradients, also if few of them are sent."""

_ORDER = (SAFE, "none")
"""What is compared; the one with fewer bytes comes first."""

_STEPS = 2
"""Of each. The first one is not counted: kernels compile in it."""


class WarmupTrials:
    """Compares ``SAFE`` with uncompressed gradients in the first steps of a warm-up.

    Plans of the session apply to momenta, and planning begins with these. The residual of ``SAFE`` is left over if
    uncompressed gradients are quicker; it holds no more than the error of one step. The choice is no part of a state: a
    job that continues in the warm-up compares again. On a network that the session has found slow, it takes ``SAFE`` at
    once.

    Args:
        owner: name of the optimizer.
    """

    def __init__(self, session: Session, owner: str) -> None:
        self._session, self._owner = session, owner
        self._seconds: list[float] = []
        self._chosen: str | None = SAFE if session.slow_network else None

    def after(self, seconds: float) -> str:
        """The compressor of the next step; the last one took so long here. Collective; the same on every rank."""
        if self._chosen is not None:
            return self._chosen
        self._seconds.append(seconds)
        done = len(self._seconds)
        if done < _STEPS * len(_ORDER):
            return _ORDER[done // _STEPS]
        here = np.array(self._seconds[_STEPS - 1 :: _STEPS])
        everywhere = self._session.allreduce(here, op="max", name=f"{self._owner} warm-up")
        self._chosen = _ORDER[int(np.argmin(everywhere))]
        return self._chosen
