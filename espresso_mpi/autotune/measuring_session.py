"""Sessions for measurements, between two steps of another session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..arrays import buffers, device
from ..collectives.messages.transport import Transport
from ..engine.batches import Batches, batch_of
from ..engine.calls import PendingCall
from ..engine.diagnostics import CallKey
from ..engine.engine import Engine
from ..errors import ConfigError
from ..options import Options
from ..state.store import SyncState
from ..tracing.recording import Recorder


class MeasuringSession:
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
        streams = buffers.streams_of(gradients)
        gpu, arrival = (device.current_gpu(), device.Arrival(streams)) if streams else (None, None)
        return PendingCall(key, given, gradients, batch, title="a measurement", gpu=gpu, arrival=arrival)

    def shutdown(self) -> None:
        """Shut its engine down, on this rank."""
        self._engine.shutdown("the measurement is over", notify=False)


@contextmanager
def measuring_session(transport: Transport, options: Options) -> Iterator[MeasuringSession]:
    """A measuring session for the with-block. Its engine monitors only its own waits, see ``Waiter.monitored``."""
    session = MeasuringSession(transport, options)
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
        return measuring_session(transport, replace(options, **kept))

    return opened
