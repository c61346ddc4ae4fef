"""The public session: it checks its arguments, passes calls to the engine, and holds the state."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from .arrays import buffers
from .collectives import traces
from .collectives.messages.transport import MESSAGE_BYTES
from .engine.batches import other_versions
from .engine.calls import PendingCall
from .engine.diagnostics import CallKey
from .engine.intake import Flat, checked_arrays, checked_name
from .errors import ConfigError
from .feedback import Feedback
from .options import DEFAULT_SEGMENT, DEFAULT_TIMEOUT, Options
from .sessions.checkpoints import Checkpoints
from .sessions.collectives import Collectives
from .sessions.handles import Handle
from .sessions.memory import Memory
from .sessions.missing import with_zeros
from .sessions.planning import Planning
from .tracing.stats import Stats
from .tuning import Tuning
from .types import Plan, Route

_LOG = logging.getLogger("espresso_mpi")


class Session(Planning, Checkpoints, Collectives, Memory):
    """Averages gradients over the ranks of a communicator.

    Args:
        comm: an mpi4py intracommunicator. The session duplicates it. Default: ``MPI.COMM_WORLD``.
        compressor: spec of a compressor such as ``"topk:ratio=0.01"``, or ``"none"``.
        route: name or spec of a Route. By default, the session chooses it from the nodes and the compressor
            (docs/routes.md).
        plan: a Plan with a strategy for every tensor, or the path of a plan file, instead of compressor and route. With
            ``"auto"``, the session times the first steps, tries strategies on the next ones, measures the cluster for
            a few seconds, and follows the quickest plan. See docs/auto.md.
        compressors: specs of the compressors that ``plan="auto"`` may use. Default: those of ``Tuning``.
        accuracy: how much a compressor may change the moments of the optimizer with ``plan="auto"``: ``"safe"``,
            ``"balanced"`` or ``"fast"``. The gradients of the first steps decide. Default: that of ``Tuning``,
            ``"safe"``. See docs/auto.md.
        tuning: a ``Tuning`` for ``plan="auto"``. It says how long to time and measure, and when to plan again.
        seed: seed of stochastic compressors; the same on every rank.
        min_bytes: tensors below this many bytes stay dense, unless a plan has a strategy for them.
        dense: names of tensors that stay dense, or patterns of ``fnmatch``, such as ``["*embedding*", "head.*"]``.
        dense_steps: number of first synchronisations of each tensor that are dense, as a warm-up. They count as steps
            of parameter schedules, and leave no residual.
        timeout: seconds after which a missing rank is an error.
        feedback: the error feedback, a ``Feedback`` or its spec: ``"auto"`` (plain if the compressor allows it),
            ``"plain"``, ``"plain:decay=0.9"``, ``"ef21"``, ``"ef21:momentum=0.1"`` or ``"none"``.
        nonfinite: what to do if a gradient has a NaN or an infinity on any rank, or a value that is too large to be
            compressed and summed (2**126 or more, divided by the number of ranks rounded up to a power of two). With
            ``"raise"``, all ranks raise a NonFiniteError. With ``"skip"``, the tensor becomes zero on all ranks, and
            its residual does not change. With ``"skip_all"``, every tensor of the call becomes NaN on all ranks, so
            that a loss scaler skips the step, and their residuals do not change. See docs/torch.md. With
            ``"propagate"``, dense tensors are not searched: NaN and infinities travel like other values, as in MPI,
            and arrive on all ranks. Sums beyond the range are infinite; those of float16 are cut. That saves a read of
            the tensors. Compressed ones are treated as by ``"raise"``.
        window_bytes: half of a rank's share of the node's shared memory window; 0 uses MPI messages instead.
        message_bytes: length of the longest message between nodes. Longer messages are split.
        segment_bytes: size above which a tensor is split into segments between nodes, so that the sums of one segment
            overlap with the messages of another. 0 leaves tensors whole. Compressors that select (topk) select in each
            segment.
        fuse_bytes: size below which dense tensors share a bucket, and the largest payload of compressed tensors that
            share messages, in bytes. 0 keeps all tensors apart. With None, the session measures once below which size
            copies cost less than a collective, and from which size of a message its start costs little. The results
            have the same bits.
        nodes: groups of ranks to treat as nodes, such as the sockets of a node; default: as MPI finds them.
        debug: find tensors that change while they are in flight by checksums, for every framework. Each tensor travels
            as a copy, and its memory is read about five times more. Default: the environment variable
            ``ESPRESSO_DEBUG`` (1 or 0), else False.

    Raises:
        ConfigError: an option is invalid, or options conflict. Every rank raises it.
        MismatchError: the ranks have different options. Every rank raises it.

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
        accuracy: Literal["safe", "balanced", "fast"] | None = None,
        tuning: Tuning | None = None,
        seed: int = 0,
        min_bytes: int = 16384,
        dense: Sequence[str] = (),
        dense_steps: int = 0,
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
            compressor=compressor, route=route, plan=None if auto else plan,
            tuning=(auto, tuning, compressors, accuracy),
            seed=seed, min_bytes=min_bytes, dense=dense, dense_steps=dense_steps, timeout=timeout, feedback=feedback,
            nonfinite=nonfinite, window_bytes=window_bytes, message_bytes=message_bytes, segment_bytes=segment_bytes,
            fuse_bytes=fuse_bytes, nodes=nodes, debug=debug,
        )  # fmt: skip
        super().__init__(
            comm, options, lambda: {"problem": problem or other_versions(options.plan), "options": options.described()}
        )

    # --- synchronising ------------------------------------------------------------------------------------------------

    def sync(self, grads: Any, missing: Literal["error", "zero"] = "error") -> Any:
        """Replace every array by its mean over the ranks.

        Args:
            grads: one array, or nested lists, tuples and dicts of arrays. An entry may be None if it is None on all
                ranks. Arrays of numpy, CuPy, torch, or any with DLPack or the CUDA array interface; float32, float16,
                bfloat16 or float64; writable. Strided arrays travel as a copy. The name of a tensor is made of its
                keys. The session finds the residual by this name, so a name must stand for the same tensor in every
                call.
            missing: what to do if an entry is None on some ranks only. ``"error"`` raises an error. ``"zero"`` takes
                zeros instead, at the cost of one more small exchange. The same on every rank.

        Returns:
            ``grads`` itself, updated in place. Immutable arrays (JAX), and None for which zeros were taken, become new
            arrays in the same containers.

        Raises:
            GradientError, MismatchError, NonFiniteError, BoundError, PlanError, ConfigError: on every rank; the text
                names rank and tensor. Nothing was changed.
            GradientError: a tensor was changed in the meantime.
            RankTimeoutError, RemoteError, TransportError: a rank did not come, another rank failed, or MPI failed. The
                gradients are undefined, and the session cannot be used any more.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     session.sync({"w": np.full(2, 3.0, np.float32), "b": None})
            {'w': array([3., 3.], dtype=float32), 'b': None}
        """
        if missing not in ("error", "zero"):
            raise ConfigError(f"sync: missing={missing!r}; expected 'error' or 'zero'")
        self._engine.require_usable(waits=True)
        if missing == "zero":
            grads = with_zeros(self, grads)
        title = f"sync number {self._step + 1}"
        result = self._repeat_sync(grads, title)
        if result is NotImplemented:
            call = self._pending_call(("sync", ""), grads, lambda: buffers.flatten(grads), title)
            result = self._run(call)
            self._remember_sync(grads, call)
        self._step += 1
        self._warn_of_saturation()
        return result

    def push(self, name: str, grad: Any, priority: float | None = None) -> Handle:
        """Start to replace an array by its mean over the ranks, and return at once.

        A thread does the work while the caller continues to compute. The array must not be read or changed before
        ``wait``; a change is a GradientError of ``wait`` if it can be detected, see docs/torch.md. Ranks may push in
        different orders. Tensors travel by priority, then in the order in which they were first pushed (on rank 0, if
        the ranks differ). In training this is the order of the backward pass.

        Args:
            name: name of the tensor; the same on every rank. It may be pushed again, with other memory, before the
                first push was waited for.
            grad: one array, as for ``sync``, or None if it is None on all ranks.
            priority: tensors of a higher priority travel earlier; the same on every rank. Default: 0.

        Returns:
            A handle, whose ``wait`` returns the mean.

        Raises:
            ConfigError: the MPI library does not allow calls from a second thread; use ``sync``. All other errors are
                raised by ``Handle.wait``, on every rank.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     handle = session.push("w", np.full(2, 3.0, np.float32))
            ...     handle.wait().tolist()  # the caller can compute before it
            [3.0, 3.0]
        """
        return self._push_call(str(name), grad, lambda: [(checked_name(name), grad)], f"push({name!r})", priority)

    def push_together(self, grads: Mapping[str, Any]) -> Handle:
        """Push several arrays by one call, which takes less time than one for each.

        Args:
            grads: the arrays by name, at least one; the same names on every rank, in the same order.

        Returns:
            A handle, whose ``wait`` returns the mapping.

        Raises:
            ConfigError: as ``push``.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     handle = session.push_together({"w": np.full(2, 3.0, np.float32), "b": np.ones(1, np.float32)})
            ...     handle.wait()["w"].tolist()
            [3.0, 3.0]
        """
        names = list(map(str, grads)) if isinstance(grads, Mapping) else []
        name = " and ".join([*names[:1], *([f"{len(names) - 1} more"] if len(names) > 1 else [])])
        return self._push_call(name, grads, lambda: checked_arrays(grads), f"push_together({name!r})")

    def _push_call(self, name: str, given: Any, flat: Flat, title: str, priority: float | None = None) -> Handle:
        self._engine.require_usable()
        self._transport.require_threads()
        call = self._pending_call(("push", name), given, flat, title, priority)
        handle = Handle(self, call)
        if call.watch is not None and call.watch.whole:
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
        """Times, bytes and skipped steps of this rank so far, in total and by tensor.

        Args:
            residuals: also compute the norm of each tensor's residual, which reads all of them. The norm of a tensor in
                flight may be that of the previous step.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     mean = session.sync({"w": np.ones(10_000, np.float32)})
            ...     sorted(session.stats(residuals=True).tensors)
            ['w']
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
        """Record the with-block on all ranks, and write one trace file for Perfetto or chrome://tracing.

        Collective at both ends; rank 0 writes. See docs/tracing.md.

        Raises:
            ConfigError: on every rank: the file cannot be written.
            StateError: on every rank: this session is being traced already.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     with session.trace("trace.json"):
            ...         mean = session.sync({"w": np.ones(1000, np.float32)})
        """
        recorder, transport = self._recorder, self._transport
        before = self._together("trace", lambda: traces.begin(recorder, transport, path))
        try:
            yield
        except BaseException:
            recorder.stop()
            raise
        self._together("trace", lambda: traces.finish(recorder, transport, path, before))
