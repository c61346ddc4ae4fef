"""The session: what a user holds. It checks what comes in, hands it to the engine, and keeps what lasts."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .arrays import buffers
from .collectives import traces
from .collectives.messages.transport import MESSAGE_BYTES
from .engine.batches import other_versions
from .engine.calls import PendingCall
from .engine.diagnostics import CallKey
from .engine.intake import Flat, checked_name
from .feedback import Feedback
from .options import DEFAULT_SEGMENT, DEFAULT_TIMEOUT, Options, Tuning
from .sessions.checkpoints import Checkpoints
from .sessions.collectives import Collectives
from .sessions.handles import Handle
from .sessions.planning import Planning
from .tracing.stats import Stats
from .types import Plan, Route

_LOG = logging.getLogger("espresso_mpi")


class Session(Planning, Checkpoints, Collectives):
    """Averages gradients over the ranks of a communicator.

    Args:
        comm: mpi4py intracommunicator, default ``MPI.COMM_WORLD``; it is duplicated.
        compressor: spec of a compressor such as ``"topk:ratio=0.01"``, or ``"none"``.
        route: name or spec of a Route; default: by a rule from the nodes and the compressor (docs/routes.md).
        plan: a Plan with a strategy for every tensor, or the path of a file that one was saved in, instead of
            compressor and route. ``"auto"``: the first steps are dense and timed; then the session measures the cluster
            for a few seconds, plans, and goes on by the plan. See docs/planner.md.
        compressors: with ``plan="auto"``: specs of those that it may use; default: those of ``Tuning``.
        tuning: with ``plan="auto"``: a ``Tuning``, how long to watch and measure, and when to plan anew.
        seed: of stochastic compressors; the same on every rank.
        min_bytes: tensors below this many bytes stay dense, unless a plan says otherwise.
        timeout: seconds after which a rank that does not come is reported.
        feedback: what becomes of what compression loses, a ``Feedback`` or its spec: ``"auto"`` (add it in the next
            step, where the compressor allows it), ``"plain"``, ``"plain:decay=0.9"``, ``"ef21"``,
            ``"ef21:momentum=0.1"`` or ``"none"``.
        nonfinite: a NaN or an infinity in a gradient on any rank, or a value too large to be compressed and summed
            (2**126 or more, divided by the number of ranks rounded up to a power of two): ``"raise"`` NonFiniteError
            on all ranks, or ``"skip"`` the tensor in this step: it becomes zero on all ranks and its residual stays as
            it was; or ``"skip_all"``: every tensor of the call becomes NaN on all ranks, by which a loss scaler knows
            that the step is to be left out, and what the session keeps of them stays as it was. See docs/torch.md.
        window_bytes: half of a rank's share of the node's shared memory window; 0 uses MPI messages instead.
        message_bytes: longest message between nodes; longer ones are cut.
        segment_bytes: a tensor with more bytes than this between nodes is cut into segments that follow each other
            along the route, so that one's sums hide behind another's messages; 0 leaves it whole. Compressors that
            choose (topk) choose in each segment.
        fuse_bytes: dense tensors below this many bytes share a buffer; None measures, once, where copying them costs
            less than a collective for each.
        nodes: groups of ranks to treat as nodes, such as the sockets of one; default: as MPI finds them.
        debug: find tensors that are changed while they are on their way by checksums, whatever framework they are of:
            each travels as a copy, and its memory is read some five times more. Default: the environment variable
            ``ESPRESSO_DEBUG`` (1 or 0), else False.

    Raises:
        ConfigError: an option does not fit; MismatchError: ranks chose different options; on every rank.

    Example:
        >>> grads = {"w": np.full((128, 128), 0.5, np.float32)}  # every rank has its own
        >>> with espresso_mpi.Session(compressor="fp16") as session:
        ...     mean = session.sync(grads)  # in place
        >>> float(grads["w"][0, 0])
        0.5
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        compressor: str = "none",
        route: str | Route | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        compressors: Sequence[str] | None = None,
        tuning: Tuning | None = None,
        seed: int = 0,
        min_bytes: int = 16384,
        timeout: float = DEFAULT_TIMEOUT,
        feedback: Feedback | str | bool = "auto",
        nonfinite: str = "raise",
        window_bytes: int = 4 << 20,
        message_bytes: int = MESSAGE_BYTES,
        segment_bytes: int = DEFAULT_SEGMENT,
        fuse_bytes: int | None = None,
        nodes: Sequence[Sequence[int]] | None = None,
        debug: bool | None = None,
    ) -> None:
        auto = isinstance(plan, str) and plan == "auto"
        options, problem = Options.checked(
            compressor=compressor, route=route, plan=None if auto else plan, tuning=(auto, tuning, compressors),
            seed=seed, min_bytes=min_bytes, timeout=timeout, feedback=feedback, nonfinite=nonfinite,
            window_bytes=window_bytes, message_bytes=message_bytes, segment_bytes=segment_bytes, fuse_bytes=fuse_bytes,
            nodes=nodes, debug=debug,
        )  # fmt: skip
        super().__init__(
            comm, options, lambda: {"problem": problem or other_versions(options.plan), "options": options.described()}
        )

    # --- synchronising ------------------------------------------------------------------------------------------------

    def sync(self, grads: Any) -> Any:
        """Replace every array by its mean over the ranks.

        Args:
            grads: one array, or lists, tuples and dicts of them, nested as you like; None entries are allowed where all
                ranks have them. numpy, CuPy, torch, or anything with DLPack or the CUDA array interface; float32,
                float16, bfloat16, float64; writable. Strided ones travel as a copy. A tensor's residual is found by its
                name, the keys on the way to it, so one name must stand for one tensor in every call.

        Returns:
            ``grads`` itself, updated in place; with immutable arrays (JAX) the same containers with new arrays.

        Raises:
            GradientError, MismatchError, NonFiniteError, PlanError, ConfigError: on every rank, naming rank and tensor;
                nothing was changed.
            GradientError: a tensor was changed meanwhile; RankTimeoutError, RemoteError, TransportError: a rank did not
                come, or failed, or MPI did; the gradients are undefined and the session cannot be used any more.
        """
        self._engine.require_usable()
        call = self._pending_call(("sync", ""), grads, lambda: buffers.flatten(grads), f"sync number {self._step + 1}")
        result = self._wait(self._engine.submit(call))
        self._step += 1
        self._warn_of_saturation()
        return result

    def push(self, name: str, grad: Any, priority: float | None = None) -> Handle:
        """Start to replace an array by its mean over the ranks, and return at once.

        A thread does the work while the caller computes on. The array must not be read or changed before ``wait``; one
        that was is a GradientError of ``wait`` as far as it can be known, see docs/torch.md.
        Ranks may push in different orders: tensors travel in the order in which they were first pushed (on rank 0,
        where ranks differ), which in training is that of the backward pass, those of a higher priority before others.

        Args:
            name: of the tensor; the same on every rank. It may be pushed again, from other memory, before it was waited
                for.
            grad: one array, as for ``sync``, or None where all ranks have none.
            priority: the higher, the sooner; the same on every rank. Default 0.

        Raises:
            ConfigError: the MPI library does not allow calls from a second thread; use ``sync``. Everything else is
                raised by ``Handle.wait``, on every rank.
        """
        self._engine.require_usable()
        self._transport.require_threads()
        key = ("push", str(name))
        call = self._pending_call(key, grad, lambda: [(checked_name(name), grad)], f"push({name!r})", priority)
        handle = Handle(self, call)
        if call.watch is not None:
            call.watch.reader = weakref.ref(handle)
        self._held.submit(call)
        if self._pending.add(call) and self._transport.rank == 0:
            _LOG.warning(
                "push(%r): several pushes of it were not waited for. An array holds its mean only when its push has "
                "ended: call wait_all(), or wait() of each handle, before gradients are used",
                name,
            )
        return handle

    def _pending_call(
        self, key: CallKey, given: Any, flat: Flat, title: str, priority: float | None = None
    ) -> PendingCall:
        return self._intake.pending_call(key, given, flat, title, priority, lambda: self._options, self._watch)

    # --- seeing what happens ------------------------------------------------------------------------------------------

    def stats(self, residuals: bool = False) -> Stats:
        """Times, bytes and skipped steps so far, of this rank, in all and for each tensor.

        Args:
            residuals: also work out the norm of each tensor's residual, which reads all of them; of a tensor that is
                under way it may be between two steps.
        """
        engine, recorder = self._engine, self._recorder
        norms = engine.sync_state.residual_norms() if residuals else {}
        return Stats(
            self._step,
            self._seconds,
            dict(recorder.seconds),
            self._transport.sent,
            dict(engine.nonfinite.skipped),
            engine.tally["saturated"],
            recorder.tensors(norms),
            engine.nonfinite.skipped_calls,
        )

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Record the steps of a with-block on all ranks, and write them as one file for Perfetto or chrome://tracing.

        Collective at both ends; rank 0 writes. See docs/tracing.md.

        Raises:
            ConfigError: the file cannot be written; StateError: this session is being traced already; on every rank.
        """
        recorder, transport = self._recorder, self._transport
        before = self._together("trace", lambda: traces.begin(recorder, transport, path))
        try:
            yield
        except BaseException:
            recorder.stop()
            raise
        self._together("trace", lambda: traces.finish(recorder, transport, path, before))
