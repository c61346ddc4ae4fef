"""Changing plans: what tensors are owed comes along, whichever way they travel from then on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import device
from ..collectives.kept import CARRY, Key
from ..collectives.messages.agreement import allgather_json, on_every_rank
from ..collectives.messages.transport import Transport
from ..errors import ConfigError, MismatchError, PlanError
from ..options import Options
from ..state.memory import Keeping, Members, Memory, Weights
from ..state.resharding import Sums, reduced
from ..types import Plan
from .batches import check_fit, other_versions


def options_with(options: Options, plan: Plan) -> Options:
    """The options of a session that goes on by a plan.

    Raises:
        ConfigError: the plan's strategies do not go with the other options; PlanError: it was made for another cluster.
    """
    found = replace(options, plan=plan, compressor="none", route=None)
    problems = found.conflicts() + [text for text in [other_versions(plan)] if text]
    if problems:
        raise ConfigError("; ".join(problems))
    return found


def agree_on_plan(transport: Transport, options: Options, plan: Plan, problem: str | None) -> Options:
    """``options_with``, checked on all ranks. Collective.

    Args:
        problem: what is wrong on this rank already; None: nothing.

    Raises:
        PlanError: on every rank, if the plan does not fit on one; MismatchError: the ranks have different plans.
    """

    def check() -> Options:
        if problem is not None:
            raise PlanError(problem)
        found = options_with(options, plan)
        check_fit((), found, transport.topology)
        return found

    found, digests = on_every_rank(transport, check, PlanError, say=lambda _: plan.digest)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise MismatchError(
            f"follow: {transport.describe(0)} and {transport.describe(other)} have different plans; pass the same plan "
            f"on every rank"
        )
    return found


def carried_along(transport: Transport, keeping: Keeping, old: Plan | None, new: Plan) -> Keeping:
    """What is kept when tensors travel by another plan from now on. Collective; nothing may be under way.

    What travels as before keeps all of it, bit for bit. Of the others the weighted mean of the residuals is kept, the
    same on every rank, and what else was kept of them begins anew.
    """
    moved = _moved(keeping.names(), old, new)
    kept = keeping.without(moved, keeping.counts_of(new.groups))
    owed = _owed(transport, keeping, moved)
    for text, array in kept.memory.items():
        _add(owed, text, array)
    return replace(kept, memory=Memory(owed))


def _owed(transport: Transport, keeping: Keeping, moved: Mapping[tuple[str, int], Members]) -> dict[str, Any]:
    """The mean of the residuals of some tensors, whole, float32, by tensor. Collective."""
    weights, found = Weights(keeping.weights), Sums()
    for text, value in keeping.memory.items():
        key = Key.parse(text)
        if key.what == "residual" and (key.name, key.n) in moved:
            here = np.empty(value.size, np.float32)
            device.copy(here, value)
            found.add(key, 1 / transport.topology.size if key.point == CARRY else weights.of(key), here)
    owed: dict[str, Any] = {}
    for key, mean in _means(transport, found):
        first = 0
        for name, n in keeping.members(key.name, key.n):
            _add(owed, str(Key(name, n, CARRY, 0, n, "residual")), mean[first : first + n].copy())
            first += n
    return owed


def _means(transport: Transport, found: Sums) -> list[tuple[Key, Any]]:
    """Sums over the ranks, by key, whichever rank has a part. Collective."""
    said = allgather_json(transport, json.dumps(sorted(found.sums)).encode())
    keys = [Key.parse(text) for text in sorted({key for keys in said for key in keys})]
    return [(key, reduced(transport, found.sums.get(str(key)), key.n)) for key in keys]


def evened(transport: Transport, keeping: Keeping) -> Keeping:
    """What waits whole for tensors, as the mean over the ranks. Collective; nothing may be under way.

    While tensors travel dense every rank may be owed something else. Where they are compressed after that, ranks take
    the shares of their own regions only, so all must have the same.
    """
    found = Sums()
    memory = dict(keeping.memory)
    for text in keeping.memory:
        key = Key.parse(text)
        if key.point == CARRY and key.what == "residual":
            found.add(key, 1 / transport.topology.size, np.asarray(memory.pop(text)))
    for key, mean in _means(transport, found):
        memory[str(key)] = mean
    return replace(keeping, memory=Memory(memory))


def _add(owed: dict[str, Any], key: str, part: Any) -> None:
    """A tensor may be owed something by itself, and as one of a group that it was in before."""
    owed[key] = owed[key] + part if key in owed else part


def _moved(kept: Mapping[tuple[str, int], Members], old: Plan | None, new: Plan) -> dict[tuple[str, int], Members]:
    """Which tensors, by themselves or compressed as one, travel otherwise by another plan."""
    if old is None:
        return dict(kept)
    same = {group[0] for group in set(old.groups) & set(new.groups) if group}  # they may be large: compared once
    return {one: members for one, members in kept.items() if not _alike(members[0][0], old, new, same)}


def _alike(name: str, old: Plan, new: Plan, same: Set[str]) -> bool:
    """Whether a tensor travels as before. ``same``: the first tensors of the groups that both plans have."""
    before, after = (plan.group_of.get(name, (None,))[0] for plan in (old, new))
    if before != after or (before is not None and before not in same):
        return False
    return old.strategies.get(name, old.default) == new.strategies.get(name, new.default)
