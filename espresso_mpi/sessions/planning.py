"""The part of a session that measures, records steps, and changes plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..arrays.buffers import Gradient, streams_of
from ..arrays.gpu_times import Moment
from ..autotune.clock import StepClock
from ..autotune.tuner import Tuner
from ..collectives.messages.agreement import on_rank_0
from ..engine.diagnostics import CallKey
from ..engine.intake import Named
from ..engine.plan_change import averaged_pending
from ..errors import ConfigError, StateError
from ..options import Options
from ..state.loading import Loaded
from ..tracing.trace_file import refuse_unwritable
from ..tuning import OptimizerRule
from .following import Following

if TYPE_CHECKING:
    from ..planner.model.profile import Profile

_RECORDED = 1024
"""Steps of a recorded workload that are kept, the last ones."""


class Planning(Following):
    """Plans of a session; see docs/planner.md."""

    def __init__(self, comm: Any, options: Options, note: Callable[[], Mapping[str, Any]]) -> None:
        self._tuner: Tuner | None = None
        super().__init__(comm, options, note)
        tuning = options.tuning
        if tuning is not None and self._transport.topology.size > 1:  # alone there is nothing to choose
            self._clock = StepClock(max(16, tuning.steps))
            self._tuner = Tuner(self._transport, tuning, self._together, lambda: self._options, self._adopt)
            try:
                self._tuner.open()
            except ConfigError:  # on all ranks alike
                self.close()
                raise

    def _holding(self) -> bool:
        plan = self._options.plan
        watching = super()._holding() and (self._tuner is None or self._tuner.watching)
        return watching or (plan is not None and plan.held)

    @property
    def planned(self) -> bool:
        """Whether a plan decides how tensors travel, or will do so with ``plan="auto"``.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     session.planned
            False
        """
        return self._options.plan is not None or self._tuner is not None

    @property
    def plans_itself(self) -> bool:
        """Whether the session was opened with ``plan="auto"``, and has other ranks to plan for.

        Example:
            >>> plan = espresso_mpi.Plan(default=espresso_mpi.Strategy("int8", "flat-allgather"))
            >>> with espresso_mpi.Session(plan=plan) as session:
            ...     session.plans_itself
            False
        """
        return self._tuner is not None

    @property
    def slow_network(self) -> bool:
        """Whether ``plan="auto"`` found, when it opened, that dense messages take far longer than compressing them.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     session.slow_network
            False
        """
        return self._tuner is not None and self._tuner.first.slow

    @property
    def planning(self) -> bool:
        """Whether ``plan="auto"`` still watches steps or tries plans.

        Example:
            >>> with espresso_mpi.Session(plan="auto") as session:
            ...     session.planning
            True
        """
        return self.watching or (self._tuner is not None and self._tuner.trials is not None)

    @property
    def watching(self) -> bool:
        """Whether ``plan="auto"`` watches steps: it notes when each gradient is pushed, and pushes travel later.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     session.watching
            False
        """
        return self._tuner is not None and self._tuner.watching

    @property
    def expected_seconds(self) -> float | None:
        """The seconds of a step of the plan in the trials of ``plan="auto"``. None before it has chosen a plan.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     print(session.expected_seconds)  # without plan="auto"
            None
        """
        tuned = None if self._tuner is None else self._tuner.tuned
        return None if tuned is None or self.planning else tuned.expected

    def measure(
        self,
        compressors: Sequence[str],
        *,
        sizes: Sequence[int] | None = None,
        seconds: float = 60.0,
        tick: Callable[[float], None] = lambda share: None,
    ) -> Profile:
        """Measure the cost of every collective, encode and decode on this cluster. Collective, with equal arguments.

        Args:
            compressors: specs of compressors.
            sizes: numbers of elements of the tensors that the profile is for; default: all sizes up to 16 MiB.
            seconds: approximate time limit.
            tick: called repeatedly with the share that is done, from 0 to 1.

        Raises:
            ConfigError: on every rank: an unknown compressor, an invalid size, or tensors are still under way.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     profile = session.measure(["fp16"], sizes=[1000], seconds=0.1)  # longer for a profile to plan with
            >>> profile.nodes, profile.ranks_per_node
            (1, 2)
        """
        from ..autotune import autoplan

        def run() -> Profile:
            return autoplan.profiled(self._transport, self._options, compressors, sizes, seconds, tick)

        profile: Profile = self._together("measure", run)
        return profile

    @contextmanager
    def record_workload(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record when the gradients of training steps are ready, as a file for ``espresso-mpi plan``.

        Collective at both ends; rank 0 writes. The with-block contains at least four steps of the training loop, with
        the same tensors. They run dense, whatever the options of the session, and the first one is not counted. A push
        is held back until it is waited for, so the times are those of the computation alone.

        Raises:
            ConfigError: on every rank: the file cannot be written, or the session has plan="auto".
            PlanError: too few steps, or steps with different tensors.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     with session.record_workload("workload.json"):
            ...         for batch in range(4):
            ...             grads = session.sync({"w": np.ones(1000, np.float32)})
        """
        from ..autotune import autoplan  # most sessions need none of it

        before, target, transport = self._options, Path(path), self._transport
        if before.tuning is not None:
            raise ConfigError("record_workload: this session plans for itself; use one without plan='auto'")

        def begin() -> None:
            on_rank_0(transport, lambda: refuse_unwritable(target, "workload"), ConfigError)
            recorded = replace(before, compressor="none", route=None, plan=None)
            self._change_plan(recorded, self._engine.sync_state)
            self._recording = True

        def end() -> None:
            self._recording = False
            self._change_plan(before, averaged_pending(transport, self._engine.sync_state))
            autoplan.write_workload(transport, list(clock.steps), target)

        self._together("record_workload", begin)
        self._clock = clock = StepClock(keep=_RECORDED)
        try:
            yield
        except BaseException:  # the other ranks may never come to its end
            self._clock, self._recording = None, False
            self._follow(before)
            raise
        clock.end_step()
        self._clock = None
        self._together("record_workload", end)

    def judge_for(self, rule: OptimizerRule | None) -> None:
        """Tell the session which optimizer uses the means.

        Adapters for torch call it, and optimizers that synchronise by themselves. With ``plan="auto"``, and if
        ``Tuning.optimizer`` does not say it, the session judges compressors for another rule than ``"adam"`` only if
        all ranks name it before it plans. Sessions and plans with a compressor such as ``onebit`` warn once, in the
        first ``sync`` or ``push``, that gradients in few bits do not train with AdamW and momentum. They do not if they
        are told anything but ``"adam"`` before.

        Args:
            rule: ``"adam"`` for optimizers that divide by a root of second moments; ``"sgd"``, with momentum or
                without it; ``"adam-momentum"`` and ``"sgd-momentum"`` for the same if the messages are momenta. None:
                another one, or other messages.

        Raises:
            ConfigError: the rule is none of these.

        Example:
            >>> with espresso_mpi.Session(plan="auto") as session:
            ...     session.judge_for("sgd")
        """
        if rule not in (*(known := get_args(OptimizerRule)), None):
            raise ConfigError(f"judge_for: rule={rule!r}; expected {' or '.join(map(repr, known))}")
        self._advice.told(rule)
        if self._tuner is not None and self._tuner.fidelity.rule is None:
            self._tuner.fidelity.rule = rule

    def _watch(self, key: CallKey, arrays: Named | None, gradients: Sequence[Gradient] | None) -> None:
        """Record the time of a call, and run the actions that are due between two steps.

        Args:
            key: key of the call.
            arrays: as the caller gave them; None: not even their names are known.
            gradients: its tensors; None: it failed on this rank. It will then fail on all ranks, but all of them still
                take part in the actions between steps.
        """
        clock = self._clock
        if clock is None:
            return
        self._before_first_step()
        names = None if arrays is None else [name for name, _ in arrays]
        if clock.repeats(key) if names is None else clock.begins(names):
            self._end_step(clock, key, names or ())
        specs = None if gradients is None else [gradient.spec for gradient in gradients]
        if self._tuner is not None:
            self._tuner.called(clock, key, specs)
        if gradients is not None and specs is not None:
            streams = streams_of(gradients)
            moment = Moment(streams) if streams else None
            clock.called(key, specs, moment)
            if self._tuner is not None and self._tuner.watching:
                if moment is not None:
                    moment.seconds()  # until then the GPU computes, which is part of the step
                with clock.within():
                    self._tuner.fidelity.take(gradients)

    def _end_step(self, clock: StepClock, key: CallKey | None, names: Sequence[str]) -> None:
        self._engine.require_other_thread()
        clock.end_step(key, names)
        if self._tuner is not None:
            with clock.aside():
                self._tuner.step_ended(clock)

    def begin_step(self, names: Iterable[str]) -> None:
        """Say that a step begins which can have these tensors. With ``plan="auto"``, it is collective.

        Such a session changes its plan between two steps. It sees a step begin when a tensor of the last step comes
        again. Call this before the first tensor of each step if a rank can wait for another rank before that, because
        it has no gradient of any tensor of the last step. ``GradientSync`` does so. This also holds for the first step
        with ``Tuning.plan_file`` and on a ``slow_network``: the session follows a plan from there on.

        Args:
            names: the same on every rank. The step has begun already if none of them has been in it.

        Example:
            >>> with espresso_mpi.Session(plan="auto") as session:
            ...     for step in range(2):
            ...         session.begin_step(["w"])
            ...         mean = session.push("w", np.ones(3, np.float32)).wait()
        """
        self._before_first_step()
        clock = self._clock
        if clock is not None and clock.begins(names):
            self._end_step(clock, None, ())

    def _before_first_step(self) -> None:
        """Follow the plan of an earlier run, or of the first step, if it was not followed yet. Collective then."""
        if self._tuner is not None:
            self._tuner.begin()

    def _close(self) -> None:
        if self._tuner is not None:
            self._tuner.closing()
        super()._close()

    def _loaded(self, read: Callable[[], Loaded]) -> Loaded:
        """A state of the earlier run fits when its plan is followed."""
        try:
            return read()
        except StateError:  # on all ranks alike
            if self._tuner is None or not self._tuner.follow_earlier():
                raise
        try:
            return read()
        except StateError:
            self._tuner.undo_earlier()
            raise
