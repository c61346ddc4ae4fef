"""A clock that tells the steps of a training loop apart."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..types import TensorSpec

CallKey = tuple[str, str]
"""What a call is known by: sync, or push and the tensor's name."""


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank, in seconds since the step before ended.

    Attributes:
        specs: the tensors, in the order in which they came.
        ready: float64 (tensors,), when each came, less what was waited for others before.
        seconds: when all of them were waited for.
        pushed: whether any was pushed.
    """

    specs: tuple[TensorSpec, ...]
    ready: np.ndarray
    seconds: float
    pushed: bool = False


class StepClock:
    """Tells steps apart: a step ends when a tensor comes that it already had; what is between two steps is compute.

    Args:
        keep: how many of the last steps are remembered.

    Attributes:
        steps: the last ones. The first of all is not among them: when it began is not known.
        count: of all steps.
        seconds: of the steps that were recorded, together.
        specs: the tensors of the last step; pushed: whether any of them was.
        wait: seconds from its last call until all of them were waited for, whatever ran meanwhile.
    """

    def __init__(self, keep: int = 16, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.steps: deque[RecordedStep] = deque(maxlen=keep)
        self.count = 0
        self.specs: tuple[TensorSpec, ...] = ()
        self.pushed = False
        self.seconds = self.wait = self._called = 0.0
        self._calls: list[tuple[CallKey, tuple[TensorSpec, ...], float]] = []
        self._names: set[str] = set()
        self._began: float | None = None
        self._waited = self._idle = self._own = 0.0

    def begins(self, specs: Sequence[TensorSpec]) -> bool:
        """Whether a call with these tensors begins another step."""
        return any(spec.name in self._names for spec in specs)

    def repeats(self, call: CallKey) -> bool:
        """Whether a call, of tensors that are not known because it failed on this rank, would begin another step."""
        return any(known == call for known, _, _ in self._calls)

    def end_step(self) -> None:
        """The step that these calls made is over."""
        self.specs = tuple(spec for _, tensors, _ in self._calls for spec in tensors)
        self.pushed = any(call[0] == "push" for call, _, _ in self._calls)
        if self._began is not None and self._calls:
            ready = np.array([at - self._began for _, tensors, at in self._calls for _ in tensors])
            self.steps.append(RecordedStep(self.specs, ready, self._waited - self._began - self._own, self.pushed))
            self.seconds += self.steps[-1].seconds
        self.count += 1
        self.wait = self._waited - self._called
        self._began, self._calls, self._idle, self._own = self._waited, [], 0.0, 0.0
        self._names = set()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done in the with-block, between two steps, is part of neither."""
        since = self._clock() - self._waited
        try:
            yield
        finally:
            if self._began is not None:
                self._began = self._clock() - since

    @contextmanager
    def within(self) -> Iterator[None]:
        """What is done in the with-block, within a step, is no part of it."""
        since = self._clock()
        try:
            yield
        finally:
            took = self._clock() - since
            self._idle += took
            self._own += took

    def called(self, call: CallKey, specs: Sequence[TensorSpec]) -> None:
        """A call came."""
        self._called = self._clock()
        self._calls.append((call, tuple(specs), self._called - self._idle))
        self._names.update(spec.name for spec in specs)

    def waited(self, since: float, failed: CallKey | None = None) -> None:
        """A call was waited for since then; one that failed, which it does on all ranks, was no part of the step."""
        self._waited = self._clock()
        self._idle += self._waited - since
        if failed is not None:
            self._calls = [known for known in self._calls if known[0] != failed]
            self._names = {spec.name for _, tensors, _ in self._calls for spec in tensors}
