"""Methods on the same arrays: checked, warmed up, timed in turns, their bytes counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...tracing import pictures
from ...types import TensorSpec
from .checks import Inputs, wrong_of, wrong_together
from .kernels import kernel_seconds
from .rows import bandwidths
from .timing import Repetitions, TimedMethod, in_turns

CHECKED = 1 << 24
"""Bytes of the largest array that is checked where many are measured: one rank does for the check what all ranks do."""


@dataclass(frozen=True)
class Measurement:
    """What came out of a method.

    Attributes:
        times: seconds of the slowest rank in every repetition.
        cpu: seconds of processor time of all ranks together, likewise.
        wrong: elements, over all ranks; None if it was not checked.
        sent: bytes of every rank by level, in one run; None where that cannot be told.
        kernels: seconds of processor time of its kernels alone, in one run; None where that cannot be told.
    """

    method: TimedMethod
    times: np.ndarray
    cpu: np.ndarray
    wrong: int | None
    sent: Sequence[Mapping[str, int]] | None
    kernels: float | None

    @property
    def seconds(self) -> float:
        """The median."""
        return float(np.median(self.times))

    def fields(self, nbytes: int, ranks: int, collective: str = "allreduce") -> dict[str, Any]:
        """Those of ``rows.Timing``."""
        sent = self.sent
        return {
            "method": self.method.name,
            "nbytes": nbytes,
            "seconds": self.seconds,
            "p99": float(np.percentile(self.times, 99)),
            "repeats": len(self.times),
            "cpu": float(np.median(self.cpu)) / (nbytes * ranks) if nbytes else None,
            "kernels": None if self.kernels is None or not nbytes else self.kernels / (nbytes * ranks),
            "wire_bytes": None if sent is None else sum(sum(levels.values()) for levels in sent),
            "inter_bytes": None if sent is None else sum(levels["inter"] for levels in sent),
            "wrong": self.wrong,
            **bandwidths(nbytes, self.seconds, ranks, collective),
        }


def measure(
    comm: Any,
    methods: Sequence[TimedMethod],
    repetitions: Repetitions,
    *,
    check: bool = True,
    beside: Callable[[int], None] = lambda repetition: None,
    trace: Path | None = None,
) -> list[Measurement]:
    """Check, run once outside the clock, time in turns, trace once more if asked, and close. Collective.

    Args:
        beside: see ``in_turns``.
        trace: the methods' names are put before its suffix.
    """
    wrong = [c.check() if check and c.check is not None else None for c in methods]
    in_turns(comm, methods, Repetitions(1))  # allocates and compiles
    before = [None if c.sent is None else dict(c.sent()) for c in methods]
    times = in_turns(comm, methods, repetitions, beside)
    sent = [_sent(comm, c, earlier, len(times.seconds)) for c, earlier in zip(methods, before)]
    kernels = [None if c.kernels is None else c.kernels() for c in methods]
    for c in methods:
        if trace is not None and c.trace is not None:
            c.trace(trace)
        c.close()
    return [Measurement(*of_one) for of_one in zip(methods, times.seconds.T, times.cpu.T, wrong, sent, kernels)]


def _sent(comm: Any, c: TimedMethod, before: Mapping[str, int] | None, times: int) -> list[dict[str, int]] | None:
    """What every rank has sent since, a run."""
    if c.sent is None or before is None:
        return None
    found: list[dict[str, int]] = comm.allgather(
        {level: (count - before[level]) // times for level, count in c.sent().items()}
    )
    return found


def by_session(comm: Any, inputs: Inputs, grads: Mapping[str, np.ndarray], spec: str, **options: Any) -> TimedMethod:
    """One ``sync`` of arrays, by a session of its own. Collective.

    Args:
        grads: the arrays, the same memory in every run, as in training; ``inputs`` are put there before.
        options: of the session.
    """
    from ...session import Session

    session = Session(comm, compressor=spec, **options)
    session.judge_for(None)

    def check() -> int:
        with Session(comm, compressor=spec, **options, feedback=False) as single:
            single.judge_for(None)
            results = inputs.copies()
            single.sync(results)
            return wrong_together(comm, results.values(), lambda: wrong_of(single, results, inputs.of_all()))

    def sent() -> Mapping[str, int]:
        return session.stats().bytes_by_level

    def trace(path: Path) -> None:
        inputs.refill(grads)
        with pictures.tracing(session, path, spec):
            session.sync(grads)

    routes = [session.strategy(TensorSpec(name, x.shape, "float32")).route for name, x in grads.items()]
    return TimedMethod(
        spec, partial(session.sync, grads), check, partial(inputs.refill, grads),
        routes[0] if len(routes) == 1 else None, sent, trace, session.close,
        kernels=partial(kernel_seconds, comm, session, grads) if any(r.compressed for r in routes) else None,
    )  # fmt: skip
