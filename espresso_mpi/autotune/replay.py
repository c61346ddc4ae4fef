"""Replays of a training step with other arrays, between two of its steps; and sessions for measurements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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


class Replayed:
    """Replays of a training step by one plan. Collective, as are its methods.

    Gradients are ready when the workload says so. The processor computes until then, because it may be the one that
    also synchronises. The arrays are not those of the training: they have normal values, and nothing of them is kept.

    Args:
        pushed: gradients are pushed when they are ready; else all are synchronised at once at the end.

    Attributes:
        times: seconds of each step on the slowest rank.
    """

    def __init__(
        self, transport: Transport, options: Options, plan: Plan | None, workload: Workload, pushed: bool,
        arrays: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._transport, self._session = transport, ReplaySession(transport, replace(options, plan=_ended(plan)))
        self._step = _ReplayedStep(self._session, workload, SyntheticLoad(transport, workload.device), pushed, arrays)
        self.times: list[float] = []

    def warm_up(self) -> float:
        """A step that is not counted; its seconds."""
        floats(self._transport, 0.0)  # ranks begin together
        start = time.perf_counter()
        self._step.run()
        return float(floats(self._transport, time.perf_counter() - start).max())

    def run(self) -> None:
        """A step that is counted."""
        self.times.append(self.warm_up())

    @property
    def seconds(self) -> float:
        """The median."""
        return float(np.median(self.times))

    @property
    def uncertain(self) -> float:
        """How far it may be from that of many steps."""
        low, high = np.percentile(self.times, [25, 75])
        return float(high - low) / math.sqrt(len(self.times))

    def close(self) -> None:
        """Shut the engine down, on this rank."""
        self._session.shutdown()


def arrays_of(workload: Workload, rank: int) -> dict[str, Any]:
    """Arrays for replays, in the order of the backward pass."""
    return {tensor.name: _array(tensor, workload.device, rank) for tensor in workload.tensors}


def _ended(plan: Plan | None) -> Plan | None:
    return None if plan is None else _settled(plan)


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
        self, session: ReplaySession, workload: Workload, load: SyntheticLoad, pushed: bool, arrays: Mapping[str, Any]
    ) -> None:
        self._session, self._load, self._pushed, self._arrays = session, load, pushed, arrays
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
