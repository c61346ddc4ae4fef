"""A clock that tells the steps of a training loop apart."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from ..arrays.gpu_times import Moment
from ..types import TensorSpec

_LATE = 0.5
"""The share of a step by which it comes later if other work delayed it."""

CallKey = tuple[str, str]
"""What a call is known by: sync, or push and the tensor's name."""


@dataclass(frozen=True)
class _Call:
    """A call of the step that runs.

    Attributes:
        made: when it came, in seconds of the clock; idle: how long calls of its step had been waited for until then.
        moment: when a GPU had its tensors, which may be later; None: they are on none.
        shift: seconds by which the moment is later on this clock, for what was done aside since.
    """

    key: CallKey
    specs: tuple[TensorSpec, ...]
    made: float
    idle: float
    moment: Moment | None = None
    shift: float = 0.0

    @property
    def at(self) -> float:
        """When its tensors were there; the call has ended."""
        return self.made if self.moment is None else max(self.made, self.moment.seconds() + self.shift)

    def shifted(self, by: float) -> _Call:
        """It, so much later."""
        return replace(self, made=self.made + by, shift=self.shift + by)


@dataclass(frozen=True)
class _Waited:
    """What a step had when a call was last waited for: its calls, seconds of waiting, and of these, the clock's own."""

    calls: int = 0
    idle: float = 0.0
    own: float = 0.0


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank, in seconds since the step before ended.

    Attributes:
        specs: the tensors, in the order in which they came.
        ready: float64 (tensors,), when each came, less what was waited for others before. On a GPU, where a tensor
            comes when its kernels are queued, it is when the GPU has passed these, by events.
        seconds: when all of them were waited for.
        pushed: whether any was pushed.
    """

    specs: tuple[TensorSpec, ...]
    ready: np.ndarray
    seconds: float
    pushed: bool = False


@dataclass(frozen=True)
class Computing:
    """What usually comes before the messages of a step, on one rank.

    Attributes:
        first: seconds until the first tensor comes; last: until the last one.
    """

    first: float
    last: float

    @classmethod
    def of(cls, steps: Iterable[RecordedStep]) -> Computing:
        """The medians of steps, which have tensors."""
        first, last = np.median([(step.ready.min(), step.ready.max()) for step in steps], axis=0)
        return cls(float(first), float(last))

    def is_late(self, step: RecordedStep) -> bool:
        """Whether other work delayed a step, such as a validation or a checkpoint before it.

        It delays all tensors by more than computing them usually takes, and by half of what the step takes without it:
        a median copes with less. That messages make computing slower does not delay the first one, and that tensors
        come together does not delay the last one.
        """
        delay = min(float(step.ready.min()) - self.first, float(step.ready.max()) - self.last)
        return delay > max(self.last, _LATE * (step.seconds - delay))


class StepClock:
    """Tells steps apart: a step ends when a tensor comes that it already had; what is between two steps is compute.

    Calls that came since the last wait are then of the next step: their tensors were missing in the step that ends, and
    other ranks may push them later. So ranks that push in different orders agree on what a step has.

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
        self.seconds = self.wait = 0.0
        self._calls: list[_Call] = []
        self._names: set[str] = set()
        self._began: float | None = None
        self._waited = self._idle = self._own = 0.0
        self._before = _Waited()

    @property
    def begun(self) -> Set[str]:
        """The tensors of the step that runs so far."""
        return self._names

    def begins(self, names: Iterable[str]) -> bool:
        """Whether a call with these tensors begins another step."""
        return any(name in self._names for name in names)

    def repeats(self, call: CallKey) -> bool:
        """Whether a call, whose tensors are not known because it failed on this rank, would begin another step."""
        return any(known.key == call for known in self._calls)

    def end_step(self, call: CallKey | None = None, names: Sequence[str] = ()) -> None:
        """The step that the calls so far made is over, because a call with these tensors came; None: by itself."""
        calls, later = self._calls, list[_Call]()
        if call is not None:
            later = calls[self._before.calls :]
            pushed = {spec.name for known in later for spec in known.specs}
            if any(known.key == call for known in later) or not pushed.isdisjoint(names):
                later = []  # of the step that ends, which nobody has waited for
        calls = calls[: len(calls) - len(later)]
        self.specs = tuple(spec for known in calls for spec in known.specs)
        self.pushed = any(known.key[0] == "push" for known in calls)
        idle, own = (self._before.idle, self._before.own) if later else (self._idle, self._own)
        if self._began is not None and calls:
            arrived = [known.at - known.idle - self._began for known in calls]
            ready = np.repeat(arrived, [len(known.specs) for known in calls])
            self.steps.append(RecordedStep(self.specs, ready, self._waited - self._began - own, self.pushed))
            self.seconds += self.steps[-1].seconds
        self.count += 1
        self.wait = self._waited - calls[-1].at if calls else 0.0
        self._began, self._idle, self._own = self._waited, self._idle - idle, self._own - own
        self._before = _Waited()
        self._keep([replace(known, idle=known.idle - idle) for known in later])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done in the with-block, between two steps, is part of neither."""
        since = self._clock() - self._waited
        try:
            yield
        finally:
            if self._began is not None:
                before, self._began = self._began, self._clock() - since
                self._calls = [known.shifted(self._began - before) for known in self._calls]

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

    def called(self, call: CallKey, specs: Sequence[TensorSpec], moment: Moment | None = None) -> None:
        """A call came; ``moment``: when a GPU has its tensors."""
        self._calls.append(_Call(call, tuple(specs), self._clock(), self._idle, moment))
        self._names.update(spec.name for spec in specs)

    def waited(self, since: float, call: CallKey | None = None, failed: bool = False) -> None:
        """A call was waited for since then. Until a GPU had its tensors, the step computed.

        Args:
            failed: whether it failed, which it does on all ranks: it was no part of the step.
        """
        self._waited = self._clock()
        if failed:
            self._keep([known for known in self._calls if known.key != call])
        there = [known.at for known in self._calls if known.key == call and known.moment is not None]
        self._idle += max(0.0, self._waited - max([since, *there]))
        self._before = _Waited(len(self._calls), self._idle, self._own)

    def _keep(self, calls: list[_Call]) -> None:
        """These are the calls of the step that runs."""
        self._calls, self._names = calls, {spec.name for known in calls for spec in known.specs}
