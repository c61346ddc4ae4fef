"""Changing plans: the checks, and the residuals of tensors that change their route, compressor or group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np

from .. import compressors
from ..arrays import device
from ..collectives.messages.agreement import allgather_json, on_every_rank
from ..collectives.messages.transport import Transport
from ..collectives.store_keys import OF_CALLS, OF_RANK, WHOLE, Key
from ..errors import ConfigError, MismatchError, PlanError
from ..options import Options
from ..state.resharding import Sums, reduced
from ..state.store import Members, StateStore, SyncState, Weights
from ..types import Plan
from .batches import check_fit, other_versions


def with_plan(options: Options, plan: Plan) -> Options:
    """The options with a plan, which says what is dense; not checked."""
    return replace(options, plan=plan, compressor="none", route=None, dense=(), dense_steps=0)


def options_with(options: Options, plan: Plan) -> Options:
    """The options of a session that continues with ``plan``, which says what is dense.

    Raises:
        ConfigError: the plan's strategies do not go with the other options; PlanError: it was made for another cluster.
    """
    found = with_plan(options, plan)
    problems = found.conflicts() + [text for text in [other_versions(plan)] if text]
    if problems:
        raise ConfigError("; ".join(problems))
    return found


def agree_on_plan(transport: Transport, options: Options, plan: Plan, problem: str | None) -> Options:
    """``options_with``, checked on all ranks. Collective.

    Args:
        problem: a problem that this rank already has; None: none.

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


def resharded_for_plan(transport: Transport, sync_state: SyncState, old: Plan | None, new: Plan) -> SyncState:
    """The state of a session that changes its plan. Collective; no segment may be active.

    Tensors that travel as before keep their state bit for bit. Of the others, only the residuals are kept. No data are
    exchanged for them: each rank adds what it has to its next gradient, times what makes the mean complete. Methods
    that average gradients over time are the exception: they would add it again and again. Their tensors get the
    weighted mean of the residuals, the same on every rank, as a residual.
    """
    moved = _moved(sync_state.names(), old, new)
    kept = sync_state.without(moved, sync_state.counts_of(new.groups))
    averaging = _averaging(new)
    split = {one for one, members in moved.items() if any(_spec(new, name) in averaging for name, _ in members)}
    arrays = _residuals(transport, sync_state, moved, split if averaging else None)
    for text, array in kept.store.items():
        _add(arrays, text, array)
    return replace(kept, store=StateStore(arrays))


def _averaging(plan: Plan) -> Set[str]:
    """The specs of a plan's compressors that average gradients over time."""
    specs = {strategy.compressor for strategy in (*plan.strategies.values(), plan.default) if strategy is not None}
    return {spec for spec in specs if spec != "none" and compressors.get(spec).averages_over_time}


def _spec(plan: Plan, name: str) -> str | None:
    strategy = plan.strategies.get(name, plan.default)
    return None if strategy is None else strategy.compressor


def _residuals(
    transport: Transport, sync_state: SyncState, moved: Mapping[tuple[str, int], Members],
    split: Set[tuple[str, int]] | None,
) -> dict[str, Any]:  # fmt: skip
    """The residuals of tensors that travel differently, float32, one array per tensor, by key. Collective.

    Those of tensors in ``split`` are the same on every rank. The others differ: their mean over the ranks is what is
    missing in the mean of the tensor. A rank may know none of the tensors that others have in ``split``; None says that
    no rank has any.
    """
    weights, size = Weights(sync_state.weights), transport.topology.size
    found, own = Sums(), Sums()
    for text, value in sync_state.store.items():
        key = Key.parse(text)
        if key.what == "residual" and (key.name, key.n) in moved:
            here = np.empty(value.size, np.float32)
            device.copy(here, value)
            weight = 1 / size if key.point == WHOLE else weights.of(key)
            if split and (key.name, key.n) in split:
                found.add(key, weight, here)
            else:
                own.add(key, size * weight, here)
    mine = [(Key.parse(text), total.astype(np.float32)) for text, total in own.sums.items()]
    residuals: dict[str, Any] = {}
    means = [] if split is None else _means(transport, found)
    for key, mean in [*mine, *means]:
        first = 0
        for name, n in sync_state.members(key.name, key.n):
            _add(residuals, str(Key(name, n, WHOLE, 0, n, "residual")), mean[first : first + n].copy())
            first += n
    return residuals


def _means(transport: Transport, found: Sums) -> list[tuple[Key, Any]]:
    """The sums over the ranks, by key; a rank may have a part of any of them. Collective."""
    said = allgather_json(transport, json.dumps(sorted(found.sums)).encode())
    keys = [Key.parse(text) for text in sorted({key for keys in said for key in keys})]
    return [(key, reduced(transport, found.sums.get(str(key)), key.n)) for key in keys]


def averaged_pending(transport: Transport, sync_state: SyncState) -> SyncState:
    """The state with all pending residuals averaged over the ranks. Collective; no segment may be active.

    After a change of plans they may differ between ranks. A method with a momentum takes on each rank only the regions
    of that rank, so all ranks must have the same.
    """
    found = Sums()
    store = dict(sync_state.store)
    for text in sync_state.store:
        key = Key.parse(text)
        if key.point == WHOLE and key.what == "residual":
            found.add(key, 1 / transport.topology.size, np.asarray(store.pop(text)))
    for key, mean in _means(transport, found):
        store[str(key)] = mean
    return replace(sync_state, store=StateStore(store))


def _add(arrays: dict[str, Any], key: str, part: Any) -> None:
    """Add a part: a tensor may have a residual by itself, and as a member of a former group."""
    arrays[key] = arrays[key] + part if key in arrays else part


def _moved(kept: Mapping[tuple[str, int], Members], old: Plan | None, new: Plan) -> dict[tuple[str, int], Members]:
    """The tensors, or groups compressed as one, that travel differently by the new plan."""
    kept = {one: members for one, members in kept.items() if not _of_call(one[0], new)}
    if old is None:
        return kept
    same = {group[0] for group in set(old.groups) & set(new.groups) if group}  # they may be large: compared once
    return {one: members for one, members in kept.items() if not _alike(members[0][0], old, new, same)}


def _of_call(name: str, plan: Plan) -> bool:
    """Whether these are the residuals of another call than ``sync`` and ``push``, to which no plan applies."""
    return name.endswith(OF_RANK) or (name.startswith(OF_CALLS) and name not in plan.strategies)


def _alike(name: str, old: Plan, new: Plan, same: Set[str]) -> bool:
    """Whether a tensor travels as before. ``same``: the first tensors of the groups that both plans have."""
    before, after = (plan.group_of.get(name, (None,))[0] for plan in (old, new))
    if before != after or (before is not None and before not in same):
        return False
    return old.strategies.get(name, old.default) == new.strategies.get(name, new.default)
