"""The plan that a session of an earlier run chose, in the file ``Tuning.plan_file``. All functions are collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..collectives.messages.agreement import on_every_rank, on_rank_0
from ..collectives.messages.transport import Transport
from ..engine.plan_change import agree_on_plan
from ..errors import ConfigError, MismatchError, PlanError
from ..options import Options
from ..planner.planfile import from_json, load, misfits, save, to_json
from ..tracing.trace_file import refuse_unwritable
from ..tuning import OptimizerRule, Tuning
from ..types import Chosen, Plan, TensorSpec


def chosen_by(options: Options, tuning: Tuning, rule: OptimizerRule, seconds: float) -> Chosen:
    """What a session with these options says of the plan that it chose."""
    return Chosen(seconds, tuning.accuracy, rule, tuning.compressors, str(options.feedback))


def read(transport: Transport, path: str) -> Plan | None:
    """The plan in a file, as rank 0 reads it. None if there is no file yet.

    Raises:
        ConfigError: on every rank: the file cannot be read or written, or its plan is none that a session chose.
    """

    def document() -> object:
        target = Path(path)
        refuse_unwritable(target, "plan_file")
        if not target.exists():
            return None
        plan = load(target)
        if plan.chosen is None:
            raise ConfigError(
                f"plan_file {path!r}: no session with plan='auto' chose this plan; follow it by plan={path!r}, or name "
                f"another file, which the session writes"
            )
        return to_json(plan)

    found = on_rank_0(transport, document, ConfigError)
    return None if found is None else from_json(found)


def write(transport: Transport, path: str, plan: Plan) -> None:
    """Write a plan for the next run, on rank 0.

    Raises:
        ConfigError: on every rank: the file cannot be written.
    """
    on_rank_0(transport, lambda: save(plan, path), ConfigError)


def unfit(transport: Transport, options: Options, tuning: Tuning, rule: OptimizerRule, plan: Plan) -> str | None:
    """Why a session does not follow a plan of an earlier run, in words; None: it does. The same on every rank."""
    assert plan.chosen is not None
    if replace(plan.chosen, seconds=0.0) != chosen_by(options, tuning, rule, 0.0):
        there, here = plan.chosen, chosen_by(options, tuning, rule, 0.0)
        names = ("accuracy", "optimizer", "compressors", "feedback")
        differ = [name for name in names if getattr(there, name) != getattr(here, name)]
        return "; ".join(f"{name}: {getattr(there, name)!r} then, {getattr(here, name)!r} now" for name in differ)
    try:
        agree_on_plan(transport, options, plan, None)
    except (ConfigError, PlanError, MismatchError) as error:  # on all ranks alike
        return str(error)
    return None


def other_tensors(transport: Transport, plan: Plan, specs: Sequence[TensorSpec]) -> str | None:
    """What differs between the plan's tensors and those of a step, in words; None: nothing on any rank."""
    topology = transport.topology
    new = sorted({spec.name for spec in specs if spec.size} - set(plan.made_for.tensors if plan.made_for else ()))
    here = [f"tensor {new[0]!r} is not in the plan"] if new else []
    here += misfits(plan, specs, len(topology.nodes), topology.local_size)
    _, said = on_every_rank(transport, lambda: here, say=lambda found: found)
    return next((found[0] for found in said if found), None)
