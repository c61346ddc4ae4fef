"""The session: what a user holds. It checks what comes in, hands it to the engine, and keeps what lasts."""

from __future__ import annotations

import logging
import math
import numbers
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import buffers, device, guard, rescaling, state
from .batches import Batch, Batches, batch_of, check_fit, other_versions, strategy_of
from .buffers import Gradient
from .collectives import lifetime, tracing
from .collectives.layout import Topology
from .collectives.transport import MESSAGE_BYTES, Transport
from .engine import Engine, Unit
from .errors import ConfigError, EspressoError, GradientError, PlanError
from .feedback import Feedback
from .handover import agree_on_plan, carried_along, evened
from .holding import Held
from .launch import threads_per_rank
from .memory import Keeping, Key
from .options import DEFAULT_SEGMENT, DEFAULT_TIMEOUT, Options
from .stats import Stats
from .trace import Recorder
from .tracefile import refuse_unwritable
from .tuning import StepClock, Tuning
from .types import Plan, Route, Strategy, TensorSpec
from .verdicts import Call, agree_on_options

if TYPE_CHECKING:
    from .planner.profile import Profile

_LOG = logging.getLogger("espresso_mpi")


class Handle:
    """A tensor on its way, as ``Session.push`` returns it."""

    def __init__(self, session: Session, unit: Unit) -> None:
        self._session, self._unit = session, unit

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return self._session._ended(self._unit)

    def wait(self) -> Any:
        """Wait until the tensor is the mean over the ranks.

        Returns:
            the array that was pushed, updated in place; a new one if it is immutable (JAX).

        Raises:
            GradientError, MismatchError, NonFiniteError, PlanError, ConfigError: on every rank, naming rank and tensor,
                which was not changed.
            RankTimeoutError, RemoteError, TransportError: a rank did not come, or failed, or MPI did; the session
                cannot be used any more.
        """
        return self._session._wait(self._unit)

    def __repr__(self) -> str:
        kind, name = self._unit.call
        return f"<Handle of {kind} {name!r}: {'done' if self.done() else 'under way'}>"


