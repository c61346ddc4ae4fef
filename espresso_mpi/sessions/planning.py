"""The part of a session that measures, records steps, and goes by plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..autotune.clock import StepClock
from ..autotune.tuner import Tuner
from ..collectives.messages.agreement import on_rank_0
from ..engine.batches import strategy_of
from ..engine.diagnostics import Call
from ..engine.handover import agree_on_plan, carried_along, evened
from ..errors import ConfigError
from ..options import Options
from ..tracing.trace_file import refuse_unwritable
from ..types import Plan, Strategy, TensorSpec
from .base import SessionBase

if TYPE_CHECKING:
    from ..planner.model.profile import Profile

_RECORDED = 1024
"""Steps of a recorded workload that are kept, the last ones."""


class Planning(SessionBase):
    """Plans of a session; see docs/planner.md."""

    def __init__(self, comm: Any, options: Options, note: Callable[[], Mapping[str, Any]]) -> None:
        self._tuner: Tuner | None = None
        super().__init__(comm, options, note)
        tuning = options.tuning
        if tuning is not None and self._transport.topology.size > 1:  # alone there is nothing to choose
            self._clock = StepClock(max(16, tuning.steps))
            self._tuner = Tuner(self._transport, tuning, self._together, lambda: self._options, self._adopt)

    def _watching(self) -> bool:
        return super()._watching() and (self._tuner is None or self._tuner.tuned is None)

    @property
    def plan(self) -> Plan | None:
        """The plan that tensors travel by now; None without one, and with ``plan="auto"`` before it is made."""
        return self._options.plan

    @property
    def expected_seconds(self) -> float | None:
        """With ``plan="auto"``: how long a step should take by the plan; None before there is one."""
        tuned = None if self._tuner is None else self._tuner.tuned
        return tuned.expected if tuned is not None and self.plan is not None else None

    def strategy(self, spec: TensorSpec) -> Strategy:
        """How this session synchronises a tensor.

        Raises:
            PlanError: the plan does not know it; ConfigError: its route needs a GPU that the tensor is not on, or sums
                payloads that cannot be summed.
        """
        return strategy_of(spec, self._options, self._transport.topology)

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
            compressors: specs.
            sizes: elements of the tensors that the profile is for; default: all sizes up to 16 MiB.
            seconds: about how long it may take; tick: is called now and then with the share that is done.

        Raises:
            ConfigError: on every rank: a compressor or size that there is not, or tensors are still under way.
        """
        from ..autotune import autoplan

        def run() -> Profile:
            return autoplan.profiled(self._transport, self._options, compressors, sizes, seconds, tick)

        profile: Profile = self._together("measure", run)
        return profile

    @contextmanager
    def record_workload(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record when the gradients of training steps are there, and write it as a file for ``espresso-mpi plan``.

        Collective at both ends; rank 0 writes. The with-block holds at least four steps of the training loop, with the
        same tensors. They run dense, whatever the session does otherwise, and the first one is not counted. What is
        pushed travels when it is waited for: so the times are those of computing, without traffic beside it.

        Raises:
            ConfigError: on every rank: the file cannot be written, or a session that plans for itself. PlanError: too
                few steps, or steps with other tensors each.
        """
        from ..autotune import autoplan  # most sessions need none of it

        before, target, transport = self._options, Path(path), self._transport
        if before.tuning is not None:
            raise ConfigError("record_workload: this session plans for itself; use one without plan='auto'")

        def begin() -> None:
            on_rank_0(transport, lambda: refuse_unwritable(target), ConfigError)
            self._follow(replace(before, compressor="none", route=None, plan=None))
            self._recording = True

        def end() -> None:
            self._recording = False
            self._follow(before, evened(transport, self._engine.keeping))
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
            if self._tuner is not None:
                with clock.aside():
                    self._tuner.step_ended(clock)
        if specs is not None:
            clock.called(call, specs)

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
