"""What ``Session(plan="auto")`` goes by: its settings, and a clock that tells the steps of a training loop apart."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np

from . import compressors
from .errors import ConfigError
from .types import TensorSpec

Call = tuple[str, str]
"""What a call is known by: sync, or push and the tensor's name."""


LIKE_FP32 = ("fp16", "bf16", "int8", "int4")
"""Methods that plans may use unless others are named, since a plan is chosen by its speed alone.

A GPT of 3 million parameters trained by them as with fp32 (``bench optimizers``, 200 steps; validation loss against
that of fp32): under AdamW ``fp16`` and ``bf16`` 0.0 %, ``int8`` -0.1 to 0.0 % and ``int4`` -0.1 to +0.9 % over two
seeds, the last two with feedback; under momentum SGD at the best rate 0.0 % for all. ``bf16`` holds every magnitude of
a float32, those of scaled losses too. Left out are ``powersgd:rank=4`` (+2.3 % under AdamW), ``onebit`` (+16 %) and
``topk`` at 1 % (+30 %).
"""


@dataclass(frozen=True)
class Tuning:
    """How a session plans for itself.

    Attributes:
        compressors: spellings that a plan may use; whatever they lose is fed back. The default are those that train as
            uncompressed gradients do under AdamW, see ``LIKE_FP32``; stronger ones are the user's to name.
        skip: first steps, which compile and allocate and so are not timed.
        steps: dense steps that are timed, then the plan is made.
        seconds: about how long the micro-benchmarks take, and trials of the best plans once more.
        check: steps between comparisons of measured step times with the plan's.
        factor: how far they may differ, either way, until the session measures and plans anew.
        every: least number of steps from one plan to the next.

    Raises:
        ConfigError: a value is not in its range.

    Example:
        >>> tuning = espresso_mpi.Tuning(compressors=["fp16", "int8"], steps=12)
        >>> session = espresso_mpi.Session(plan="auto", tuning=tuning)
        >>> session.close()
    """

    compressors: tuple[str, ...] = LIKE_FP32
    skip: int = 2
    steps: int = 8
    seconds: float = 8.0
    check: int = 50
    factor: float = 1.5
    every: int = 500

    def __post_init__(self) -> None:
        if isinstance(self.compressors, str):
            raise ConfigError(f"tuning: compressors={self.compressors!r}; expected a list such as ['fp16', 'int8']")
        spellings = tuple(str(compressors.get(text)) for text in self.compressors if text != "none")
        object.__setattr__(self, "compressors", spellings)
        votes = [text for text in spellings if not compressors.get(text).averages]
        if votes:
            raise ConfigError(
                f"tuning: {', '.join(votes)}: the result is no mean, so a plan may not choose between it and dense "
                f"tensors; pass compressor={votes[0]!r} for all tensors instead"
            )
        for name, least in (("skip", 0), ("steps", 3), ("check", 1), ("every", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"tuning: {name}={value!r}; expected a whole number from {least} on")
        for name, above in (("seconds", 0.0), ("factor", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not above < value < 1e9:
                raise ConfigError(f"tuning: {name}={value!r}; expected a number above {above:g}")

    @property
    def doubtful(self) -> tuple[str, ...]:
        """The spellings of methods that are not known to train as uncompressed gradients do under AdamW."""
        return tuple(text for text in self.compressors if text.partition(":")[0] not in LIKE_FP32)

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))


@dataclass(frozen=True)
class Step:
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
    """

    def __init__(self, keep: int = 16, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.steps: deque[Step] = deque(maxlen=keep)
        self.count = 0
        self._calls: list[tuple[Call, tuple[TensorSpec, ...], float]] = []
        self._names: set[str] = set()
        self._began: float | None = None
        self._waited = self._idle = 0.0

    def begins(self, specs: Sequence[TensorSpec]) -> bool:
        """Whether a call with these tensors begins another step."""
        return any(spec.name in self._names for spec in specs)

    def repeats(self, call: Call) -> bool:
        """Whether a call, of tensors that are not known because it failed on this rank, would begin another step."""
        return any(known == call for known, _, _ in self._calls)

    def end_step(self) -> None:
        """The step that these calls made is over."""
        if self._began is not None and self._calls:
            specs = tuple(spec for _, tensors, _ in self._calls for spec in tensors)
            ready = np.array([at - self._began for _, tensors, at in self._calls for _ in tensors])
            pushed = any(call[0] == "push" for call, _, _ in self._calls)
            self.steps.append(Step(specs, ready, self._waited - self._began, pushed))
        self.count += 1
        self._began, self._calls, self._idle = self._waited, [], 0.0
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

    def called(self, call: Call, specs: Sequence[TensorSpec]) -> None:
        """A call came."""
        self._calls.append((call, tuple(specs), self._clock() - self._idle))
        self._names.update(spec.name for spec in specs)

    def waited(self, since: float, failed: Call | None = None) -> None:
        """A call was waited for since then; one that failed, which it does on all ranks, was no part of the step."""
        self._waited = self._clock()
        self._idle += self._waited - since
        if failed is not None:
            self._calls = [known for known in self._calls if known[0] != failed]
            self._names = {spec.name for _, tensors, _ in self._calls for spec in tensors}