class Session:
    """Averages gradients over the ranks of a communicator.

    Args:
        comm: mpi4py intracommunicator, default ``MPI.COMM_WORLD``; it is duplicated.
        compressor: spelling of a compressor such as ``"topk:ratio=0.01"``, or ``"none"``.
        route: name or spelling of a Route; default: by a rule from the machines and the compressor (docs/routes.md).
        plan: a Plan with a strategy for every tensor, or the path of a file that one was saved in, instead of
            compressor and route. ``"auto"``: the first steps are dense and timed; then the session measures the cluster
            for a few seconds, plans, and goes on by the plan. See docs/planner.md.
        compressors: with ``plan="auto"``: spellings of those that it may use; default: those of ``Tuning``.
        tuning: with ``plan="auto"``: a ``Tuning``, how long to watch and measure, and when to plan anew.
        seed: of stochastic compressors; the same on every rank.
        min_bytes: tensors below this many bytes stay dense, unless a plan says otherwise.
        timeout: seconds after which a rank that does not come is reported.
        feedback: what becomes of what compression loses, a ``Feedback`` or its spelling: ``"auto"`` (add it in the next
            step, where the compressor allows it), ``"plain"``, ``"plain:decay=0.9"``, ``"ef21"``,
            ``"ef21:momentum=0.1"`` or ``"none"``.
        nonfinite: a NaN or an infinity in a gradient on any rank, or a value too large to be compressed and summed
            (2**126 or more, divided by the number of ranks rounded up to a power of two): ``"raise"`` NonFiniteError
            on all ranks, or ``"skip"`` the tensor in this step: it becomes zero on all ranks and its residual stays as
            it was; or ``"skip_all"``: every tensor of the call becomes NaN on all ranks, by which a loss scaler knows
            that the step is to be left out, and what the session keeps of them stays as it was. See docs/torch.md.
        window_bytes: half of a rank's share of the machine's shared memory window; 0 uses MPI messages instead.
        message_bytes: longest message between machines; longer ones are cut.
        segment_bytes: a tensor with more bytes than this between machines is cut into segments that follow each other
            along the route, so that one's sums hide behind another's messages; 0 leaves it whole. Compressors that
            choose (topk) choose in each segment.
        fuse_bytes: dense tensors below this many bytes share a buffer; None measures, once, where copying them costs
            less than a collective for each.
        machines: groups of ranks to treat as machines, such as the sockets of one; default: as MPI finds them.
        debug: find tensors that are changed while they are on their way by checksums, whatever framework they are of:
            each travels as a copy, and its memory is read some five times more. Default: the environment variable
            ``ESPRESSO_DEBUG`` (1 or 0), else False.

    Raises:
        ConfigError: an option does not fit; MismatchError: ranks chose different options; on every rank.
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
        machines: Sequence[Sequence[int]] | None = None,
        debug: bool | None = None,
    ) -> None:
        auto = isinstance(plan, str) and plan == "auto"
        options, problem = Options.checked(
            compressor=compressor, route=route, plan=None if auto else plan, tuning=(auto, tuning, compressors),
            seed=seed, min_bytes=min_bytes, timeout=timeout, feedback=feedback, nonfinite=nonfinite,
            window_bytes=window_bytes, message_bytes=message_bytes, segment_bytes=segment_bytes, fuse_bytes=fuse_bytes,
            machines=machines, debug=debug,
        )  # fmt: skip
        self._options, self._recording = options, False
        self._transport = Transport.open(
            comm, options.transport(), agree_on_options,
            lambda: {"problem": problem or other_versions(options.plan), "options": options.described()},
        )  # fmt: skip
        self._require_fit()
        self._step, self._seconds, self._warned = 0, 0.0, False
        self._batches = Batches()
        self._pending = guard.Pending()
        self._claims, self._copies, self._lost = guard.Claims(), False, False
        self._gpu: int | None = None
        tunes = options.tuning is not None and self._transport.topology.size > 1  # alone there is nothing to choose
        self._clock = StepClock(max(16, options.tuning.steps)) if tunes and options.tuning else None
        self._tuned: _Tuned | None = None
        if self._clock is not None and options.tuning is not None and self._transport.rank == 0:
            _tell_of_doubts(options.tuning)
        self._recorder = Recorder()
        self._engine = Engine(self._transport, options, Keeping(), self._recorder)
        self._held = Held(self._engine, lambda: self._clock is not None and self._tuned is None)
        _limit_threads(len(self._transport.machine))
        lifetime.watch(self._engine)

    def _require_fit(self) -> None:
        """Refuse a plan for other ranks or versions."""
        try:
            check_fit((), self._options, self._transport.topology)
        except PlanError:
            self._transport.close()
            raise

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
        unit = self._unit(("sync", ""), grads, lambda: buffers.flatten(grads), f"sync number {self._step + 1}")
        result = self._wait(self._engine.submit(unit))
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
        call = ("push", str(name))
        unit = self._unit(call, grad, lambda: [(_checked_name(name), grad)], f"push({name!r})", priority)
        handle = Handle(self, unit)
        if unit.watch is not None:
            unit.watch.reader = weakref.ref(handle)
        self._held.submit(unit)
        if self._pending.add(unit) and self._transport.rank == 0:
            _LOG.warning(
                "push(%r): several pushes of it were not waited for. An array holds its mean only when its push has "
                "ended: call wait_all(), or wait() of each handle, before gradients are used",
                name,
            )
        return handle

    def wait_all(self) -> None:
        """Wait for everything that was pushed and not waited for.

        Raises:
            as ``Handle.wait``, for the first tensor with an error; all have ended then.
        """
        errors = []
        for unit in self._pending:
            try:
                self._wait(unit, read=False)
            except EspressoError as error:
                errors.append(error)
        self._warn_of_saturation()
        if errors:
            raise errors[0]

    def _wait(self, unit: Unit, read: bool = True) -> Any:
        self._held.release()
        start = time.perf_counter()
        try:
            self._engine.wait_for(lambda: unit.finished)
        finally:
            if unit.finished:
                self._pending.remove(unit)
            if self._clock is not None and unit.call[0] in ("sync", "push"):
                self._clock.waited(start, unit.call if unit.error is not None else None)
            self._seconds += time.perf_counter() - start
        self._release(unit, read)
        if unit.error is not None:
            raise unit.error
        return unit.result

    def _ended(self, unit: Unit) -> bool:
        """Whether a call has ended; there is nothing to wait for then but an error."""
        self._held.release()
        if unit.finished:
            self._release(unit)
            if unit.error is None:
                self._pending.remove(unit)
        return unit.finished

    def _release(self, unit: Unit, read: bool = True) -> None:
        """The tensors of a call that has ended are the caller's again; changed before that, ranks differ in them.

        Args:
            read: somebody is given the result; else it must be known to the caller otherwise.
        """
        if unit.watch is None:
            return
        with self._claims.lock:  # several threads may wait for one call
            watch = unit.watch
            if watch is None:
                return
            self._claims.drop(watch.spans)
            if unit.error is None:
                try:
                    watch.require_untouched()
                except GradientError as error:
                    unit.error = error
                    self._engine.leave(str(error))
            lost = None if read or unit.error is not None else watch.lost(unit)
            unit.watch = None
        if lost is not None and not self._lost:
            self._lost = True
            _LOG.warning("%s", lost)

    def _unit(self, call: Call, given: Any, flat: Flat, title: str, priority: float | None = None) -> Unit:
        """A call with flat arrays over the caller's memory; an error is kept until all ranks know of it."""
        gradients = list[Gradient]()
        claimed: guard.Spans = ()
        batch, problem, order, gpu = None, None, 0.0, None
        try:
            order = _checked_priority(priority)
            gradients += [buffers.adopt(name, value) for name, value in flat()]
            spans = guard.spans(gradients, title)
            if any(g.owner is None and device.device_of(g.array) == "gpu" for g in gradients):
                gpu = self._gpu = _checked_gpu(device.current_gpu(), self._gpu)
            self._claims.claim(spans)
            claimed = spans
        except EspressoError as error:
            problem = error
        except Exception as error:  # a foreign array may raise anything
            problem = GradientError(f"grads: cannot be read: {type(error).__name__}: {error}")
        specs = tuple(gradient.spec for gradient in gradients)
        try:
            self._watch(call, specs if problem is None else None)
        except BaseException:  # there will be no call to wait for
            self._claims.drop(claimed)
            raise
        if problem is None:
            batch, problem = self._settled(call, specs)
        if problem is not None:
            self._claims.drop(claimed)
            return Unit(call, given, gradients, batch, problem, order, title=title, gpu=gpu)
        self._tell_of_copies(gradients)
        watch = guard.Watch(title, gradients, claimed, self._options.debug)
        return Unit(call, given, gradients, batch, None, order, title=title, gpu=gpu, watch=watch)

    def _tell_of_copies(self, gradients: Sequence[Gradient]) -> None:
        if self._copies:
            return
        copied = next((g.spec for g in gradients if g.source is not None), None)
        if copied is not None:
            self._copies = True
            _LOG.info("%s: its memory is strided, so it travels as a copy, as others may (said once)", copied.name)

    def _settled(self, call: Call, specs: tuple[TensorSpec, ...]) -> tuple[Batch | None, EspressoError | None]:
        """How the tensors of a call travel, or why they cannot."""
        options, topology, alone = self._options, self._transport.topology, call[0] == "sync"
        try:
            return self._batches.find(call, specs, lambda new: batch_of(new, options, topology, alone)), None
        except EspressoError as error:
            return None, error
        except Exception as error:  # a compressor of the user's own may raise anything
            return None, GradientError(f"grads: cannot be synchronised: {type(error).__name__}: {error}")

    def _warn_of_saturation(self) -> None:
        if self._engine.tally["saturated"] and not self._warned:
            self._warned = True
            _LOG.warning(
                "step %d: values or sums left their range and were cut (stats().saturated counts them): scale the loss "
                "down; if the compressor sums integers, use fewer levels",
                self._step,
            )

    # --- planning -----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan that tensors travel by now; None without one, and with ``plan="auto"`` before it is made."""
        return self._options.plan

    @property
    def expected_seconds(self) -> float | None:
        """With ``plan="auto"``: how long a step should take by the plan; None before there is one."""
        return self._tuned.expected if self._tuned is not None and self.plan is not None else None

    def measure(
        self,
        compressors: Sequence[str],
        *,
        sizes: Sequence[int] | None = None,
        seconds: float = 60.0,
        tick: Callable[[float], None] = lambda share: None,
    ) -> Profile:
        """Measure this cluster: what every collective, encode and decode costs. Collective, the same on every rank.

        Args:
            compressors: spellings.
            sizes: elements of the tensors that the profile is for; default: all sizes up to 16 MiB.
            seconds: about how long it may take; tick: is called now and then with the share that is done.

        Raises:
            ConfigError: on every rank: a compressor or size that there is not, or tensors are still under way.
        """
        from . import autoplan

        def run() -> Profile:
            return autoplan.profiled(self._transport, self._options, compressors, sizes, seconds, tick)

        profile: Profile = self._together("measure", run)
        return profile

    @contextmanager
    def record_trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record when the gradients of training steps are there, and write it as a file for ``espresso-mpi plan``.

        Collective at both ends; rank 0 writes. The with-block holds at least four steps of the training loop, with the
        same tensors. They run dense, whatever the session does otherwise, and the first one is not counted. What is
        pushed travels when it is waited for: so the times are those of computing, without traffic beside it.

        Raises:
            ConfigError: on every rank: the file cannot be written, or a session that plans for itself. PlanError: too
                few steps, or steps with other tensors each.
        """
        from . import autoplan  # most sessions need none of it

        before, target, transport = self._options, Path(path), self._transport
        if before.tuning is not None:
            raise ConfigError("record_trace: this session plans for itself; use one without plan='auto'")

        def begin() -> None:
            autoplan.on_rank_0(transport, lambda: refuse_unwritable(target))
            self._follow(replace(before, compressor="none", route=None, plan=None))
            self._recording = True

        def end() -> None:
            self._recording = False
            self._follow(before, evened(transport, self._engine.keeping))
            autoplan.write_trace(transport, list(clock.steps), target)

        self._together("record_trace", begin)
        self._clock = clock = StepClock(keep=_RECORDED)
        try:
            yield
        except BaseException:  # the other ranks may never come to its end
            self._clock, self._recording = None, False
            self._follow(before)
            raise
        clock.end_step()
        self._clock = None
        self._together("record_trace", end)

    def _watch(self, call: Call, specs: tuple[TensorSpec, ...] | None) -> None:
        """A call is made: note when, and do what is to be done between two steps.

        Args:
            specs: its tensors; None: it failed on this rank. Then it will fail on all, which take part in what is done
                between the steps all the same.
        """
        clock = self._clock
        if clock is None:
            return
        if clock.repeats(call) if specs is None else clock.begins(specs):
            clock.end_step()
            if self._options.tuning is not None:
                with clock.aside():
                    self._tune(clock, self._options.tuning)
        if specs is not None:
            clock.called(call, specs)

    def _tune(self, clock: StepClock, tuning: Tuning) -> None:
        """Plan when enough steps were watched; compare step times with the plan's from then on."""
        try:
            if self._tuned is None:
                if clock.count == max(1, tuning.skip) + tuning.steps:
                    self._together("plan", lambda: self._plan_now(clock, tuning))
            elif (clock.count - self._tuned.at) % tuning.check == 0:
                self._together("compare", lambda: self._compare(clock, tuning, self._tuned))
        except (ConfigError, PlanError) as error:  # on all ranks alike
            if self._transport.rank == 0:
                _LOG.warning("%s; training goes on as before", error)

    def _plan_now(self, clock: StepClock, tuning: Tuning) -> None:
        """Make a plan and go on by it. Collective."""
        from . import autoplan

        self._tuned = _Tuned(clock.count, None)  # also if it fails: training goes on as it did
        made = autoplan.make(self._transport, self._options, tuning, list(clock.steps)[-tuning.steps :])
        autoplan.report(self._transport, made)
        again = self.plan is not None and self.plan.digest == made.plan.digest
        expected = autoplan.slowest(self._transport, _median_seconds(clock)) if again else made.seconds
        self._tuned = _Tuned(clock.count, expected)
        if not again:
            self._adopt(made.plan)
        clock.steps.clear()

    def _compare(self, clock: StepClock, tuning: Tuning, tuned: _Tuned | None) -> None:
        """Plan anew if steps take much longer, or shorter, than the plan said. Collective."""
        from . import autoplan

        assert tuned is not None
        measured, expected = autoplan.slowest(self._transport, _median_seconds(clock)), tuned.expected
        off = math.inf if expected is None else max(measured / expected, expected / measured)
        early = clock.count - tuned.at < tuning.every or len(clock.steps) < autoplan.FEWEST
        if off <= tuning.factor or early:
            return
        if self._transport.rank == 0:
            _LOG.info("a step takes %.4g s, %s were expected: planning anew", measured, _spelled(expected))
        self._plan_now(clock, tuning)

    def follow(self, plan: Plan | str | os.PathLike[str]) -> None:
        """Go on by another plan. Collective, between two steps, with the same plan on every rank.

        What tensors are owed that travel another way from then on comes along: Σ mean = Σ results + residuals holds
        over the change. Tensors that travel as before keep their residuals bit for bit.

        Args:
            plan: a Plan, or the path of a file that one was saved in.

        Raises:
            PlanError: on every rank: the plan does not fit; MismatchError: the ranks have different plans; ConfigError:
                tensors are still under way, or the session plans for itself.
        """
        if self._options.tuning is not None:
            raise ConfigError("follow: this session plans for itself; open one without plan='auto'")
        self._refuse_while_recording("follow")
        made, problem = Options.checked(plan=plan)
        if made.plan is None:
            problem = problem or f"follow: got {plan!r}; expected a Plan, or the path of one"
        new, transport, before = made.plan or Plan(), self._transport, self._options
        self._between_steps("follow", lambda: self._adopt(new, agree_on_plan(transport, before, new, problem)))

    def _adopt(self, plan: Plan, options: Options | None = None) -> None:
        """Go on by another plan; what tensors that travel otherwise now are owed comes along. Collective."""
        kept = carried_along(self._transport, self._engine.keeping, self._options.plan, plan)
        self._follow(options or replace(self._options, plan=plan), kept)

    def _follow(self, options: Options, keeping: Keeping | None = None) -> None:
        """Let tensors travel by other options from now on."""
        self._options = options
        self._batches.clear()
        self._engine.follow(options, keeping or self._engine.keeping)

    def strategy(self, spec: TensorSpec) -> Strategy:
        """How this session synchronises a tensor.

        Raises:
            PlanError: the plan does not know it; ConfigError: its route needs a GPU that the tensor is not on, or sums
                payloads that cannot be summed.
        """
        return strategy_of(spec, self._options, self._transport.topology)

    @property
    def topology(self) -> Topology:
        """Which ranks share a machine."""
        return self._transport.topology

    # --- seeing what happens ------------------------------------------------------------------------------------------

    def stats(self, residuals: bool = False) -> Stats:
        """Times, bytes and skipped steps so far, of this rank, in all and for each tensor.

        Args:
            residuals: also work out the norm of each tensor's residual, which reads all of them; of a tensor that is
                under way it may be between two steps.
        """
        engine, recorder = self._engine, self._recorder
        norms = self._residual_norms() if residuals else {}
        return Stats(
            self._step,
            self._seconds,
            dict(recorder.seconds),
            self._transport.sent,
            dict(engine.skipped),
            engine.tally["saturated"],
            recorder.tensors(norms),
            engine.skipped_calls,
        )

    def _residual_norms(self) -> dict[str, float]:
        squares: dict[str, float] = {}
        keeping = self._engine.keeping
        for text, value in list(keeping.memory.items()):
            key = Key.parse(text)
            if key.what == "residual":
                here, name = np.empty(value.size, np.float32), keeping.label(key.name)
                device.copy(here, value)
                squares[name] = squares.get(name, 0.0) + float(np.square(here, dtype=np.float64).sum())
        return {name: math.sqrt(square) for name, square in squares.items()}

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Record the steps of a with-block on all ranks, and write them as one file for Perfetto or chrome://tracing.

        Collective at both ends; rank 0 writes. See docs/tracing.md.

        Raises:
            ConfigError: the file cannot be written; StateError: this session is being traced already; on every rank.
        """
        recorder, transport = self._recorder, self._transport
        before = self._together("trace", lambda: tracing.begin(recorder, transport, path))
        try:
            yield
        except BaseException:
            recorder.stop()
            raise
        self._together("trace", lambda: tracing.finish(recorder, transport, path, before))

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What training needs to go on exactly: step counters, seed, and what is kept on this rank, as copies.

        JSON values, and float32 numpy arrays under ``memory``: residuals and what methods keep of their own, by
        ``tensor|elements|encode point|region|what``.

        Raises:
            ConfigError: tensors are still under way, or steps are recorded.
        """
        self._refuse_while_recording("state_dict")
        self._held.release()
        if self._engine.busy:
            raise ConfigError("state_dict: tensors are still under way; call wait_all() before it")
        return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        keeping, options = self._engine.keeping, replace(self._options, seed=self._engine.seed)
        return state.snapshot(self._transport, options, self._step, keeping)

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``state_dict()`` of a job with the same compressors and feedback. Collective.

        On the same ranks, machines and routes, where every rank loads its own, training goes on exactly. On others the
        mean of what was owed is conserved: together the ranks must bring the states of all old ranks, each once.

        Args:
            states: one state or several, also none (an empty list).

        Raises:
            StateError: on every rank, if a state is of another version, does not fit or is damaged, or one is missing.
                ConfigError: on every rank: tensors are still under way, or steps are recorded.
        """
        self._go_on(lambda: state.load(self._transport, self._options, states), "load_state_dict")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the states of all ranks into a folder, one file a rank. Collective.

        Raises:
            StateError: on every rank: a file cannot be written, or ranks are at different steps. ConfigError: on every
                rank: steps are recorded.
        """
        self._refuse_while_recording("save")
        self._together("save", lambda: state.save(self._transport, self._snapshot(), path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a folder that ``save`` wrote, as ``load_state_dict``. Collective."""
        self._go_on(lambda: state.load_files(self._transport, self._options, path), "load")

    def rescale(self, factor: float) -> None:
        """Multiply what is kept of gradients by a factor: their unit has changed, as by a loss scaler. Collective.

        Args:
            factor: the new loss scale divided by the old, the same on every rank; 1 does nothing and waits for nobody.

        Raises:
            ConfigError: on every rank: no number above 0 within the range of float32, ranks have different factors, or
                tensors are still under way.
                StateError: on every rank: a compressor of your own does not say what it keeps.
        """
        if rescaling.is_one(factor):
            return
        engine, options = self._engine, self._options
        act = partial(rescaling.rescale, self._transport, options, given=factor)
        self._between_steps("rescale", lambda: act(memory=engine.keeping.memory))

    def _go_on(self, read: Callable[[], state.Loaded], name: str) -> None:
        def load() -> None:
            loaded = read()
            self._step, self._engine.seed = loaded.step, loaded.seed
            self._engine.keeping = loaded.keeping
            self._recorder.rewind()

        self._refuse_while_recording(name)
        self._between_steps(name, load)

    def _refuse_while_recording(self, name: str) -> None:
        """The options of now, and what tensors are owed on the way, are those of the record, not of the session."""
        if self._recording:
            raise ConfigError(f"{name}: steps are being recorded; call it before or after record_trace()")

    def _between_steps(self, name: str, action: Callable[[], Any]) -> Any:
        """``_together``, refused on all ranks if tensors are under way on one: what they keep would change."""
        self._held.release()
        busy = f"{name}: tensors are still under way; call wait_all() before it" if self._engine.busy else None

        def alone() -> Any:
            state.exchange(self._transport, {"problem": busy}, ConfigError)
            return action()

        return self._together(name, alone)

    def _together(self, name: str, action: Callable[[], Any]) -> Any:
        """Do something on all ranks when nothing else is under way."""
        self._engine.require_usable()
        self._held.release()
        return self._wait(self._engine.submit(Unit((name, ""), action=action)))

    # --- closing ------------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether ``sync`` may be called: not closed, and no failure that leaves ranks out of step."""
        return self._engine.broken is None

    def __repr__(self) -> str:
        o = self._options
        how = "a plan" if o.plan else f"compressor {o.compressor!r}, route {str(o.route) if o.route else 'by topology'}"
        return f"<Session of {self.topology}: {how}; step {self._step}{'' if self.usable else '; not usable'}>"

    def close(self) -> None:
        """Finish what was pushed, and free communicator and shared memory; every rank must call it.

        A session that failed is only dropped.

        Raises:
            as ``wait_all``; RankTimeoutError: a rank did not come.
        """
        if not self.usable:
            return
        try:
            self.wait_all()
        finally:
            if self.usable:
                self._together("close", self._transport.close)
                self._engine.leave("it was closed", tell=False)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may never come to a collective close, but may wait for this one
            self._engine.leave(f"it was left by an exception: {kind.__name__}: {error}")


Flat = Callable[[], Iterable[tuple[str, Any]]]

_RECORDED = 1024
"""Steps of a recorded trace that are kept, the last ones."""


@dataclass(frozen=True)
class _Tuned:
    """When a session planned last, in steps, and how long a step should take since."""

    at: int
    expected: float | None


def _spelled(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.4g} s"


def _median_seconds(clock: StepClock) -> float:
    return float(np.median([step.seconds for step in clock.steps]))


def _tell_of_doubts(tuning: Tuning) -> None:
    if tuning.doubtful:
        _LOG.warning(
            "plan='auto' chooses by speed, and may use %s: not known to train like fp32 under AdamW (onebit, topk and "
            "powersgd did not); compare losses first, see docs/compressors.md",
            ", ".join(tuning.doubtful),
        )


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise GradientError(f"push: the name is {name!r}; expected text, such as 'layer1.weight'")
    return name


def _checked_gpu(number: int, before: int | None) -> int:
    if before not in (None, number):
        raise GradientError(
            f"grads: this process now works on GPU {number}, but on GPU {before} in former calls of this session; open "
            f"a session for each GPU, or go back with numba.cuda.select_device({before})"
        )
    return number


def _checked_priority(priority: Any) -> float:
    if priority is None:
        return 0.0
    try:
        good = isinstance(priority, numbers.Real) and not isinstance(priority, bool) and math.isfinite(priority)
    except OverflowError:  # a whole number beyond all floats
        good = False
    if not good:
        raise ConfigError(f"push: priority={priority!r}; expected a finite number")
    return float(priority)


def _limit_threads(local_ranks: int) -> None:
    """Share the machine's cores among its ranks."""
    from .compressors import _cpu

    _cpu.limit_threads(threads_per_rank(local_ranks))
