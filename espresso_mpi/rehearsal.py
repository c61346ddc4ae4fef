"""Synchronising arrays like those of training between two of its steps: what trials and measurements do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from . import buffers, device
from .batches import batch_of
from .collectives.agreement import gather_small
from .collectives.transport import Transport
from .engine import Engine, Keeping, Unit
from .errors import ConfigError
from .options import Options
from .trace import Recorder
from .types import Plan, TensorSpec

_WARM_UP = 2
"""Trial steps of a plan that are not timed."""

_LEAST, _MOST = 5, 60
"""Trial steps of a plan that are timed."""


def trial(
    transport: Transport,
    options: Options,
    plan: Plan | None,
    specs: Sequence[TensorSpec],
    seconds: float,
    pause: float = 0.0,
) -> tuple[float, float]:
    """Median seconds of synchronising such tensors, all there at once, by a plan, and its uncertainty. Collective.

    The arrays are others, with normal values, and nothing of them is kept.

    Args:
        seconds: no further repetition is begun after this time, but for the first few.
        pause: seconds before each repetition in which nothing is sent.
    """
    with rehearsing(transport, replace(options, plan=plan, nonfinite="raise")) as session:
        values = [_values(spec, transport.rank) for spec in specs]
        arrays = {spec.name: _array(spec, x) for spec, x in zip(specs, values)}
        times: list[float] = []
        started = time.perf_counter()
        while len(times) < _WARM_UP + _MOST:
            for spec, x in zip(specs, values):
                _fill(arrays[spec.name], x)
            time.sleep(pause)
            gather_small(transport, np.zeros(8, np.uint8), 8)  # ranks begin together
            start = time.perf_counter()
            session.sync(arrays)
            mine = np.array([time.perf_counter() - start, time.perf_counter() - started])
            rows = np.array([row.view(np.float64) for row in gather_small(transport, mine.view(np.uint8), 16)])
            times.append(float(rows[:, 0].max()))
            if len(times) >= _WARM_UP + _LEAST and rows[0, 1] > seconds:
                break
    timed = np.array(times[_WARM_UP:])
    low, middle, high = np.percentile(timed, [25, 50, 75])
    return float(middle), float(high - low) / np.sqrt(timed.size)


def _values(spec: TensorSpec, rank: int) -> np.ndarray:
    return np.random.default_rng([rank, spec.size]).standard_normal(spec.size).astype(np.float32)


def _array(spec: TensorSpec, x: np.ndarray) -> Any:
    """An array like a tensor, where it is. bfloat16 is stood in for by float16, which takes as long."""
    kind = np.float16 if spec.dtype == "bfloat16" else np.dtype(spec.dtype)
    return device.empty(spec.size, kind, spec.device).reshape(spec.shape)


def _fill(array: Any, x: np.ndarray) -> None:
    device.copy(array.reshape(-1), x.astype(array.dtype, copy=False))


class Rehearsal:
    """A session's engine beside the session's own, on the same ranks: for what is measured between steps."""

    def __init__(self, transport: Transport, options: Options) -> None:
        self._transport, self._options = transport, options
        self._engine = Engine(transport, options, Keeping(), Recorder())

    def sync(self, grads: Any) -> Any:
        """As ``Session.sync``."""
        gradients = [buffers.adopt(name, value) for name, value in buffers.flatten(grads)]
        batch = batch_of(tuple(g.spec for g in gradients), self._options, self._transport.topology)
        return self._engine.wait(self._engine.submit(Unit(("sync", ""), grads, gradients, batch, title="a trial")))


@contextmanager
def rehearsing(transport: Transport, options: Options) -> Iterator[Rehearsal]:
    """A rehearsal; afterwards the transport serves the session's engine again."""
    before, background = transport.waiter.interrupted, transport.waiter.background
    try:
        yield Rehearsal(transport, options)
    finally:
        transport.waiter.interrupted, transport.waiter.background = before, background


def opener(transport: Transport, options: Options) -> Callable[..., Any]:
    """What the profiler opens sessions with."""

    def opened(**changes: Any) -> Any:
        checked, problem = Options.checked(**changes)
        if problem:
            raise ConfigError(problem)
        kept = {name: getattr(checked, name) for name in changes}
        return rehearsing(
            transport, replace(options, plan=None, **kept) if "plan" not in kept else replace(options, **kept)
        )

    return opened
