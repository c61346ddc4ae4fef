"""The part of a session that follows a plan, and changes it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from ..engine.batches import strategy_of
from ..engine.plan_change import agree_on_plan, resharded_for_plan
from ..errors import ConfigError
from ..options import Options
from ..state.store import SyncState
from ..types import Plan, Route, Strategy, TensorSpec
from .base import SessionBase


class Following(SessionBase):
    """The plan of a session; see docs/planner.md."""

    @property
    def plan(self) -> Plan | None:
        """The current plan. None without a plan, and while ``plan="auto"`` watches the first steps (``watching``).

        On slow networks, the steps that are watched follow a plan, too. While the session tries plans (``planning``),
        it is the plan of the current trial, or the quickest so far. With ``Tuning.plan_file``, the plan of the file is
        followed from the first ``sync`` or ``push`` on.

        Example:
            >>> plan = espresso_mpi.Plan(default=espresso_mpi.Strategy("int8", "flat-allgather"))
            >>> with espresso_mpi.Session(plan=plan) as session:
            ...     session.plan == plan
            True
        """
        return self._options.plan

    def strategy(self, spec: TensorSpec) -> Strategy:
        """The strategy by which this session synchronises a tensor.

        Raises:
            PlanError: the plan does not know it; ConfigError: its route needs a GPU that the tensor is not on, or sums
                payloads that cannot be summed.

        Example:
            >>> with espresso_mpi.Session(compressor="int8") as session:
            ...     session.strategy(espresso_mpi.TensorSpec("w", (1000, 1000), "float32")).compressor
            'int8'
        """
        return strategy_of(spec, self._options, self._transport.topology)

    def follow(self, plan: Plan | str | os.PathLike[str]) -> None:
        """Continue with another plan. Collective, between two steps, with the same plan on every rank.

        The residuals of tensors that get another strategy are resharded: Σ mean = Σ results + residuals holds across
        the change. Tensors with the same strategy and bucket keep their residuals bit for bit.

        Args:
            plan: a Plan, or the path of a plan file.

        Raises:
            PlanError: on every rank: the plan does not fit; MismatchError: the ranks have different plans; ConfigError:
                tensors are still under way, or the session plans for itself.

        Example:
            >>> with espresso_mpi.Session(compressor="fp16") as session:
            ...     session.follow(espresso_mpi.Plan(default=espresso_mpi.Strategy("int8", "flat-allgather")))
            ...     session.plan.default.compressor
            'int8'
        """
        if self._options.tuning is not None:
            raise ConfigError("follow: this session plans for itself; open one without plan='auto'")
        self._refuse_while_recording("follow")
        made, problem = Options.checked(plan=plan)
        if made.plan is None:
            problem = problem or f"follow: got {plan!r}; expected a Plan, or the path of one"
        new, transport, before = made.plan or Plan(), self._transport, self._options
        self._between_steps("follow", lambda: self._adopt(new, agree_on_plan(transport, before, new, problem)))

    def _change_plan(self, options: Options, sync_state: SyncState) -> None:
        """Use other options from now on, also for gradients that wait for other ranks. In an action of all ranks."""
        self._follow(options, sync_state)
        self._engine.renew(partial(self._intake.renew, options=options))

    def _adopt(self, plan: Plan | None, options: Options | None = None) -> None:
        """Continue with another plan, or none, and reshard the residuals of tensors that travel differently.

        Collective.
        """
        dense = Plan(default=Strategy("none", Route.parse("flat")))
        kept = resharded_for_plan(self._transport, self._engine.sync_state, self._options.plan, plan or dense)
        self._change_plan(options or replace(self._options, plan=plan), kept)
