"""The plan that a session of an earlier run chose, in the file ``Tuning.plan_file``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..collectives.messages.agreement import floats, on_every_rank, on_rank_0
from ..collectives.messages.transport import Transport
from ..engine.batches import differing_versions
from ..engine.plan_change import with_plan
from ..errors import ConfigError
from ..options import Options
from ..planner.planfile import from_json, load, misfits, to_json
from ..tracing.trace_file import refuse_unwritable
from ..tuning import OptimizerRule, Tuning
from ..types import Chosen, Plan, TensorSpec
from .clock import RecordedStep
from .fidelity import Fidelity
from .tried import ENOUGH

_LOG = logging.getLogger("espresso_mpi")


class EarlierRun:
    """Follows the plan of an earlier run from the first step on, if it fits.

    Whether it fits the ranks and the settings is known before the first step; its tensors, and often the optimizer, in
    it. All methods but ``misfit`` and ``say`` are collective.

    Args:
        options: those of now; adopt: goes on by a plan, or without one, on all ranks.
        fidelity: knows the optimizer.

    Attributes:
        waiting: the plan that was read and not followed yet.
        plan: the plan that is followed; confirmed: whether the first step has shown that it fits.

    Raises:
        ConfigError: on every rank: the file cannot be read or written, or its plan is none that a session chose.
    """

    def __init__(
        self, transport: Transport, tuning: Tuning, options: Callable[[], Options],
        adopt: Callable[[Plan | None], None], fidelity: Fidelity,
    ) -> None:  # fmt: skip
        self._transport, self._tuning, self._options = transport, tuning, options
        self._adopt, self._fidelity = adopt, fidelity
        self._path = str(tuning.plan_file)
        self.waiting = self._read()
        self.plan: Plan | None = None
        self.confirmed = False

    def _read(self) -> Plan | None:
        def document() -> object:
            refuse_unwritable(Path(self._path), "plan_file")
            if not Path(self._path).exists():
                return None
            plan = load(self._path, "a session with plan='auto', after this one was removed")
            if plan.chosen is None:
                raise ConfigError(
                    f"plan_file {self._path!r}: no session with plan='auto' chose this plan; follow it by "
                    f"plan={self._path!r}, or name another file, which the session writes"
                )
            return to_json(plan)

        found = on_rank_0(self._transport, document, ConfigError)
        return None if found is None else from_json(found)

    def follow(self) -> Chosen | None:
        """Follow the plan, if nothing that is known already speaks against it.

        Returns:
            How the earlier run chose it. None: it is not followed.
        """
        plan, self.waiting = self.waiting, None
        if plan is None or plan.chosen is None:
            return None
        why = self._unfit(plan, self._fidelity.known_rule(self._transport))
        if why is not None:
            self.say(f"its plan is not followed: {why}")
            return None
        self.plan = plan
        self._adopt(replace(plan, made_for=None))  # other tensors of the first step are no error
        return plan.chosen

    def undo(self) -> None:
        """Undo ``follow``."""
        self.waiting, self.plan = self.plan, None
        self._adopt(None)

    def misfit(self, specs: Sequence[TensorSpec]) -> str | None:
        """What differs between these tensors of the first step and those of the plan, in words; None: nothing."""
        if self.plan is None or self.confirmed:
            return None
        topology, known = self._transport.topology, self.plan.made_for.tensors if self.plan.made_for else {}
        new = [f"tensor {spec.name!r} is not in the plan" for spec in specs if spec.size and spec.name not in known]
        found = new[:1] + misfits(self.plan, specs, len(topology.nodes), topology.local_size, complete=False)
        return found[0] if found else None

    def misfit_anywhere(self, specs: Sequence[TensorSpec]) -> str | None:
        """What ``misfit`` finds on the first rank on which it finds anything."""
        _, said = on_every_rank(self._transport, lambda: self.misfit(specs), say=lambda found: found)
        return next((found for found in said if found is not None), None)

    def confirm(self) -> str | None:
        """Go on by the plan if the optimizer, which is known after the first step, is that of the plan.

        Returns:
            What differs, in words; None: nothing.
        """
        plan = self.plan
        assert plan is not None
        why = self._unfit(plan, self._fidelity.agreed_rule(self._transport))
        if why is None:
            self.confirmed = True
            self.say("its plan is followed")
            self._adopt(plan)
        return why

    @property
    def known(self) -> Mapping[str, tuple[Sequence[float], Sequence[float]]]:
        """The seconds of the plans that the earlier run has tried, as ``trials.Spent.known`` has them."""
        chosen = None if self.plan is None else self.plan.chosen
        if chosen is None:
            return {}
        return {digest: ((), min(steps, ENOUGH) * [seconds]) for digest, (seconds, steps) in chosen.tried.items()}

    def changed(self, steps: Sequence[RecordedStep]) -> str | None:
        """Whether steps that were watched differ from those in the trials, in words; None: they do not.

        If the plan pushes during the backward pass, these can take twice as long: they overlap nothing.
        """
        assert self.plan is not None
        assert self.plan.chosen is not None
        here = float(np.median([step.seconds for step in steps]))
        known = set() if self.plan.made_for is None else set(self.plan.made_for.tensors)
        missing = float(not known <= {spec.name for spec in steps[-1].specs})
        watched, missing = floats(self._transport, here, missing).max(axis=0).tolist()
        if missing:
            return "tensors of the plan are missing"
        expected, most = self.plan.chosen.seconds, self._tuning.factor
        if expected / most <= watched <= (2 * most if steps[-1].pushed and not self.plan.held else most) * expected:
            return None
        return f"a step takes {watched:.4g} s, {expected:.4g} s were expected"

    def leave(self, why: str) -> None:
        """Go on without a plan."""
        self.say(f"its plan is not followed any more: {why}")
        self.plan = None
        self._adopt(None)

    def say(self, text: str) -> None:
        """Write a line to the log of rank 0."""
        if self._transport.rank == 0:
            _LOG.info("%s: %s", self._path, text)

    def _unfit(self, plan: Plan, rule: OptimizerRule | None) -> str | None:
        """What differs between the settings, ranks and versions of then and now, in words. The same on every rank.

        Args:
            rule: of the optimizer. None: it is not known yet.
        """
        there = plan.chosen
        assert there is not None
        here = chosen_by(self._options(), self._tuning, rule or "adam", there.seconds)
        names = ["accuracy", "compressors", "feedback", *(["optimizer"] if rule is not None else [])]
        differ = [name for name in names if getattr(there, name) != getattr(here, name)]
        if differ:
            return "; ".join(f"{name}: {getattr(there, name)!r} then, {getattr(here, name)!r} now" for name in differ)
        topology, options = self._transport.topology, with_plan(self._options(), plan)

        def problems() -> list[str]:
            ranks = misfits(plan, (), len(topology.nodes), topology.local_size, complete=False)
            return ranks + differing_versions(plan) + options.conflicts()

        _, said = on_every_rank(self._transport, problems, say=lambda found: found)
        return next(("; ".join(found) for found in said if found), None)


def chosen_by(
    options: Options, tuning: Tuning, rule: OptimizerRule, seconds: float,
    tried: Mapping[str, tuple[float, int]] | None = None,
) -> Chosen:  # fmt: skip
    """What a session with these options says of the plan that it chose.

    Args:
        tried: see ``Chosen``. None: the trials have ended.
    """
    return Chosen(
        seconds, tuning.accuracy, rule, tuning.compressors, str(options.feedback), tried is None, dict(tried or {})
    )
