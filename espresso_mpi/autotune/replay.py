"""Replays of a training step with other arrays, between two of its steps; and sessions for measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from .. import compressors
from ..arrays import buffers, device
from ..collectives.messages.agreement import floats
from ..collectives.messages.transport import Transport
from ..engine.batches import Batches, batch_of
from ..engine.calls import PendingCall
from ..engine.diagnostics import CallKey
from ..engine.engine import Engine
from ..errors import ConfigError
from ..options import Options
from ..planner.model.workload import Workload, WorkloadTensor
from ..state.store import SyncState
from ..tracing.recording import Recorder
from ..types import DeviceKind, Plan, Strategy
from .synthetic_load import SyntheticLoad

_WARM_UP = 1
"""Replayed steps that are not timed."""

_LEAST, _MOST = 3, 100
"""Replayed steps that are timed, at least and at most."""


def replay(
    transport: Transport, options: Options, plan: Plan | None, workload: Workload, seconds: float, pushed: bool
) -> tuple[float, float]:
    """Median seconds of a replayed step by a plan, on the slowest rank, and their uncertainty. Collective.

    Gradients are ready when the workload says so. The processor computes until then, because it may be the one that
    also synchronises. The arrays are not those of the training: they have normal values, and nothing of them is kept.

    Args:
        seconds: no further repetition is begun after this time, but for the first few.
        pushed: gradients are pushed when they are ready; else all are synchronised at once at the end.
    """
    with replay_session(transport, replace(options, plan=plan and _settled(plan))) as session:
        step = _ReplayedStep(session, workload, SyntheticLoad(transport, workload.device), transport.rank, pushed)
        times: list[float] = []
        started = time.perf_counter()
        while len(times) < _WARM_UP + _MOST:
            floats(transport, 0.0)  # ranks begin together
            start = time.perf_counter()
            step.run()
            rows = floats(transport, time.perf_counter() - start, time.perf_counter() - started)
            times.append(float(rows[:, 0].max()))
            if len(times) >= _WARM_UP + _LEAST and rows[0, 1] > seconds:
                break
    timed = np.array(times[_WARM_UP:])
    low, middle, high = np.percentile(timed, [25, 50, 75])
    return float(middle), float(high - low) / np.sqrt(timed.size)


def _settled(plan: Plan) -> Plan:
    """The plan with all parameter schedules at their end, for any tensors: bfloat16 is replaced by another type."""
    strategies = {
        name: Strategy("none" if s.compressor == "none" else str(compressors.get(s.compressor).at(None)), s.route)
        for name, s in plan.strategies.items()
    }
    return replace(plan, strategies=strategies, made_for=None)


class _ReplayedStep:
    """The step of a workload with arrays of its own."""

    def __init__(
        self, session: ReplaySession, workload: Workload, load: SyntheticLoad, rank: int, pushed: bool
    ) -> None:
        self._session, self._load, self._pushed = session, load, pushed
        self._arrays = {tensor.name: _array(tensor, workload.device, rank) for tensor in workload.tensors}
        self._gaps = [float(gap) for gap in workload.backward]

    def run(self) -> None:
        """Compute and synchronise."""
        if not self._pushed:
            self._load.run(sum(self._gaps))
            self._session.sync(self._arrays)
            return
        for gap, (name, array) in zip(self._gaps, self._arrays.items()):
            self._load.run(gap)
            self._session.push(name, array)
        self._session.wait_all()


def _array(tensor: WorkloadTensor, where: DeviceKind, rank: int) -> Any:
    """An array like a tensor, on its device. float16 replaces bfloat16; it takes as long."""
    kind = np.float16 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype)
    values = np.random.default_rng([rank, tensor.size]).standard_normal(tensor.size, np.float32)
    array = device.empty(tensor.size, kind, where)
    device.copy(array, values.astype(kind, copy=False))
    return array.reshape(tensor.shape or (tensor.size,))


class ReplaySession:
    """A second engine on the transport of a session: for what is measured between two of its steps."""

    def __init__(self, transport: Transport, options: Options) -> None:
        self._transport, self._options = transport, options
        self._engine = Engine(transport, options, SyncState(), Recorder())
        self._batches = Batches()
        self._open: list[PendingCall] = []

    def sync(self, grads: Any) -> Any:
        """As ``Session.sync``."""
        return self._engine.wait(self._engine.submit(self._pending_call(("sync", ""), grads, buffers.flatten(grads))))

    def push(self, name: str, grad: Any) -> None:
        """As ``Session.push``."""
        self._open.append(
            self._engine.submit(self._pending_call(("push", name), grad, [(name, grad)]), background=True)
        )

    def wait_all(self) -> None:
        """As ``Session.wait_all``."""
        calls, self._open = self._open, []
        for call in calls:
            self._engine.wait(call)

    def _pending_call(self, key: CallKey, given: Any, flat: Iterable[tuple[str, Any]]) -> PendingCall:
        gradients = [buffers.adopt(name, value) for name, value in flat]
        specs = tuple(gradient.spec for gradient in gradients)
        options, topology, alone = self._options, self._transport.topology, key[0] == "sync"
        batch = self._batches.find(key, specs, lambda new: batch_of(new, options, topology, alone))
        streams = [gradient.stream for gradient in gradients if gradient.stream is not None]
        gpu, arrival = (device.current_gpu(), device.Arrival(streams)) if streams else (None, None)
        return PendingCall(key, given, gradients, batch, title="a replay", gpu=gpu, arrival=arrival)

    def shutdown(self) -> None:
        """Shut its engine down, on this rank."""
        self._engine.shutdown("the replay is over", notify=False)


@contextmanager
def replay_session(transport: Transport, options: Options) -> Iterator[ReplaySession]:
    """A replay session for the with-block. Its engine monitors only its own waits, see ``Waiter.monitored``."""
    session = ReplaySession(transport, options)
    try:
        yield session
    finally:
        session.shutdown()
        transport.forget_kinds()


def opener(transport: Transport, options: Options) -> Callable[..., Any]:
    """What the profiler opens sessions with."""

    def opened(**changes: Any) -> Any:
        checked, problem = Options.checked(**changes)
        if problem:
            raise ConfigError(problem)
        kept = {"plan": None, **{name: getattr(checked, name) for name in changes}}
        return replay_session(transport, replace(options, **kept))

    return opened
