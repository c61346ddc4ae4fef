"""Whether gradients travel during the backward pass: as told, or what is quicker in the first steps of a run; and
which travel together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from ..errors import ConfigError
from ..session import Session

_WARM = 4
"""Steps that are not measured: kernels are compiled, buffers grow."""

_EACH = 6
"""Steps of either kind that are compared, in turns: what disturbs one meets the other as well."""


TOGETHER = 512 << 10
"""Bytes from which gradients are pushed. Every push costs about 0.2 ms of the backward pass, whatever its size: the
call, and the rounds and the switch to the thread that it causes."""


class Groups:
    """The gradients that are pushed by one call: neighbours in the module, the last ones first. The same on every rank.

    Args:
        together: bytes from which a group is full; 0 for groups of one.
    """

    def __init__(self, together: int) -> None:
        self._together = together
        self._of: dict[str, tuple[str, ...]] = {}

    def add(self, sizes: Sequence[tuple[str, int]]) -> None:
        """Make groups of more gradients: (name, bytes) in the order of the module."""
        group, nbytes = list[str](), 0
        for name, size in reversed(sizes):
            group.append(name)
            nbytes += size
            if nbytes >= self._together:
                self._close(group)
                group, nbytes = [], 0
        self._close(group)

    def _close(self, group: Sequence[str]) -> None:
        self._of.update(dict.fromkeys(group, tuple(group)))

    def all(self) -> Iterable[tuple[str, ...]]:
        """All groups, in the order in which they were made."""
        return dict.fromkeys(self._of.values())

    def of(self, name: str) -> tuple[str, ...]:
        """The group of a gradient."""
        return self._of[name]


def singly(session: Session) -> bool:
    """Whether each gradient is pushed by a call of its own: a schedule has a time for each, and a plan is made from the
    time of each."""
    plan = None if session.watching else session.plan
    return session.planned and (plan is None or plan.schedule is not None)


class Overlap:
    """Decides for each step. The same on every rank.

    Args:
        told: what the user chose; session: that sends the gradients; name: of the call by which ranks compare.

    Attributes:
        now: whether gradients of this step travel during the backward pass.
        singly: whether each of these is pushed by a call of its own.
    """

    def __init__(
        self, told: bool | Literal["auto"], session: Session, name: str = "GradientSync.overlap"
    ) -> None:  # fmt: skip
        if told not in (True, False, "auto"):
            raise ConfigError(f"GradientSync: overlap={told!r}; expected True, False or 'auto'")
        self._session, self._told, self._name, self.now, self.singly = session, told, name, bool(told), False
        self._seconds: dict[bool, list[float]] | None = {True: [], False: []} if told == "auto" else None
        self._steps, self._began = 0, time.perf_counter()
        self.begin()

    @property
    def settled(self) -> bool:
        """Whether it stays so."""
        return self._seconds is None

    def begin(self) -> None:
        """The first gradient of a step is there. If there is a plan, it says whether pushes are held, and whether each
        tensor has its time.

        All gradients of a held step travel by one call: that costs less than a push of each. While steps are watched
        for a plan, each gradient is pushed, because its time counts, whatever plan they follow.
        """
        self._began = time.perf_counter()
        if not self._session.planned:
            return
        plan, self._seconds = self._session.plan, None
        held = plan is not None and plan.held and not self._session.watching
        self.now = self._told is not False and not held
        self.singly = singly(self._session)

    def step_ended(self) -> None:
        """The gradients of a step are averaged; collective when those of the last step that is measured are.

        What counts is the time since the first gradient: what a program does between two steps, such as a validation or
        the step of another model, may take much longer than the difference.
        """
        if self._seconds is None:
            return
        self._steps += 1
        if self._steps > _WARM:
            self._seconds[self.now].append(time.perf_counter() - self._began)
        if self._steps < _WARM + 2 * _EACH:
            self.now = self._steps % 2 == 0
            return
        mine = np.array([statistics.median(self._seconds[way]) for way in (True, False)])
        self._session.allreduce(mine, op="sum", name=self._name)
        self.now, self._seconds = bool(mine[0] <= mine[1]), None
