"""The part of a session that measures the cluster, and records what it synchronises."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..autotune.clock import StepClock
from ..collectives.messages.agreement import on_rank_0
from ..engine.plan_change import averaged_pending
from ..errors import ConfigError
from ..tracing.trace_file import refuse_unwritable
from .planning import Planning

if TYPE_CHECKING:
    from ..planner.model.profile import Profile

_RECORDED = 1024
"""Steps of a recorded workload that are kept, the last ones."""


class Recording(Planning):
    """Profiles and workloads, from which plans are made; see docs/auto.md."""

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
            on_rank_0(transport, lambda: refuse_unwritable(target), ConfigError)
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
