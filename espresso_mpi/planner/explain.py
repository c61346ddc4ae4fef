"""What a plan does and what is predicted for it, in words and tables; from the plan alone."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..errors import PlanError
from ..types import (
    ROUTES,
    Collective,
    Encode,
    Forecast,
    Level,
    Op,
    Outlook,
    Plan,
    Route,
    RouteStep,
    Strategy,
    buffer_name,
)
from . import lane_tables
from .lane_tables import Table, counted, milliseconds

EXPOSED = (
    "exposed: how much shorter the step would be if everything done for this tensor took no time; the rest is "
    "overlapped by the backward pass and by other tensors."
)
RUNNER_UP = (
    "runner-up: the best other strategy for it with all other tensors as planned, and how much longer the step would "
    "be."
)


@dataclass(frozen=True)
class Explanation:
    """Paragraphs, and tables after them."""

    words: tuple[str, ...]
    tables: tuple[Table, ...] = ()


def explain(plan: Plan, tensor: str | None = None) -> Explanation:
    """The whole plan, or one tensor of it.

    Raises:
        PlanError: the plan does not know the tensor.

    Example:
        >>> plan = espresso_mpi.Plan(default=espresso_mpi.Strategy("int8", "flat-allgather"))
        >>> espresso_mpi.planner.explain(plan).words[-1]
        'It was not made by the planner: nothing is predicted for it.'
    """
    return _of_plan(plan) if tensor is None else _of_tensor(plan, tensor)


# --- the whole plan ---------------------------------------------------------------------------------------------------


def _of_plan(plan: Plan) -> Explanation:
    words = [_made_for(plan), *_chosen(plan)]
    forecast = plan.forecast
    if forecast is None:
        words.append("It was not made by the planner: nothing is predicted for it.")
        return Explanation(tuple(words), (_strategies(plan),))
    words += [_step(plan, forecast), _worth(plan, forecast), _method(plan, forecast)]
    words += [f"Left out before the search: {line}." for line in forecast.dropped]
    words += [EXPOSED, RUNNER_UP]
    tables = [_strategies(plan), _rivals(forecast), _buffers(plan, forecast)]
    if plan.schedule is not None:
        tables.insert(2, lane_tables.of_lanes(plan.schedule))
    return Explanation(tuple(words), tuple(table for table in tables if table.rows))


def _made_for(plan: Plan) -> str:
    about = f"{counted(len(plan.strategies), 'tensor')}, {counted(len(plan.groups), 'group')} of fused ones"
    made = plan.made_for
    if made is None:
        return f"A plan of {about}, made by hand for any cluster. Digest {plan.digest[:12]}."
    where = f"{counted(made.nodes, 'node')} of {counted(made.ranks_per_node, 'rank')}"
    versions = ", ".join(f"{k} {v}" for k, v in made.fingerprint.items() if k not in ("nodes", "ranks_per_node"))
    return (
        f"A plan of {about}, in {'GPU' if made.device == 'gpu' else 'host'} memory, for {where}"
        f"{f' ({versions})' if versions else ''}. Digest {plan.digest[:12]}."
    )


def _chosen(plan: Plan) -> list[str]:
    chosen = plan.chosen
    if chosen is None:
        return []
    return [
        f"A session with plan='auto' chose it: a step took {ms(chosen.seconds)} in its trials. Allowed were "
        f"{', '.join(chosen.compressors) or 'no compressors'}, with accuracy={chosen.accuracy!r} for the optimizer "
        f"{chosen.optimizer!r}.{'' if chosen.finished else ' The trials have not ended.'}"
    ]


def _step(plan: Plan, f: Forecast) -> str:
    gap = 0.0 if plan.gap is None else plan.gap
    return (
        f"Predicted step: {ms(f.seconds)}. Computing takes {ms(f.compute)} of it; synchronising adds {ms(f.exposed)}, "
        f"its exposed time. No step is shorter than {ms(f.bound)} ({f.bound_kind}): the gap is at most {gap:.2%}."
    )


def _worth(plan: Plan, f: Forecast) -> str:
    """What compression gains, or why there is none."""
    if f.forgone:
        return (
            f"Nothing is compressed: the best plan that compresses would gain {ms(f.forgone)}, which its noise of "
            f"{ms(f.noise)} could explain."
        )
    if all(strategy.compressor == "none" for strategy in plan.strategies.values()):
        return "Nothing is compressed: compression gains nothing here."
    error = "" if f.error is None else f" The plan's error is {f.error:.3g} (0: nothing is lost)."
    return (
        f"The best plan without compression takes {ms(f.dense)}: compression gains {ms(f.dense - f.seconds)}, of which "
        f"{ms(f.noise)} is uncertain.{error}"
    )


def _method(plan: Plan, f: Forecast) -> str:
    text = f"The timeline is that of order {f.order!r} with lanes {f.lanes!r}."
    return text if plan.schedule is None else f"{text} A session does the operations in the order of this schedule."


def _strategies(plan: Plan) -> Table:
    """How many tensors have which strategy, the most frequent first."""
    found = Counter(plan.strategies.values())
    grouped = Counter(plan.strategy(group[0]) for group in plan.groups)
    rows = tuple(
        (str(count), str(grouped.get(one, 0)), one.compressor, sentence(one)) for one, count in found.most_common()
    )
    return Table("Strategies", ("tensors", "groups", "compressor", "strategy"), rows, ("compressor", "strategy"))


def _rivals(f: Forecast) -> Table:
    """The other plans, of each kind that with the compressor that suits it best."""
    best: dict[str, tuple[str, float]] = {}
    for name, seconds in sorted(f.baselines.items(), key=lambda item: item[1]):
        best.setdefault(name.split(" ")[0], (name, seconds))
    rows = tuple(
        (name, milliseconds(seconds), f"{seconds / f.seconds - 1:+.1%}" if f.seconds else "")
        for name, seconds in best.values()
    )
    return Table("Other plans", ("plan", "step ms", "against this plan"), rows, ("plan",))


def _buffers(plan: Plan, f: Forecast) -> Table:
    header = ("tensors", "strategy", "takes ms", "overlapped", "exposed", "runner-up", "slower by", "dense slower by")
    rows = tuple(
        (
            _name(entry.tensors), short(plan.strategy(entry.tensors[0])), milliseconds(entry.seconds),
            milliseconds(entry.overlapped), milliseconds(entry.exposed),
            short(entry.runner_up) if entry.runner_up else "none", milliseconds(entry.margin),
            milliseconds(entry.dense_margin),
        )
        for entry in f.buffers
    )  # fmt: skip
    return Table(
        "Tensors, in the order of the backward pass; milliseconds", header, rows, ("tensors", "strategy", "runner-up")
    )


def _name(tensors: Sequence[str]) -> str:
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} and {len(tensors) - 1} more"


# --- one tensor -------------------------------------------------------------------------------------------------------


def _of_tensor(plan: Plan, name: str) -> Explanation:
    if name not in plan.strategies and plan.default is None:
        near = difflib.get_close_matches(name, plan.strategies, 3)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"expected one of {counted(len(plan.strategies), 'tensor')}"
        )
        raise PlanError(f"tensor {name!r}: the plan does not know it; {hint}")
    strategy = plan.strategy(name)
    group = next((group for group in plan.groups if name in group), (name,))
    words = [f"{name}: {sentence(strategy)}", f"As a route: {strategy.compressor} {strategy.route}"]
    if len(group) > 1:
        others = [other for other in group if other != name]
        words.append(f"It travels in one buffer with {counted(len(others), 'other')}: {', '.join(others)}.")
    entry = next((e for e in plan.forecast.buffers if name in e.tensors), None) if plan.forecast else None
    words += _outlook(strategy, entry) if entry else ("Nothing is predicted for it.",)
    if plan.schedule is None or buffer_name(group) not in plan.schedule.buffers:
        return Explanation(tuple(words))
    return Explanation((*words, lane_tables.WAITED), (lane_tables.of_buffer(plan.schedule, buffer_name(group)),))


def _outlook(strategy: Strategy, entry: Outlook) -> tuple[str, ...]:
    whose = "The buffer's operations take" if len(entry.tensors) > 1 else "Its operations take"
    words = [
        f"{whose} {ms(entry.seconds)}: {ms(entry.overlapped)} overlapped, {ms(entry.exposed)} exposed.",
        EXPOSED.capitalize(),
    ]
    if entry.runner_up is None:
        words.append("No other strategy is ever quicker, so there is no runner-up.")
    else:
        words.append(f"The runner-up makes {_longer(entry.margin)}: {sentence(entry.runner_up)}")
        words.append(f"As a route: {entry.runner_up.compressor} {entry.runner_up.route}")
    if strategy.compressor != "none":
        words.append(f"Without compression it would make {_longer(entry.dense_margin)}.")
    return tuple(words)


def _longer(seconds: float) -> str:
    if seconds == 0:
        return "the step no longer"
    return f"the step {ms(abs(seconds))} {'longer' if seconds > 0 else 'shorter'}"


# --- routes in words --------------------------------------------------------------------------------------------------

_WHERE: Mapping[Level, str] = {"flat": "among all ranks", "intra": "inside the node", "inter": "between nodes"}
_DENSE: Mapping[Op, str] = {
    "allreduce": "summed",
    "reduce_scatter": "summed in parts, one for each rank,",
    "reduce": "summed on one rank",
    "allgather": "joined from its parts",
    "broadcast": "handed to all",
}
_PACKED: Mapping[Op, str] = {
    "allreduce": "summed as payloads",
    "reduce_scatter": "summed as payloads in parts, one for each rank,",
    "reduce": "summed as payloads on one rank",
    "allgather": "gathered as payloads by all",
    "alltoall": "dealt out as payloads, a part to each rank,",
    "gather": "gathered as payloads on one rank",
    "broadcast": "handed to all as payloads",
}


def sentence(strategy: Strategy) -> str:
    """How a tensor travels, as a sentence.

    >>> sentence(Strategy("onebit", "flat-allgather"))
    'compressed with onebit on the CPU, gathered as payloads by all among all ranks, decoded on the CPU.'
    """
    parts, packed = [], False
    for step in strategy.route.steps:
        parts.append(_step_in_words(step, packed, strategy.compressor))
        packed = packed if isinstance(step, Collective) else isinstance(step, Encode)
    return ", ".join(part.rstrip(",") for part in parts) + "."


def _step_in_words(step: RouteStep, packed: bool, compressor: str) -> str:
    if isinstance(step, Collective):
        return f"{(_PACKED if packed else _DENSE)[step.op]} {_WHERE[step.level]}"
    device = step.device.upper()
    return f"compressed with {compressor} on the {device}" if isinstance(step, Encode) else f"decoded on the {device}"


@lru_cache(maxsize=1 << 12)
def short(strategy: Strategy) -> str:
    """Compressor and route in a few letters, for tables: by the name of the route if it has one."""
    return f"{strategy.compressor}: {_short_route(strategy.route)}"


def _short_route(route: Route) -> str:
    devices = sorted({step.device for step in route.steps if not isinstance(step, Collective)})
    name = _NAMES.get(str(route.on("cpu"))) if len(devices) < 2 else None
    return " ".join([name or _initials(route), *(f"@{device}" for device in devices if name)])


def _initials(route: Route) -> str:
    verbs = {"encode": "enc", "decode": "dec"}
    steps = [str(step).split("@") for step in route.steps]
    return " ".join(f"{verbs.get(verb, verb)}@{where}" for verb, where in steps)


_NAMES = {spec: name for name, spec in ROUTES.items()}


# --- numbers ----------------------------------------------------------------------------------------------------------


def ms(seconds: float) -> str:
    """Milliseconds with their unit, as people read them."""
    return f"{milliseconds(seconds)} ms"
