"""The base of the parts of a session: its engine, waiting for calls, and collective actions between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..autotune.clock import StepClock
from ..autotune.holding import Held
from ..cluster.launch import threads_per_rank
from ..collectives.data.layout import Topology
from ..collectives.messages import lifetime
from ..collectives.messages.agreement import on_every_rank
from ..collectives.messages.transport import Transport
from ..engine import guard
from ..engine.batches import check_fit
from ..engine.calls import PendingCall
from ..engine.diagnostics import agree_on_options
from ..engine.engine import Engine
from ..engine.intake import Intake
from ..errors import ConfigError, EspressoError, PlanError
from ..feedback import Feedback
from ..files.compiled import announce
from ..options import Options
from ..state.store import SyncState
from ..tracing.recording import Recorder
from .advice import Advice

_LOG = logging.getLogger("espresso_mpi")

S = TypeVar("S", bound="SessionBase")


class SessionBase:
    """An open session: it waits for calls, runs collective actions, and can be closed.

    Args:
        comm: as for ``Session``.
        options: the options, equal on all ranks.
        note: returns what the ranks compare when the session opens.

    Raises:
        ConfigError, MismatchError, PlanError: on every rank.
    """

    def __init__(self, comm: Any, options: Options, note: Callable[[], Mapping[str, Any]]) -> None:
        announce()
        self._options, self._recording = options, False
        self._transport = Transport.open(comm, options.transport(), agree_on_options, note)
        self._require_fit()
        self._step, self._seconds, self._warned = 0, 0.0, False
        self._clock: StepClock | None = None
        self._pending = guard.Pending()
        self._advice = Advice(silent=self.topology.size == 1 or self.rank > 0 or options.tuning is not None)
        self._intake = Intake(self._transport.topology, self._advice.look)
        self._recorder = Recorder()
        self._engine = Engine(self._transport, options, SyncState(), self._recorder)
        self._transport.register_calls(self._engine.unfinished)
        self._held = Held(self._engine, self._holding)
        _limit_threads(len(self._transport.node))
        lifetime.watch(self._engine)

    def _require_fit(self) -> None:
        """Refuse a plan that was made for other ranks or versions."""
        try:
            check_fit((), self._options, self._transport.topology)
        except PlanError:
            self._transport.close()
            raise

    def _holding(self) -> bool:
        """Whether pushes are held back: while steps are recorded, and by a plan that says so."""
        return self._clock is not None

    @property
    def topology(self) -> Topology:
        """Which ranks share a node.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     print(session.topology)  # of two ranks on one node
            1 x 2 ranks
        """
        return self._transport.topology

    @property
    def rank(self) -> int:
        """The number of this rank in the communicator.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.rank in range(session.topology.size)
            True
        """
        return self._transport.rank

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one node and exchange arrays on the host by shared memory, without MPI messages.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.shares_memory  # of two ranks on one node
            True
        """
        return self._transport.window_on_host(range(self.topology.size)) is not None

    def __repr__(self) -> str:
        o = self._options
        how = "a plan" if o.plan else f"compressor {o.compressor!r}, route {str(o.route) if o.route else 'by topology'}"
        return f"<Session of {self.topology}: {how}; step {self._step}{'' if self.usable else '; not usable'}>"

    @property
    def usable(self) -> bool:
        """Whether ``sync`` can be called: the session is neither closed nor broken by a failure.

        Example:
            >>> session = espresso_mpi.Session()
            >>> session.close()
            >>> session.usable
            False
        """
        return self._engine.broken is None

    @property
    def nonfinite(self) -> str:
        """The treatment of values that are not finite; see ``Session``.

        Example:
            >>> with espresso_mpi.Session(nonfinite="skip") as session:
            ...     session.nonfinite
            'skip'
        """
        return self._options.nonfinite

    @property
    def executors(self) -> dict[str, str]:
        """How each compressed tensor or group, and each dense one between nodes, ran the last time, by name.

        See docs/operation-tables.md.

        Example:
            >>> with espresso_mpi.Session(compressor="topk", feedback="plain:decay=0.9") as session:
            ...     mean = session.sync({"w": np.ones(10_000, np.float32)})
            ...     session.executors
            {'w': 'Python: feedback plain:decay=0.9'}
        """
        return self._engine.executors

    def stays_dense(self, name: str, nbytes: int) -> bool:
        """Whether ``min_bytes`` or ``dense`` says that a tensor is not compressed.

        Example:
            >>> with espresso_mpi.Session(compressor="int8", dense=["head.*"]) as session:
            ...     [session.stays_dense(name, 40_000) for name in ("w", "head.w")]
            [False, True]
        """
        return self._options.stays_dense(name, nbytes)

    @property
    def compressor(self) -> str | None:
        """The spec of the compressor of all tensors; ``"none"`` if they are dense; None if a plan chooses.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     session.compressor
            'int8'
        """
        planned = self._options.plan is not None or self._options.tuning is not None
        return None if planned else self._options.compressor

    @property
    def feedback(self) -> Feedback:
        """The error feedback; see ``Session``.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     session.feedback.kind
            'auto'
        """
        return self._options.feedback

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait_all(self) -> None:
        """Wait for all pushes that were not waited for.

        Raises:
            EspressoError: as ``Handle.wait``, for the first tensor with an error, after all have finished.

        Example:
            >>> grads = {"head": np.ones(4, np.float32), "body": np.ones(9, np.float32)}
            >>> with espresso_mpi.Session() as session:
            ...     handles = [session.push(name, grad) for name, grad in grads.items()]
            ...     session.wait_all()  # now all of them hold their means
        """
        errors = []
        for call in self._pending:
            try:
                self._wait(call, read=False)
            except EspressoError as error:
                errors.append(error)
        self._warn_of_saturation()
        if errors:
            raise errors[0]

    def _wait(self, call: PendingCall, read: bool = True) -> Any:
        """The result of a call that was submitted."""
        return self._result(call, lambda: self._engine.wait_for(lambda: call.finished), read)

    def _run(self, call: PendingCall) -> Any:
        """Submit a call; returns its result."""
        return self._result(call, lambda: self._engine.run(call))

    def _result(self, call: PendingCall, wait: Callable[[], None], read: bool = True) -> Any:
        self._held.release()
        self._engine.require_other_thread(call)
        start = time.perf_counter()
        try:
            wait()
        finally:
            if call.finished:
                self._pending.remove(call)
            if self._clock is not None and call.key[0] in ("sync", "push"):
                self._clock.waited(start, call.key, failed=call.error is not None)
            self._seconds += time.perf_counter() - start
        self._release(call, read)
        if call.error is not None:
            raise call.error
        return call.result

    def _ended(self, call: PendingCall) -> bool:
        """Whether a call has finished, with a result or an error."""
        self._held.release()
        if call.finished:
            self._release(call)
            if call.error is None:
                self._pending.remove(call)
        return call.finished

    def _release(self, call: PendingCall, read: bool = True) -> None:
        changed = self._intake.release(call, read)
        if changed is not None:
            self._engine.shutdown(str(changed))

    def _warn_of_saturation(self) -> None:
        if self._engine.tally["saturated"] and not self._warned:
            self._warned = True
            _LOG.warning(
                "step %d: values or sums left their range and were cut (stats().saturated counts them): scale the loss "
                "down; if the compressor sums integers, use fewer levels",
                self._step,
            )

    # --- together -----------------------------------------------------------------------------------------------------

    def _between_steps(self, name: str, action: Callable[[], Any]) -> Any:
        """As ``_together``, but refused on all ranks if a rank has tensors under way: they change the state."""
        self._held.release()
        busy = self._engine.busy

        def require_idle() -> None:
            if busy:
                raise ConfigError(f"{name}: tensors are still under way; call wait_all() before it")

        def alone() -> Any:
            on_every_rank(self._transport, require_idle, ConfigError)
            return action()

        return self._together(name, alone)

    def _together(self, name: str, action: Callable[[], Any]) -> Any:
        """Run an action on all ranks while no tensor is under way. Collective."""
        self._engine.require_usable(waits=True)
        self._held.release()
        return self._wait(self._engine.submit(PendingCall((name, ""), action=action)))

    def _refuse_while_recording(self, name: str) -> None:
        """Refuse a call while steps are recorded: options and pending residuals are those of the recording."""
        if self._recording:
            raise ConfigError(f"{name}: steps are being recorded; call it before or after record_workload()")

    def _follow(self, options: Options, sync_state: SyncState | None = None) -> None:
        """Use other options from now on."""
        self._options = options
        self._intake.batches.clear()
        self._engine.follow(options, sync_state or self._engine.sync_state)

    # --- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish all pushes, and free the communicator and the shared memory. Collective.

        On a session that has failed, it does nothing. An error ends the session all the same.

        Raises:
            EspressoError: as ``wait_all``. RankTimeoutError: a rank did not come.

        Example:
            >>> session = espresso_mpi.Session()
            >>> mean = session.sync(np.ones(4, np.float32))
            >>> session.close()  # or use the session in a with-block
        """
        if not self.usable:
            return
        self._engine.require_other_thread()
        try:
            self.wait_all()
        finally:
            if self.usable:
                self._close()

    def _close(self) -> None:
        try:
            self._together("close", self._transport.close)
        except EspressoError as error:  # such as another call of another rank, whose own close would wait for this one
            if self.usable:
                self._engine.shutdown(f"its close() failed: {error}")
            raise
        self._engine.shutdown("it was closed", notify=False)

    def __deepcopy__(self: S, known: Any) -> S:
        """A copy of what holds a session, such as a model, has the same session."""
        return self

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may wait for this one, and may never call close
            self._engine.shutdown(f"an exception left its with-block: {kind.__name__}: {error}")


def _limit_threads(local_ranks: int) -> None:
    """Share the node's cores among its ranks."""
    from ..compressors.kernels.cpu import host

    host.limit_threads(threads_per_rank(local_ranks))
